"""What of a recording is out at a time, and the requests that play it."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.entries import Accepted, StreamEntry, Terminal
from contracts.errors import ApiError
from contracts.identity import Principal, is_request_id, make_request_id
from contracts.reply import Reply
from contracts.stream_ids import SEAL, START
from contracts.tiers import Status
from contracts.token_stream import Appended
from infra.replay import player as player_module
from infra.replay.player import Player
from infra.replay.playing import Playing
from infra.replay.recordings import Recording
from infra.settings import development
from tests.unit.infra.test_recordings import PIECES, recording, unhurried

ME = Principal("k", "me", "paid")
BODY = {"model": "default", "messages": [{"role": "user", "content": "x"}]}
TEXT = "".join(PIECES)
ENTRIES = recording().entries
OTHER = Recording(make_request_id(2, bytes(10)), "measured", recording(["Other"]).entries)
CANCELLED = Terminal(status=Status.CANCELLED)


@unhurried
@given(
    st.lists(st.floats(0, 0.3), max_size=12), st.sampled_from([0.5, 1.0, 4.0, None]), st.integers(1, 5)
)
def test_each_entry_is_out_from_its_time_on_and_read_once(
    looks: list[float], speed: float | None, limit: int
) -> None:
    playing = Playing(ENTRIES, 100.0, speed)
    read: list[StreamEntry] = []
    for passed in (*sorted(looks), *[1.0] * len(ENTRIES)):
        now = 100.0 + passed
        read += playing.after(read[-1].id if read else START, now, limit)
        due = [100.0 + (at_ms / 1000 / speed if speed else 0) for at_ms, _ in ENTRIES[: len(read)]]
        assert all(at <= now for at in due)
    assert read == [item for _, item in ENTRIES]


def test_it_says_when_the_next_entry_is_due() -> None:
    playing = Playing(ENTRIES, 100.0, 2.0)
    assert playing.due(START) == 100.0
    assert playing.due(ENTRIES[2].item.id) == 100.01
    assert playing.due(SEAL) is None
    assert playing.last_id(100.011) == ENTRIES[3].item.id
    assert playing.last_id(99.0) == ENTRIES[0].item.id


@unhurried
@given(st.floats(0, 0.2))
def test_a_cancelled_one_ends_where_it_was(passed: float) -> None:
    playing = Playing(ENTRIES, 0.0, 1.0)
    before = playing.after(START, passed, 100)
    assert playing.seal(CANCELLED, passed) is (passed < 0.099)
    after = playing.after(START, 9.0, 100)
    if passed < 0.099:
        assert after == [*before, StreamEntry(SEAL, CANCELLED)]
    else:
        assert after == before == [item for _, item in ENTRIES]
    assert not playing.seal(CANCELLED, 9.0)


def made(*recordings: Recording, speed: float | None = None) -> Player:
    return Player(recordings or (recording(), OTHER), speed, development("sim"))


async def text_of(player: Player, request_id: str) -> str:
    return Reply().extend(await player.read_all(request_id)).text


async def test_every_request_plays_the_next_recording_under_an_id_of_its_own() -> None:
    player = made()
    ids = [(await player.accept(ME, BODY)).request_id for _ in range(3)]
    assert [await text_of(player, rid) for rid in ids] == [TEXT, "Other", TEXT]
    assert len({*ids, recording().request_id}) == 4
    assert all(map(is_request_id, ids))
    first = (await player.read(ids[0], START, 1))[0].entry
    assert isinstance(first, Accepted)
    assert (first.tenant, first.tier, first.model) == ("me", "paid", "m")
    assert first.created_ms > 1_000_000


async def test_a_repeated_call_gets_the_request_of_the_first() -> None:
    player = made()
    first = await player.accept(ME, BODY, idempotency_key="once")
    assert await player.accept(ME, BODY, idempotency_key="once") == first
    with pytest.raises(ApiError) as refused:
        await player.accept(ME, BODY | {"temperature": 1}, idempotency_key="once")
    assert refused.value.body.code == "idempotency_mismatch"


@pytest.mark.parametrize("body", [None, {}, BODY | {"temperature": 9}, BODY | {"model": "nobody's"}])
async def test_a_bad_body_is_refused_as_everywhere(body: object) -> None:
    with pytest.raises(ApiError):
        await made().accept(ME, body)


async def test_a_recording_is_read_by_its_own_id_and_others_are_not_there() -> None:
    player = made()
    await player.authorize(ME, OTHER.request_id)
    assert await text_of(player, OTHER.request_id) == "Other"
    unknown = make_request_id(9, bytes(10))
    for call in (player.authorize, player.cancel):
        with pytest.raises(ApiError) as refused:
            await call(ME, unknown)
        assert refused.value.body.code == "not_found"
    assert await player.last_ids([unknown, OTHER.request_id]) == [None, SEAL]
    assert await player.read_all(unknown) == []
    assert await player.seal(unknown, CANCELLED) is Appended.GONE
    assert not await player.has_entry(unknown, SEAL)


async def test_a_reader_that_waits_hears_of_the_cancellation() -> None:
    player = made(speed=0.001)
    request_id = (await player.accept(ME, BODY)).request_id
    async with player.subscribe(request_id, START) as reader:
        assert [item.id for item in await reader.next(5.0)] == [ENTRIES[0].item.id]
        assert await reader.next(0.01) == []
        waiting = asyncio.create_task(reader.next(60.0))
        await asyncio.sleep(0)
        await player.cancel(ME, request_id)
        async with asyncio.timeout(5):
            assert [item.entry for item in await waiting] == [CANCELLED]
        assert reader.ended
        assert await reader.next(60.0) == []
    assert await player.seal(request_id, CANCELLED) is Appended.SEALED
    async with player.subscribe(request_id, SEAL) as again:
        assert [item.entry for item in await again.next(5.0)] == [CANCELLED]


async def test_only_so_many_requests_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(player_module, "_MOST_PLAYINGS", 3)
    player = made()
    ids = [(await player.accept(ME, BODY, idempotency_key=f"k{n}")).request_id for n in range(5)]
    assert [last is not None for last in await player.last_ids(ids)] == [False, False, True, True, True]
    again = await player.accept(ME, BODY, idempotency_key="k0")
    assert again.request_id not in ids
