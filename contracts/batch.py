"""Batches and files as they are kept: what a batch runner, a gateway and the stores share.

A batch is a file of requests, one a line. What it is at any time is one record; every change of it is a new
record (:mod:`producers.batch.life` decides which). The results of its lines are not in it but on the storage.
"""

from __future__ import annotations

import hashlib
from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field


class _Kept(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class BatchStatus(StrEnum):
    """The states of a batch, in the OpenAI API's words."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        """Whether nothing changes any more."""
        return self in (
            BatchStatus.FAILED,
            BatchStatus.COMPLETED,
            BatchStatus.EXPIRED,
            BatchStatus.CANCELLED,
        )


class LineFault(_Kept):
    """Why a batch cannot be run.

    Attributes:
        line: line of the input file, from 1; None where no line is at fault.
    """

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class Counts(_Kept):
    """Lines of a batch: all, and those with a result on the storage."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchUsage(_Kept):
    """Tokens of the lines with a result."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


class FilePurpose(StrEnum):
    """What files are for, in the OpenAI API's words."""

    BATCH = "batch"
    BATCH_OUTPUT = "batch_output"


class FileRecord(_Kept):
    """A file.

    Attributes:
        path: where its content is on the storage.
    """

    id: str
    tenant: str
    filename: str
    purpose: FilePurpose
    size_bytes: int
    created_ms: int
    expires_ms: int
    path: str


class ResultKind(StrEnum):
    """Which of a batch's two files the result of a line goes into."""

    OUTPUT = "output"
    ERROR = "error"


class BatchRecord(_Kept):
    """A batch.

    Attributes:
        tenant / key_id / tier: whose it is: the key that created it.
        line_tier: the tier its lines count as.
        input_path: where the content of its input is on the storage.
        window_ms: how long it may take from its creation.
        times: when each state was reached, Unix milliseconds.
        ending: the state it is on its way to, from the moment no more of its lines are begun.
        output_seconds: lifetime of the files it makes.
        body_digest: of the call that made it, where that had an idempotency key.
        runs: how often it was taken in hand; the number of the run that has it.
        files: its result files, from the moment it is decided which they are.
    """

    id: str
    tenant: str
    key_id: str
    tier: str
    line_tier: str
    endpoint: str
    input_file_id: str
    input_path: str
    completion_window: str
    window_ms: int
    created_ms: int
    output_seconds: int
    metadata: dict[str, str] | None = None
    body_digest: str | None = None
    status: BatchStatus = BatchStatus.VALIDATING
    ending: BatchStatus | None = None
    times: dict[BatchStatus, int] = Field(default_factory=dict)
    faults: list[LineFault] = Field(default_factory=list)
    counts: Counts = Counts()
    usage: BatchUsage = BatchUsage()
    runs: int = 0
    files: dict[ResultKind, FileRecord] = Field(default_factory=dict)

    @property
    def expires_ms(self) -> int:
        """When it is ended as expired, Unix milliseconds."""
        return self.created_ms + self.window_ms


def tenant_digest(tenant: str) -> str:
    """Names a tenant in keys and paths."""
    return hashlib.sha256(tenant.encode()).hexdigest()[:32]
