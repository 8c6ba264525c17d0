"""A word from a scheduler to a worker, in line with the dispatches it comes after: make room.

It lies on the worker's partition of the dispatch topic. Its type is in a header, and it has no field of the
name ``request_id``: a worker that does not know it must not take it for a request that it has to end.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from pydantic import BaseModel, ConfigDict, ValidationError

_HEADER: Final = "record"
_PREEMPT: Final = b"preempt"
_VERSION: Final = 1


class PreemptRecord(BaseModel):
    """Stop a reply and hand it over. A hint: one that cannot be read, or comes too late, is dropped.

    Attributes:
        preempted_id: request id of the reply.
        attempt: the attempt that is meant; one that was dispatched later goes on.
        worker_id: the worker that is meant; a later one of the same partition is not.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    schema_version: int = _VERSION
    preempted_id: str
    attempt: int
    worker_id: str

    def encode(self) -> bytes:
        """UTF-8 JSON."""
        return self.model_dump_json().encode()


#: Kafka headers of a :class:`PreemptRecord`.
PREEMPT_HEADERS: Final = ((_HEADER, _PREEMPT),)


def is_preempt(headers: Iterable[tuple[str, bytes]]) -> bool:
    """Whether a record of a dispatch topic is a :class:`PreemptRecord`, by its headers."""
    return any(name == _HEADER and value == _PREEMPT for name, value in headers)


def read_preempt(value: bytes | None) -> PreemptRecord | None:
    """Read one; None if it cannot be read or is of a newer schema."""
    try:
        record = PreemptRecord.model_validate_json(value or b"")
    except ValidationError:
        return None
    return record if record.schema_version <= _VERSION else None
