"""Ids of files, batches and of the requests that lines become.

What a batch makes is named by the batch alone: a runner that does something again does it to the same thing.
"""

from __future__ import annotations

import hashlib
import re
from typing import Final

from contracts.batch import BatchRecord, FilePurpose, ResultKind

_ID: Final = {kind: re.compile(kind + r"[0-9a-f]{32}", re.ASCII) for kind in ("file-", "batch_")}


def make_file_id(random_bytes: bytes) -> str:
    """Id of an uploaded file, from 16 bytes of a secure source."""
    return f"file-{random_bytes[:16].hex()}"


def make_batch_id(random_bytes: bytes) -> str:
    """Id of a batch, from 16 bytes of a secure source."""
    return f"batch_{random_bytes[:16].hex()}"


def repeatable_batch_id(tenant: str, idempotency_key: str) -> str:
    """Id of the batch that a call makes, however often it comes."""
    return make_batch_id(bytes.fromhex(_digest("batch", tenant, idempotency_key)[:32]))


def is_file_id(text: object) -> bool:
    """Whether ``text`` has the form of a file's id (anything else is never looked up)."""
    return isinstance(text, str) and _ID["file-"].fullmatch(text) is not None


def is_batch_id(text: object) -> bool:
    """Whether ``text`` has the form of a batch's id."""
    return isinstance(text, str) and _ID["batch_"].fullmatch(text) is not None


def result_file_id(batch: BatchRecord, kind: ResultKind) -> str:
    """Id of the file with a batch's results of one kind."""
    return f"file-{_digest(batch.id, FilePurpose.BATCH_OUTPUT, kind)[:32]}"


def line_bytes(batch: BatchRecord, line: int, attempt: int) -> bytes:
    """The 10 bytes that stand for randomness in the id of a line's request.

    Whoever runs the line makes the same request of it. Others' requests have other bytes: batches' ids are
    random, or digests that begin with their tenant.

    Args:
        line: number of the line.
        attempt: from 0; another one makes another request, after one that came to nothing.
    """
    return bytes.fromhex(_digest(batch.id, str(line), str(attempt))[:20])


def result_id(batch: BatchRecord, line: int) -> str:
    """Id of a line of the result files."""
    return f"batch_req_{_digest(batch.id, str(line))[:32]}"


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
