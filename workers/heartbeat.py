"""What a worker tells the schedulers of its pool, and the claim on its slot."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from redis.exceptions import RedisError

from contracts.records import DispatchRecord
from contracts.worker_events import WorkerEvent
from infra.telemetry import KV_FREE, RUNNING

from .credits import CreditLedger
from .errors import WorkerError
from .in_hand import InHand
from .prefix_memory import PrefixMemory, PrefixNews
from .protocols import Capacity, TierNews

log = logging.getLogger(__name__)

#: Prefix hashes in one event; more go with the next ones.
PREFIXES_PER_EVENT = 256
#: Those of the KV tier among them, at most.
TIER_PREFIXES_PER_EVENT = PREFIXES_PER_EVENT // 2

_NO_TIER = TierNews([], [])


class SlotLost(WorkerError):
    """Another worker holds this worker's slot: stop reading its partition, start anew with another."""


class Feed(Protocol):
    """The pool's feed; see :class:`infra.worker_feed_redis.WorkerFeed`."""

    async def publish(self, event: WorkerEvent) -> None:
        """Append an event."""

    async def keep_slot(self, worker_id: str, slot: int, ttl_ms: int) -> bool:
        """Renew a claim; False when it was lost."""


class Schedulers(Protocol):
    """See :class:`infra.scheduler_presence_redis.SchedulerPresence`."""

    async def read(self) -> Mapping[str, int | None]:
        """The schedulers heard of lately, and how many choices wait at each; None = it has left."""


@dataclass
class _News:
    """What goes into one event only: request ids in the order of what happened.

    Attributes:
        last_counts: output tokens of those that left.
    """

    taken: list[str] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    handed_over: list[str] = field(default_factory=list)
    last_counts: dict[str, int] = field(default_factory=dict)

    def before(self, later: _News) -> _News:
        return _News(
            self.taken + later.taken,
            self.finished + later.finished,
            self.handed_over + later.handed_over,
            self.last_counts | later.last_counts,
        )


