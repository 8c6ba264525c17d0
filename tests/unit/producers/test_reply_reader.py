"""No reader waits for ever: the deadlines of a reply as its reader sees them."""

from __future__ import annotations

from typing import Any

import pytest

from contracts.degraded import Degraded
from contracts.entries import Accepted, Started, StreamEntry, Terminal
from contracts.errors import ApiError
from contracts.stream_ids import ACCEPTED, SEAL, StreamId
from contracts.tiers import Status
from infra.settings import development
from producers.reply_reader import ReplyReader
from producers.request_times import reply_facts

CREATED = 1_000_000
FACTS = reply_facts(
    development("sim"), "r", Accepted(tenant="t", tier="paid", model="m", created_ms=CREATED)
)
TERMINAL = StreamEntry(SEAL, Terminal(status=Status.EXPIRED))
STARTED = StreamEntry(StreamId(1, 0), Started(worker_id="w", model_revision="1"))


class Source:
    """Gives what is queued; a wait lasts as long as it may and moves the clock."""

    def __init__(self) -> None:
        self.now_ms = CREATED
        self.queued: list[list[StreamEntry]] = []
        self.ended = False
        self.sealed: list[Terminal] = []

    async def next(self, timeout_seconds: float) -> list[StreamEntry]:
        if self.queued:
            entries = self.queued.pop(0)
            self.ended = entries[-1].id.is_seal
            return entries
        self.now_ms += int(timeout_seconds * 1000)
        return []

    async def seal(self, request_id: str, terminal: Terminal) -> Any:
        assert request_id == "r"
        self.sealed.append(terminal)
        self.queued.append([TERMINAL])


def reader_of(source: Source, *, started: bool = False) -> ReplyReader:
    streams: Any = source
    return ReplyReader(source, streams, FACTS, started=started, now_ms=lambda: source.now_ms)


async def drive(reader: ReplyReader) -> None:
    while not reader.ended:
        await reader.next(10)


async def test_a_reply_that_does_not_start_is_expired_once() -> None:
    source = Source()
    reader = reader_of(source)
    await drive(reader)
    assert [t.status for t in source.sealed] == [Status.EXPIRED]
    assert FACTS.start_by_ms <= source.now_ms < FACTS.start_by_ms + 1_000
    assert reader.terminal == TERMINAL.entry


@pytest.mark.parametrize("resumed", [False, True])
async def test_a_reply_that_started_is_read_on_until_no_reply_takes_longer(resumed: bool) -> None:
    source = Source()
    source.queued = [] if resumed else [[STARTED]]
    with pytest.raises(ApiError) as raised:
        await drive(reader_of(source, started=resumed))
    assert raised.value.status == 504
    assert not source.sealed
    assert source.now_ms >= FACTS.end_by_ms


async def test_what_was_promised_at_acceptance_counts_not_what_the_tier_may_wait() -> None:
    """Overload stretches the wait of standard tiers."""
    source = Source()
    degraded = Degraded(step="standard_waits", reason="slow")
    accepted = Accepted(
        tenant="t",
        tier="paid",
        model="small",
        created_ms=CREATED,
        deadline_ms=CREATED + 500_000,
        degraded=degraded,
    )
    source.queued = [[StreamEntry(ACCEPTED, accepted)]]
    reader = reader_of(source)
    await drive(reader)
    assert CREATED + 500_000 <= source.now_ms < CREATED + 505_000
    assert (reader.facts.model, reader.facts.degraded) == ("small", degraded)
    assert reader.facts.end_by_ms - reader.facts.start_by_ms == FACTS.end_by_ms - FACTS.start_by_ms
    assert reply_facts(development("sim"), "r", accepted) == reader.facts
