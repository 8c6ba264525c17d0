"""Errors in the shape of the OpenAI API, and the exception that carries them between folders.

Every user-visible failure is an :class:`ApiError`, whichever road it takes: an HTTP body, a websocket
``error`` frame, the ``error`` of a ``stream.end`` frame or the terminal entry of a token stream.
"""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict

from .limits import RateLimits


class ErrorCode(StrEnum):
    """Every ``error.code`` Headrace emits. Clients may branch on these."""

    INVALID_REQUEST = "invalid_request"
    INVALID_JSON = "invalid_json"
    INVALID_VALUE = "invalid_value"
    UNSUPPORTED = "unsupported_parameter"
    UNSUPPORTED_MEDIA_TYPE = "unsupported_media_type"
    REQUEST_TOO_LARGE = "request_too_large"
    INVALID_API_KEY = "invalid_api_key"
    MODEL_NOT_FOUND = "model_not_found"
    MODEL_NOT_ALLOWED = "model_not_allowed"
    NOT_FOUND = "not_found"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    INVALID_FILE = "invalid_file"
    FILE_IN_USE = "file_in_use"
    BATCH_OVER = "batch_over"
    STORAGE_QUOTA = "storage_quota_exceeded"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    CONTENT_FILTER = "content_filter"
    CONVERSATION_BUSY = "conversation_busy"
    IDEMPOTENCY_MISMATCH = "idempotency_mismatch"
    INVALID_OFFSET = "invalid_offset"
    OFFSET_AHEAD = "offset_ahead"
    STREAM_EXPIRED = "stream_expired"
    STREAM_LOST = "stream_lost"
    QUEUE_FULL = "queue_full"
    OVERLOADED = "overloaded"
    REQUESTS_LIMIT = "requests_limit_exceeded"
    TOKENS_LIMIT = "tokens_limit_exceeded"
    CONCURRENCY_LIMIT = "concurrency_limit_exceeded"
    ENQUEUED_LIMIT = "enqueued_tokens_limit_exceeded"
    DAILY_QUOTA = "daily_quota_exceeded"
    EXCEEDS_LIMIT = "request_exceeds_limit"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    CANCELLED = "cancelled"
    UNAVAILABLE = "service_unavailable"
    MODERATION_UNAVAILABLE = "moderation_unavailable"
    WORKER_LOST = "worker_lost"
    REQUEST_LOST = "request_lost"
    ENGINE_ERROR = "engine_error"
    BAD_RECORD = "bad_record"
    INTERNAL = "internal_error"
    # websocket only
    INVALID_FRAME = "invalid_frame"
    NOT_AUTHENTICATED = "not_authenticated"
    TOO_MANY_STREAMS = "too_many_streams"
    RATE_LIMITED = "rate_limited"


_STATUS: dict[ErrorCode, int] = {
    ErrorCode.UNSUPPORTED_MEDIA_TYPE: 415,
    ErrorCode.REQUEST_TOO_LARGE: 413,
    ErrorCode.INVALID_API_KEY: 401,
    ErrorCode.NOT_AUTHENTICATED: 401,
    ErrorCode.MODEL_NOT_FOUND: 404,
    ErrorCode.MODEL_NOT_ALLOWED: 403,
    ErrorCode.NOT_FOUND: 404,
    ErrorCode.METHOD_NOT_ALLOWED: 405,
    ErrorCode.FILE_IN_USE: 409,
    ErrorCode.BATCH_OVER: 409,
    ErrorCode.STORAGE_QUOTA: 403,
    ErrorCode.CONVERSATION_BUSY: 409,
    ErrorCode.IDEMPOTENCY_MISMATCH: 422,
    ErrorCode.OFFSET_AHEAD: 409,
    ErrorCode.STREAM_EXPIRED: 410,
    ErrorCode.STREAM_LOST: 500,
    ErrorCode.QUEUE_FULL: 429,
    ErrorCode.OVERLOADED: 429,
    ErrorCode.REQUESTS_LIMIT: 429,
    ErrorCode.TOKENS_LIMIT: 429,
    ErrorCode.CONCURRENCY_LIMIT: 429,
    ErrorCode.ENQUEUED_LIMIT: 429,
    ErrorCode.DAILY_QUOTA: 429,
    ErrorCode.RATE_LIMITED: 429,
    ErrorCode.DEADLINE_EXCEEDED: 504,
    ErrorCode.CANCELLED: 499,
    ErrorCode.UNAVAILABLE: 503,
    ErrorCode.MODERATION_UNAVAILABLE: 503,
    ErrorCode.WORKER_LOST: 503,
    ErrorCode.REQUEST_LOST: 503,
    ErrorCode.ENGINE_ERROR: 500,
    ErrorCode.BAD_RECORD: 500,
    ErrorCode.INTERNAL: 500,
}

_TYPE: dict[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    429: "rate_limit_error",
}


def http_status(code: ErrorCode) -> int:
    """HTTP status that goes with ``code`` (400 unless the table says otherwise)."""
    return _STATUS.get(code, 400)


class ErrorBody(BaseModel):
    """The ``error`` object of the OpenAI API.

    ``message`` is written by us and never echoes unchecked user input; ``param`` names the field at
    fault, or is null.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None

    @property
    def status(self) -> int:
        """HTTP status of this error; 500 for a code this version does not know."""
        try:
            return http_status(ErrorCode(self.code)) if self.code else 500
        except ValueError:
            return 500


def error_body(code: ErrorCode, message: str, param: str | None = None) -> ErrorBody:
    """Build the error object for ``code``; the type follows from its HTTP status."""
    status = http_status(code)
    kind = _TYPE.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return ErrorBody(message=message, type=kind, param=param, code=code.value)


class ApiError(Exception):
    """A failure to be told to the client, never retried by us.

    Attributes:
        code: what went wrong.
        body: the error object as the client sees it.
        retry_after_seconds: integer for a ``Retry-After`` header, or None.
        rate_limits: what is left to the caller, where limits were looked at.
    """

    def __init__(
        self,
        code: ErrorCode,
        message: str,
        *,
        param: str | None = None,
        retry_after_seconds: int | None = None,
        rate_limits: RateLimits | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.body = error_body(code, message, param)
        self.retry_after_seconds = retry_after_seconds
        self.rate_limits = rate_limits

    @property
    def status(self) -> int:
        """HTTP status of this error."""
        return http_status(self.code)


class RecordError(Exception):
    """A Kafka record that cannot be read: it goes to the dead-letter topic, never to a retry.

    Attributes:
        reason: ``malformed``, ``invalid`` or ``newer_schema``.
        request_id: the request it belongs to, where that much could be read.
    """

    def __init__(self, reason: str, detail: str, request_id: str | None = None) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail
        self.request_id = request_id
