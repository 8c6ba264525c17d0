"""The OpenAPI document: every route describes itself where it is declared, with :func:`describe`.

Schemas are taken from the types that validate (requests) and that the builders return (answers), errors from
the table of codes and statuses. Nothing is listed twice; a route without :func:`describe` fails a test.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from http import HTTPStatus
from typing import Any, Final

from fastapi import FastAPI
from pydantic import TypeAdapter
from starlette.responses import Response

from contracts.errors import ErrorBody, ErrorCode, http_status

from .api_parameters import Parameter

JsonSchema = dict[str, Any]

_REFERENCE: Final = "#/components/schemas/{model}"
_JSON: Final = "application/json"
#: What reading any JSON body can come to.
_BODY_ERRORS: Final = (
    ErrorCode.INVALID_JSON,
    ErrorCode.INVALID_REQUEST,
    ErrorCode.INVALID_VALUE,
    ErrorCode.REQUEST_TOO_LARGE,
    ErrorCode.UNSUPPORTED_MEDIA_TYPE,
)
#: What asking for a model can come to.
MODEL_ERRORS: Final = (ErrorCode.MODEL_NOT_FOUND, ErrorCode.MODEL_NOT_ALLOWED)
#: Why a request that is valid may not be accepted now.
ADMISSION_ERRORS: Final = (
    ErrorCode.UNSUPPORTED,
    ErrorCode.CONVERSATION_BUSY,
    ErrorCode.IDEMPOTENCY_MISMATCH,
    ErrorCode.QUEUE_FULL,
    ErrorCode.OVERLOADED,
    ErrorCode.REQUESTS_LIMIT,
    ErrorCode.TOKENS_LIMIT,
    ErrorCode.CONCURRENCY_LIMIT,
    ErrorCode.ENQUEUED_LIMIT,
    ErrorCode.DAILY_QUOTA,
    ErrorCode.EXCEEDS_LIMIT,
    ErrorCode.UNAVAILABLE,
)
#: How a request can end without a reply.
REPLY_ERRORS: Final = (
    ErrorCode.CONTEXT_LENGTH_EXCEEDED,
    ErrorCode.CONTENT_FILTER,
    ErrorCode.CANCELLED,
    ErrorCode.STREAM_EXPIRED,
    ErrorCode.STREAM_LOST,
    ErrorCode.ENGINE_ERROR,
    ErrorCode.BAD_RECORD,
    ErrorCode.REQUEST_LOST,
    ErrorCode.WORKER_LOST,
    ErrorCode.MODERATION_UNAVAILABLE,
    ErrorCode.DEADLINE_EXCEEDED,
    ErrorCode.UNAVAILABLE,
)
_ERROR_HEADERS: Final[dict[int, dict[str, Any]]] = {
    401: {"WWW-Authenticate": {"schema": {"type": "string"}, "required": True}},
    429: {"Retry-After": {"description": "Seconds.", "schema": {"type": "integer", "minimum": 0}}},
    503: {"Retry-After": {"description": "Seconds.", "schema": {"type": "integer", "minimum": 0}}},
}
_REQUEST_ID_HEADER: Final = {
    "description": "The id of the chat request, or of this call where it concerns none.",
    "required": True,
    "schema": {"type": "string"},
}


def describe(
    summary: str,
    *,
    tag: str,
    success: Any = None,
    status: int = 200,
    media_type: str = _JSON,
    events: Any = None,
    moved: bool = False,
    others: Mapping[int, Any] | None = None,
    headers: Mapping[str, str] | None = None,
    body: Any = None,
    body_media_type: str = _JSON,
    body_required: bool = True,
    parameters: Collection[Parameter] = (),
    errors: Collection[ErrorCode] = (),
    secured: bool = True,
) -> dict[str, Any]:
    """What a route says of itself, as keyword arguments of FastAPI's route decorators.

    Args:
        summary: one sentence.
        tag: the group of routes it belongs to.
        success: type of the answer (anything pydantic knows), or its JSON schema with a ``title``.
        status: HTTP status of success.
        media_type: media type of the answer.
        events: type of the JSON in each event, where the answer may be a stream of events.
        moved: whether a 303 may name another place to read the answer from.
        others: types of answers with other statuses that are no errors in the API's shape.
        headers: names and descriptions of headers that the answer may have.
        body: type that validates the request's body, or its JSON schema with a ``title``.
        body_media_type: media type of the request's body.
        body_required: whether a body has to be there.
        parameters: query parameters and headers; path parameters are found in the route.
        errors: codes it may answer beside those of the key, the body and the server itself.
        secured: whether it needs an API key.
    """
    codes = {ErrorCode.INTERNAL, *errors}
    codes.update((ErrorCode.INVALID_API_KEY,) if secured else ())
    codes.update(_BODY_ERRORS if body is not None and body_media_type == _JSON else ())
    content: dict[str, Any] = {}
    if success is not None:
        content[media_type] = {"schema": _schema(success)}
    if events is not None:
        content["text/event-stream"] = {"itemSchema": _event(events, codes)}
    responses: dict[int | str, dict[str, Any]] = {
        status: {"description": "Success", "headers": _headers(headers or {})}
    }
    if content:
        responses[status]["content"] = content
    if moved:
        responses[303] = _moved()
    for other, answer in (others or {}).items():
        content = {_JSON: {"schema": _schema(answer)}}
        responses[other] = {"description": HTTPStatus(other).phrase, "content": content}
    extra: dict[str, Any] = {} if secured else {"security": []}
    if body is not None:
        extra["requestBody"] = {
            "required": body_required,
            "content": {body_media_type: {"schema": _schema(body)}},
        }
    if parameters:
        extra["parameters"] = [p.as_openapi() for p in parameters]
    return {
        "summary": summary,
        "tags": [tag],
        "status_code": status,
        "response_class": Response,  # without a media type of its own, so that FastAPI adds no schema
        "responses": responses | _errors(codes),
        "openapi_extra": extra,
    }


class DocumentedApi(FastAPI):
    """An application whose document is what its routes say of themselves."""

    def openapi(self) -> dict[str, Any]:
        """The OpenAPI document, made when it is first asked for."""
        if self.openapi_schema is None:
            self.openapi_schema = _finish(super().openapi())
        return self.openapi_schema


def _finish(document: dict[str, Any]) -> dict[str, Any]:
    """FastAPI's document with the schemas in one place, and with what holds for every answer."""
    schemas: dict[str, Any] = {}
    for operations in document["paths"].values():
        for operation in operations.values():
            answers = operation["responses"]
            if "HTTPValidationError" in str(answers.get("422")):
                del answers["422"]  # FastAPI's guess for every route with a parameter
            for answer in answers.values():
                answer.setdefault("headers", {})["X-Request-Id"] = _REQUEST_ID_HEADER
    _collect(document, schemas)
    document["components"] = {
        "schemas": dict(sorted(schemas.items())),
        "securitySchemes": {"key": {"type": "http", "scheme": "bearer", "description": "An API key."}},
    }
    document["security"] = [{"key": []}]
    return document


