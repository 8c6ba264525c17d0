"""Batches for tests."""

from __future__ import annotations

import json
from typing import Any

from contracts.batch import BatchRecord, BatchStatus, Counts

CHAT = "/v1/chat/completions"


def make_batch(**changes: Any) -> BatchRecord:
    """A batch that is begun."""
    raw: dict[str, Any] = {
        "id": "batch_" + "ab" * 16,
        "tenant": "t1",
        "key_id": "k1",
        "tier": "paid",
        "line_tier": "batch",
        "endpoint": CHAT,
        "input_file_id": "file-" + "cd" * 16,
        "input_path": "uploads/in",
        "completion_window": "24h",
        "window_ms": 86_400_000,
        "created_ms": 1_000_000,
        "output_seconds": 3_600,
    }
    return BatchRecord(**(raw | changes))


def begun(total: int, **changes: Any) -> BatchRecord:
    """A batch of so many lines in progress."""
    return make_batch(status=BatchStatus.IN_PROGRESS, counts=Counts(total=total), **changes)


def input_lines(custom_ids: list[str], body: dict[str, Any] | None = None) -> bytes:
    """An input file."""
    body = body or {"model": "default", "messages": [{"role": "user", "content": "hi"}]}
    lines = [{"custom_id": i, "method": "POST", "url": CHAT, "body": body} for i in custom_ids]
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)
