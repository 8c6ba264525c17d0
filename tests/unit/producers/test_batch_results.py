"""Results of a batch's lines: as records of segments, and as lines of the result files."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from contracts.batch import BatchStatus, ResultKind
from contracts.errors import ErrorCode, error_body
from contracts.records import Usage
from infra.batches_redis import OpenBatch
from producers.batch.ids import is_file_id, line_bytes, result_file_id
from producers.batch.results import LineResult, Tally, answered, cut_off, decode_result, refused
from producers.batch.runner import in_turn
from producers.batch.segments import gathering_seconds
from tests.batches import make_batch

BATCH = make_batch()
_USAGE = st.builds(
    Usage,
    prompt_tokens=st.integers(0, 10**6),
    cached_tokens=st.integers(0, 10**6),
    completion_tokens=st.integers(0, 10**6),
)


@given(st.text(max_size=40), st.text(max_size=20), _USAGE, st.data())
def test_a_record_is_read_as_it_was_written_and_a_part_of_it_is_none_A10_K2(
    text: str, custom_id: str, usage: Usage, data: st.DataObject
) -> None:
    result = answered(BATCH, 7, custom_id, "r", {"text": text}, usage)
    record = result.encode()
    assert decode_result(record) == result
    assert record.decode().splitlines() == [record.decode()[:-1]]
    shown = json.loads(result.text)
    assert (shown["custom_id"], shown["response"]["body"]["text"]) == (custom_id, text)
    part = record[: data.draw(st.integers(0, len(record) - 1))]
    assert decode_result(part) is None


def test_a_refused_line_is_an_http_failure_and_a_cut_off_one_is_none_K11() -> None:
    error = error_body(ErrorCode.CONTEXT_LENGTH_EXCEEDED, "Too long.", "messages")
    shown = json.loads(refused(BATCH, 1, "a", "r", error).text)
    assert (shown["response"]["status_code"], shown["error"]) == (400, None)
    assert shown["response"]["body"]["error"]["code"] == "context_length_exceeded"
    for ending in (BatchStatus.EXPIRED, BatchStatus.CANCELLED):
        shown = json.loads(cut_off(BATCH, 1, "a", ending).text)
        assert (shown["response"], shown["error"]["code"]) == (None, f"batch_{ending}")


@given(st.lists(st.tuples(st.integers(1, 9000), st.sampled_from(ResultKind)), max_size=30))
def test_the_first_result_of_a_line_is_the_one(results: list[tuple[int, ResultKind]]) -> None:
    tally, first = Tally(), dict[int, ResultKind]()
    for line, kind in results:
        usage = Usage(prompt_tokens=1, completion_tokens=2)
        assert tally.add(LineResult(line, kind, b"{}", usage)) == (line not in first)
        first.setdefault(line, kind)
        assert tally.has(line)
    kinds = list(first.values())
    assert tally.completed == kinds.count(ResultKind.OUTPUT)
    assert tally.failed == kinds.count(ResultKind.ERROR)
    assert tally.usage.output_tokens == 2 * len(first)
    assert not tally.has(9001)


def test_whoever_names_a_batchs_things_gives_them_the_same_names() -> None:
    ids = {result_file_id(BATCH, kind) for kind in ResultKind}
    assert len(ids) == 2
    assert all(is_file_id(file_id) for file_id in ids)
    names = {line_bytes(BATCH, line, attempt) for line in range(1, 50) for attempt in range(8)}
    assert len(names) == 49 * 8
    assert {len(name) for name in names} == {10}
    assert line_bytes(BATCH, 1, 0) not in {line_bytes(make_batch(id="batch_" + "0" * 32), 1, 0)}


def test_segments_come_the_less_often_the_more_there_are() -> None:
    assert gathering_seconds(1.0, 0) == gathering_seconds(1.0, 100) == 1.0
    assert gathering_seconds(1.0, 1000) == 10.0
    assert gathering_seconds(1.0, 10**6) == 30.0
    assert gathering_seconds(60.0, 10**6) == 60.0


@given(st.lists(st.sampled_from("abc"), max_size=12), st.integers(1, 6))
def test_no_tenant_gets_more_than_half_of_a_runner(tenants: list[str], at_once: int) -> None:
    batches = [OpenBatch(str(n), tenant) for n, tenant in enumerate(tenants)]
    in_hand: dict[OpenBatch, None] = {}
    for batch in in_turn(batches, in_hand, at_once):
        if len(in_hand) == at_once:
            break
        in_hand[batch] = None
    most = max(1, at_once // 2)
    taken = [batch.tenant_digest for batch in in_hand]
    assert all(taken.count(tenant) <= most for tenant in "abc")
    if len(in_hand) < at_once:
        assert all(taken.count(t) == min(most, tenants.count(t)) for t in "abc")
    assert list(in_hand) == sorted(in_hand, key=lambda b: int(b.batch_id))
