"""The record that asks a worker for room."""

from __future__ import annotations

import pytest

from contracts.errors import RecordError
from contracts.preempt import PREEMPT_HEADERS, PreemptRecord, is_preempt, read_preempt
from contracts.records import DispatchRecord, decode

RECORD = PreemptRecord(preempted_id="chatcmpl-" + "0" * 32, attempt=2, worker_id="w1")


def test_it_is_known_by_its_header_and_reads_as_written() -> None:
    assert is_preempt(PREEMPT_HEADERS)
    assert not is_preempt((("traceparent", b"00-1"),))
    assert read_preempt(RECORD.encode()) == RECORD


@pytest.mark.parametrize(
    "value",
    [None, b"", b"[]", b'{"preempted_id": 1}', RECORD.model_copy(update={"schema_version": 2}).encode()],
)
def test_what_cannot_be_read_is_no_wish(value: bytes | None) -> None:
    assert read_preempt(value) is None


def test_a_worker_that_does_not_know_it_has_no_request_to_end() -> None:
    with pytest.raises(RecordError) as caught:
        decode(DispatchRecord, RECORD.encode())
    assert caught.value.request_id is None