class Heartbeat:
    """Reports capacity at an interval, and at once when replies leave or acceptance changes.

    A scheduler that is seen for the first time is told all prefixes that are held here, beginning with
    those used last; it has missed what was reported before.

    Attributes:
        accepting: whether this worker takes work; set through :meth:`set_accepting`.
    """

    def __init__(
        self,
        feed: Feed,
        worker_id: str,
        slot: int,
        *,
        interval_ms: int,
        slot_ttl_ms: int,
        capacity: Callable[[], Capacity],
        tier_news: Callable[[int], TierNews | None],
        in_hand: InHand,
        prefixes: PrefixMemory,
        credits: CreditLedger,
        schedulers: Schedulers,
    ) -> None:
        """Reports for one worker.

        Args:
            tier_news: see :meth:`workers.protocols.Engine.take_tier_news`.
            in_hand: the requests this worker has taken; the engine may not know of all yet.
        """
        self._feed = feed
        self._worker_id = worker_id
        self._slot = slot
        self._interval = interval_ms / 1000
        self._slot_ttl_ms = slot_ttl_ms
        self._capacity = capacity
        self._take_tier_news = tier_news
        self._untold_tier: TierNews | None = None
        self._in_hand = in_hand
        self._prefixes = prefixes
        self._credits = credits
        self._schedulers = schedulers
        self._backlog: Mapping[str, int] = {}
        self._news = _News()
        self._wake = asyncio.Event()
        self.accepting = True

    def taken(self, record: DispatchRecord) -> None:
        """Report a request that was taken, with the next event."""
        self._news.taken.append(record.request_id)
        self._credits.taken(record.scheduler_id, record.sampling.n)

    def prefilled(self, record: DispatchRecord) -> None:
        """Report the prefixes of a prompt that was prefilled, with the next event."""
        self._prefixes.prefilled(record.prefix_hashes)

    def finished(self, request_id: str) -> None:
        """Report that a request has ended here, with the next event, which is sent at once."""
        self._news.finished.append(request_id)
        self._leaves(request_id)

    def handed_over(self, request_id: str) -> None:
        """Report that a request is left to other workers, with the next event, which is sent at once."""
        self._news.handed_over.append(request_id)
        self._leaves(request_id)

    def _leaves(self, request_id: str) -> None:
        self._news.last_counts[request_id] = self._in_hand.generated_by(request_id)
        self._wake.set()

    def set_accepting(self, accepting: bool) -> None:
        """Change it, and report at once."""
        self.accepting = accepting
        self._wake.set()

    async def run(self) -> None:
        """Report until cancelled.

        Raises:
            SlotLost: the slot belongs to another worker.
        """
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            self._wake.clear()
            now = loop.time()
            try:
                timed = now >= due
                if timed:
                    due = now + self._interval
                    if not await self._feed.keep_slot(self._worker_id, self._slot, self._slot_ttl_ms):
                        raise SlotLost(f"slot {self._slot}")
                    await self._look_for_schedulers()
                await self.publish(timed=timed)
            except (RedisError, OSError) as error:
                log.warning("no heartbeat", extra={"error": type(error).__name__})
            try:
                # Not wait_for(): up to Python 3.11 it can swallow a cancellation that meets its result.
                async with asyncio.timeout(max(0.0, due - loop.time())):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def _look_for_schedulers(self) -> None:
        backlog = {}
        for scheduler, waiting in (await self._schedulers.read()).items():
            if waiting is None:
                self._credits.forget(scheduler)
            else:
                backlog[scheduler] = waiting
        if backlog.keys() - self._backlog.keys():
            self._prefixes.tell_all()
        self._backlog = backlog

    async def publish(self, *, timed: bool = False) -> None:
        """Send one event now; Redis errors pass through, and its news go with the next one.

        Args:
            timed: with how far each reply has come, which is too much to say in every event.
        """
        news, self._news = self._news, _News()
        tier = self._untold_tier or self._take_tier_news(TIER_PREFIXES_PER_EVENT) or _NO_TIER
        room = PREFIXES_PER_EVENT - len(tier.held) - len(tier.missing)
        prefixes = self._prefixes.take_news(room)
        self._untold_tier = None
        try:
            await self._feed.publish(self._event(news, prefixes, tier, timed))
        except BaseException:  # cancelled as well: nobody knows whether it has arrived
            self._news = news.before(self._news)
            self._prefixes.untold(prefixes)
            self._untold_tier = tier
            raise

    def _event(self, news: _News, prefixes: PrefixNews, tier: TierNews, timed: bool) -> WorkerEvent:
        capacity = self._capacity()
        running = max(capacity.running, self._in_hand.choices)
        free = max(0, capacity.max_seqs - running) if self.accepting else 0
        RUNNING.set(running)
        KV_FREE.set(capacity.kv_tokens_free)
        return WorkerEvent(
            worker_id=self._worker_id,
            slot=self._slot,
            sent_ms=int(time.time() * 1000),
            max_seqs=capacity.max_seqs,
            running=running,
            kv_tokens_total=capacity.kv_tokens_total,
            kv_tokens_free=capacity.kv_tokens_free,
            accepting=self.accepting,
            taken=news.taken,
            finished=news.finished,
            handed_over=news.handed_over,
            generated=(self._in_hand.generated() if timed else {}) | news.last_counts,
            prefill_tokens=self._in_hand.prefill_tokens,
            prefixes=prefixes.come,
            prefixes_gone=prefixes.gone,
            tier_prefixes=tier.held,
            tier_prefixes_gone=tier.missing,
            load_us_per_token=tier.load_us_per_token,
            prefill_us_per_token=tier.prefill_us_per_token,
            credits=self._credits.grant(free, self._backlog, time.monotonic_ns() // 1_000_000),
        )