def _collect(node: Any, schemas: dict[str, Any]) -> None:
    """Move every ``$defs`` below ``node`` to ``schemas``."""
    if isinstance(node, dict):
        for name, schema in node.pop("$defs", {}).items():
            _collect(schema, schemas)
            if schemas.setdefault(name, schema) != schema:
                raise ValueError(f"two schemas are called {name}")
        for value in node.values():
            _collect(value, schemas)
    elif isinstance(node, list):
        for value in node:
            _collect(value, schemas)


def _schema(of: Any) -> JsonSchema:
    """A reference to the schema of a type, with the schemas it needs as ``$defs``."""
    schema = dict(of) if isinstance(of, dict) else TypeAdapter(of).json_schema(ref_template=_REFERENCE)
    if "title" not in schema:
        return schema
    definitions = {**schema.pop("$defs", {}), schema["title"]: schema}
    return {"$ref": _REFERENCE.format(model=schema["title"]), "$defs": definitions}


def _event(of: Any, codes: Collection[ErrorCode]) -> JsonSchema:
    """One server-sent event: JSON of this type, an error, or the end."""
    payload = {"anyOf": [_schema(of), _error_schema(codes)]}
    data = {"anyOf": [{"const": "[DONE]"}, {"contentMediaType": _JSON, "contentSchema": payload}]}
    return {
        "type": "object",
        "required": ["data"],
        "properties": {
            "id": {"type": "string", "description": "Offset: going on after it gives exactly the rest."},
            "event": {"type": "string"},
            "data": {"type": "string", **data},
        },
    }


def _errors(codes: Collection[ErrorCode]) -> dict[int | str, dict[str, Any]]:
    """The error answers by status."""
    by_status: dict[int, list[ErrorCode]] = {}
    for code in sorted(codes):
        by_status.setdefault(http_status(code), []).append(code)
    return {
        status: {
            "description": "Error: " + ", ".join(by_status[status]),
            "headers": dict(_ERROR_HEADERS.get(status, {})),
            "content": {_JSON: {"schema": _error_schema(by_status[status])}},
        }
        for status in sorted(by_status)
    }


def _error_schema(codes: Collection[ErrorCode]) -> JsonSchema:
    body = _schema(ErrorBody)
    named = {
        "type": "object",
        "required": list(ErrorBody.model_fields),
        "properties": {"code": {"enum": sorted(code.value for code in codes)}},
    }
    return {
        "type": "object",
        "required": ["error"],
        "additionalProperties": False,
        "properties": {"error": {"allOf": [body, named]}},
    }


def _moved() -> dict[str, Any]:
    error = _error_schema([ErrorCode.UNAVAILABLE])
    return {
        "description": "The server is stopping; the reply goes on and is read from another place.",
        "headers": {"Location": {"required": True, "schema": {"type": "string"}}},
        "content": {_JSON: {"schema": error}},
    }


def _headers(described: Mapping[str, str]) -> dict[str, Any]:
    return {
        name: {"description": text, "schema": {"type": "string"}} for name, text in described.items()
    }
