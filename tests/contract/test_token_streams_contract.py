"""The fenced token stream on real servers: idempotent, fenced, sealed, gone."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator

import pytest
import redis.asyncio as redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from contracts.entries import (
    Accepted,
    Dispatched,
    Entry,
    Moderated,
    SealAfter,
    StartAfter,
    Started,
    Terminal,
    Text,
)
from contracts.identity import make_request_id
from contracts.reply import Reply
from contracts.stream_ids import ACCEPTED, DISPATCHED, MODERATED, SEAL, START, StreamId
from contracts.tiers import FinishReason, Status
from contracts.token_stream import Appended, StreamsUnavailable
from infra.settings import RedisSettings, StreamSettings
from infra.stream_redis import RedisTokenStreams, connect, stream_key
from tests.attempts import start_attempt
from tests.redis_servers import SERVERS, server_url

ACCEPT = Accepted(tenant="t", tier="paid", model="m", created_ms=1, conversation_id="c")
START_ENTRY = Started(worker_id="w", model_revision="1")
DONE = Terminal(status=Status.COMPLETED, finish_reasons=[FinishReason.STOP])


@pytest.fixture(scope="module", params=SERVERS)
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with server_url(request.param, tmp_path_factory.mktemp("redis")) as found:
        yield found


@pytest.fixture
async def client(url: str) -> AsyncIterator[redis.Redis]:
    made = connect(RedisSettings(url=url))
    yield made
    await made.aclose()


@pytest.fixture
def streams(client: redis.Redis) -> RedisTokenStreams:
    return RedisTokenStreams(client, StreamSettings(open_ttl_seconds=100, retention_seconds=50))


def new_id() -> str:
    return make_request_id(1, secrets.token_bytes(10))


async def opened(streams: RedisTokenStreams) -> str:
    rid = new_id()
    await streams.create(rid, ACCEPT)
    return rid


async def one(streams: RedisTokenStreams, rid: str, entry_id: StreamId, entry: Entry) -> Appended:
    return (await streams.append([(rid, entry_id, entry)]))[0]


async def test_a_created_stream_holds_its_acceptance_its_owner_and_a_lifetime_h7(
    streams: RedisTokenStreams, client: redis.Redis
) -> None:
    rid = await opened(streams)
    (first,) = await streams.read(rid, START, 10)
    assert (first.id, first.entry) == (ACCEPTED, ACCEPT)
    owner = await streams.owner(rid)
    assert owner is not None
    assert (owner.tenant, owner.conversation_id) == ("t", "c")
    assert 0 < await client.ttl(stream_key(rid)) <= 100


async def test_a_repeated_append_is_refused_and_changes_nothing(streams: RedisTokenStreams) -> None:
    rid = await opened(streams)
    assert await one(streams, rid, MODERATED, Moderated(prompt_tokens=1)) is Appended.OK
    assert await one(streams, rid, MODERATED, Moderated(prompt_tokens=9)) is Appended.FENCED
    assert [e.entry for e in await streams.read_all(rid)] == [ACCEPT, Moderated(prompt_tokens=1)]


async def test_a_new_attempt_fences_the_old_one(streams: RedisTokenStreams) -> None:
    rid = await opened(streams)
    assert await start_attempt(streams, rid, 1) is Appended.OK
    assert await one(streams, rid, StreamId(1, 1), Text("a", (1,))) is Appended.OK
    assert await start_attempt(streams, rid, 2) is Appended.OK
    assert await one(streams, rid, StreamId(1, 2), Text("late", (2,))) is Appended.FENCED
    assert await one(streams, rid, StreamId(2, 2), Text("b", (2,))) is Appended.OK
    assert Reply().extend(await streams.read_all(rid)).choices[0].text == "ab"


async def test_after_the_seal_nothing_is_appended_and_one_end_is_true(
    streams: RedisTokenStreams,
) -> None:
    rid = await opened(streams)
    assert await streams.seal(rid, DONE) is Appended.OK
    assert await streams.seal(rid, Terminal(status=Status.FAILED)) is Appended.SEALED
    assert await one(streams, rid, StreamId(7, 1), Text("x", (1,))) is Appended.SEALED
    assert [e.entry for e in await streams.read_all(rid)] == [ACCEPT, DONE]


async def test_i8_a_worker_that_was_taken_over_cannot_seal(streams: RedisTokenStreams) -> None:
    """Its text is refused as fenced, and its seal, larger than every id, must not get through either."""
    rid = await opened(streams)
    started = Started(worker_id="w", model_revision="1")
    await streams.append([(rid, StreamId(1, 0), started), (rid, StreamId(2, 0), started)])
    late = [(rid, StreamId(1, 1), Text("late", (1,))), (rid, SEAL, SealAfter(DONE, StreamId(1, 1)))]
    assert await streams.append(late) == [Appended.FENCED, Appended.FENCED]
    assert await streams.last_ids([rid]) == [StreamId(2, 0)]
    own = [(rid, StreamId(2, 1), Text("own", (1,))), (rid, SEAL, SealAfter(DONE, StreamId(2, 1)))]
    assert await streams.append(own) == [Appended.OK, Appended.OK]
    again = [(rid, SEAL, SealAfter(DONE, StreamId(2, 1)))]
    assert await streams.append(again) == [Appended.SEALED]


async def test_i8_a_takeover_starts_only_from_all_that_is_out(streams: RedisTokenStreams) -> None:
    """The worker it takes over from was only slow, and wrote one more entry meanwhile."""
    rid = await opened(streams)
    await streams.append([(rid, StreamId(1, 0), START_ENTRY), (rid, StreamId(1, 1), Text("a", (1,)))])
    late = (rid, StreamId(2, 0), StartAfter(START_ENTRY, StreamId(1, 0)))
    assert await streams.append([late]) == [Appended.FENCED]
    right = (rid, StreamId(2, 0), StartAfter(START_ENTRY, StreamId(1, 1)))
    assert await streams.append([right]) == [Appended.OK]
    assert await streams.append([right]) == [Appended.FENCED]
    await streams.seal(rid, DONE)
    assert await streams.append([right]) == [Appended.SEALED]
    assert await streams.append([(new_id(), *right[1:])]) == [Appended.GONE]


async def test_a_seal_behind_text_that_the_store_has_lost_is_refused(streams: RedisTokenStreams) -> None:
    rid = await opened(streams)
    await streams.append([(rid, StreamId(1, 0), Started(worker_id="w", model_revision="1"))])
    seal = [(rid, SEAL, SealAfter(DONE, StreamId(1, 7)))]
    assert await streams.append(seal) == [Appended.FENCED]
    missing = [(make_request_id(1, b"\x07" * 10), SEAL, SealAfter(DONE, StreamId(1, 7)))]
    assert await streams.append(missing) == [Appended.GONE]


async def test_the_seal_starts_the_retention_and_drops_the_lease(
    streams: RedisTokenStreams, client: redis.Redis
) -> None:
    rid = await opened(streams)
    await start_attempt(streams, rid, 1)
    assert await streams.lease_holders([rid]) == ["w"]
    await streams.seal(rid, DONE)
    assert await streams.lease_holders([rid]) == [None]
    assert 0 < await client.ttl(stream_key(rid)) <= 50


async def test_a_missing_stream_is_gone_and_is_never_created_by_an_append_h8(
    streams: RedisTokenStreams, client: redis.Redis
) -> None:
    rid = new_id()
    assert await one(streams, rid, StreamId(1, 1), Text("x", (1,))) is Appended.GONE
    assert await streams.seal(rid, DONE) is Appended.GONE
    assert not await client.exists(stream_key(rid))
    assert await streams.last_ids([rid]) == [None]
    assert await streams.read(rid, START, 10) == []


async def test_one_round_trip_answers_for_each_stream_of_its_own(streams: RedisTokenStreams) -> None:
    open_, sealed, gone = await opened(streams), await opened(streams), new_id()
    await streams.seal(sealed, DONE)
    moderated = Moderated(prompt_tokens=1)
    writes = [
        (open_, MODERATED, moderated), (sealed, MODERATED, moderated), (gone, MODERATED, moderated),
        (open_, MODERATED, moderated),
    ]  # fmt: skip
    results = await streams.append(writes)
    assert results == [Appended.OK, Appended.SEALED, Appended.GONE, Appended.FENCED]


async def test_entries_of_one_stream_are_answered_one_by_one_in_their_order(
    streams: RedisTokenStreams,
) -> None:
    rid, other, gone = await opened(streams), await opened(streams), new_id()
    text = [(StreamId(1, n), Text(str(n), (n,))) for n in (1, 2, 3)]
    writes = [
        (rid, *text[0]), (other, *text[1]), (rid, *text[0]), (rid, *text[2]), (other, *text[0]),
        (gone, *text[0]), (gone, *text[1]), (rid, SEAL, DONE), (rid, StreamId(2, 0), START_ENTRY),
    ]  # fmt: skip
    ok, fenced = Appended.OK, Appended.FENCED
    assert await streams.append(writes) == [
        ok, ok, fenced, ok, fenced, Appended.GONE, Appended.GONE, ok, Appended.SEALED,
    ]  # fmt: skip
    assert [e.id for e in await streams.read_all(rid)] == [ACCEPTED, text[0][0], text[2][0], SEAL]


async def test_reading_goes_on_exactly_after_an_offset(streams: RedisTokenStreams) -> None:
    rid = await opened(streams)
    await streams.append([(rid, StreamId(1, n), Text(str(n), (n,))) for n in range(1, 8)])
    await streams.seal(rid, DONE)
    everything = await streams.read_all(rid, page=3)
    assert [e.id for e in everything] == [ACCEPTED, *(StreamId(1, n) for n in range(1, 8)), SEAL]
    for at, item in enumerate(everything):
        assert await streams.read(rid, item.id, 100) == everything[at + 1 :]
    assert await streams.last_ids([rid]) == [SEAL]
    assert await streams.has_entry(rid, StreamId(1, 3))
    assert not await streams.has_entry(rid, StreamId(1, 9))


async def test_any_text_comes_back_as_it_was_a1(streams: RedisTokenStreams) -> None:
    rid = await opened(streams)
    text = Text("👩‍💻 你好 ďábel\u2028\x0b\x00", (1, 2), 3, ({"token": "ď", "logprob": -0.5},))
    await one(streams, rid, StreamId(1, 2), text)
    assert (await streams.read(rid, ACCEPTED, 1))[0].entry == text


async def test_an_unreachable_store_is_told_as_such() -> None:
    client = connect(RedisSettings(url="redis://127.0.0.1:1/0", timeout_seconds=0.5))
    streams = RedisTokenStreams(client, StreamSettings())
    with pytest.raises(StreamsUnavailable):
        await streams.read(new_id(), START, 1)
    with pytest.raises(StreamsUnavailable):
        await streams.seal(new_id(), DONE)
    await client.aclose()


_ids = st.one_of(
    st.sampled_from([ACCEPTED, MODERATED, DISPATCHED, SEAL]),
    st.builds(StreamId, st.integers(1, 3), st.integers(0, 5)),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(_ids, min_size=1, max_size=25), st.lists(st.integers(1, 4), max_size=25))
async def test_any_writers_in_any_order_leave_one_growing_stream_with_one_end(
    url: str, ids: list[StreamId], cuts: list[int]
) -> None:
    """What is stored is the running maximum of what was written; every refusal is told apart."""
    client = connect(RedisSettings(url=url))
    try:
        streams = RedisTokenStreams(client, StreamSettings())
        rid = await opened(streams)
        writes = [(rid, i, _entry(i, at)) for at, i in enumerate(ids)]
        results: list[Appended] = []
        for size in [*cuts, len(writes)]:
            batch = writes[len(results) : len(results) + size]
            results += await streams.append(batch) if batch else []
        last, kept = ACCEPTED, []
        for (_, entry_id, entry), result in zip(writes, results, strict=True):
            if last.is_seal:
                assert result is Appended.SEALED
            elif entry_id > last:
                assert result is Appended.OK
                last, kept = entry_id, [*kept, (entry_id, entry)]
            else:
                assert result is Appended.FENCED
        stored = await streams.read_all(rid)
        assert [(e.id, e.entry) for e in stored[1:]] == kept
    finally:
        await client.aclose()


def _entry(entry_id: StreamId, serial: int) -> Entry:
    if entry_id.is_seal:
        return Terminal(status=Status.FAILED)
    if entry_id.attempt:
        return START_ENTRY if entry_id.is_attempt_start else Text(f"{serial}", (serial,))
    return {
        ACCEPTED: ACCEPT,
        MODERATED: Moderated(prompt_tokens=serial),
        DISPATCHED: Dispatched(worker_id=str(serial)),
    }[entry_id]
