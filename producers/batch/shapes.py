"""Files and batches as the OpenAI API shows them."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict

from contracts.batch import BatchRecord, BatchStatus, FilePurpose, FileRecord, ResultKind

_CLOSED = ConfigDict(extra="forbid")


@with_config(_CLOSED)
class FileObject(TypedDict):
    """A file."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: FilePurpose
    status: Literal["processed"]
    status_details: None


@with_config(_CLOSED)
class FileList(TypedDict):
    """A page of files."""

    object: Literal["list"]
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


@with_config(_CLOSED)
class FileDeleted(TypedDict):
    """A file is there no longer."""

    id: str
    object: Literal["file"]
    deleted: Literal[True]


@with_config(_CLOSED)
class BatchError(TypedDict):
    """What is wrong with a batch's input; ``line`` counts from 1."""

    code: str
    message: str
    param: str | None
    line: int | None


@with_config(_CLOSED)
class BatchErrors(TypedDict):
    """Why a batch failed."""

    object: Literal["list"]
    data: list[BatchError]


@with_config(_CLOSED)
class RequestCounts(TypedDict):
    """Lines of a batch: all of them, and those that have a result."""

    total: int
    completed: int
    failed: int


@with_config(_CLOSED)
class InputTokensDetails(TypedDict):
    """How many of the input tokens were found in the KV cache."""

    cached_tokens: int


@with_config(_CLOSED)
class OutputTokensDetails(TypedDict):
    """Always none."""

    reasoning_tokens: int


@with_config(_CLOSED)
class BatchUsageObject(TypedDict):
    """Tokens of the lines that have a result."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


@with_config(_CLOSED)
class BatchObject(TypedDict):
    """A batch; a time is null until its state is reached."""

    id: str
    object: Literal["batch"]
    endpoint: str
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: BatchStatus
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    usage: BatchUsageObject
    metadata: dict[str, str] | None


@with_config(_CLOSED)
class BatchList(TypedDict):
    """A page of batches."""

    object: Literal["list"]
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


def file_object(record: FileRecord) -> FileObject:
    """A file."""
    return {
        "id": record.id,
        "object": "file",
        "bytes": record.size_bytes,
        "created_at": record.created_ms // 1000,
        "expires_at": record.expires_ms // 1000,
        "filename": record.filename,
        "purpose": record.purpose,
        "status": "processed",
        "status_details": None,
    }


def batch_object(batch: BatchRecord) -> BatchObject:
    """A batch. Its files are shown from its end on: only then are they known to everybody."""

    def at(status: BatchStatus) -> int | None:
        reached = batch.times.get(status)
        return None if reached is None else reached // 1000

    def file_id(kind: ResultKind) -> str | None:
        record = batch.files.get(kind) if batch.status.is_final else None
        return None if record is None else record.id

    errors: BatchErrors | None = None
    if batch.faults:
        errors = {
            "object": "list",
            "data": [
                {"code": f.code, "message": f.message, "param": f.param, "line": f.line}
                for f in batch.faults
            ],
        }
    usage = batch.usage
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": errors,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": batch.status,
        "output_file_id": file_id(ResultKind.OUTPUT),
        "error_file_id": file_id(ResultKind.ERROR),
        "created_at": batch.created_ms // 1000,
        "in_progress_at": at(BatchStatus.IN_PROGRESS),
        "expires_at": batch.expires_ms // 1000,
        "finalizing_at": at(BatchStatus.FINALIZING),
        "completed_at": at(BatchStatus.COMPLETED),
        "failed_at": at(BatchStatus.FAILED),
        "expired_at": at(BatchStatus.EXPIRED),
        "cancelling_at": at(BatchStatus.CANCELLING),
        "cancelled_at": at(BatchStatus.CANCELLED),
        "request_counts": {
            "total": batch.counts.total,
            "completed": batch.counts.completed,
            "failed": batch.counts.failed,
        },
        "usage": {
            "input_tokens": usage.input_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.input_tokens + usage.output_tokens,
        },
        "metadata": batch.metadata,
    }
