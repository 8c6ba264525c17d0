"""Measures a simulation as it runs: who waited how long, who got what."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from .fairness import GapMeter, Line, Passing, jain_index
from .report import Quantiles, Report, Sample, TierReport
from .requests import SimRequest
from .worker_model import SimWorker

#: Parts of the window for which percentiles are given on their own.
COURSE_PARTS = 48


@dataclass(frozen=True, slots=True)
class Yardstick:
    """What is measured against.

    Attributes:
        window_ms: time in which requests arrive.
        targets_ms: time to first token of a good reply, by tier.
        patience_ms: see :class:`~.fairness.Passing`.
        prompt_weight / output_weight: service units of a prompt token and of an output token.
    """

    window_ms: float
    targets_ms: Mapping[str, float]
    patience_ms: float = 30_000.0
    prompt_weight: float = 1.0
    output_weight: float = 2.0


@dataclass(slots=True, eq=False)
class Passage:
    """A request on its way through the simulation.

    Attributes:
        line: where it waits.
        attempts / emitted: the last attempt that a worker began, and output tokens of those that are over.
        worker_id: where it is; None while it waits.
        started_ms / first_ms: its first dispatch and its first token; None before.
    """

    request: SimRequest
    line: Line
    attempts: int = 0
    emitted: int = 0
    worker_id: str | None = None
    started_ms: float | None = None
    first_ms: float | None = None


@dataclass(slots=True)
class _Tally:
    requests: int = 0
    expired: int = 0
    failed: int = 0
    preempted: int = 0
    within_target: int = 0
    at: array[float] = field(default_factory=lambda: array("d"))
    ttft: array[float] = field(default_factory=lambda: array("d"))
    tpot: array[float] = field(default_factory=lambda: array("d"))
    wait: array[float] = field(default_factory=lambda: array("d"))


class Meter:
    """Told of every step of every request; gives the report at the end."""

    def __init__(self, yardstick: Yardstick, workers: list[SimWorker]) -> None:
        """Make one for one run; the workers' progress is read when samples are taken."""
        self._yardstick = yardstick
        self._workers = workers
        self._slots = sum(w.model.max_seqs for w in workers)
        self._tallies = {tier: _Tally() for tier in yardstick.targets_ms}
        self._lines: dict[tuple[str, str], Line] = {}
        self._talks: dict[tuple[str, str], list[Passage]] = {}
        self._passing = Passing(yardstick.patience_ms)
        self._gaps = {tier: GapMeter() for tier in yardstick.targets_ms}
        self._service: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._demand: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._samples: list[Sample] = []
        self._taken = 0
        self._slot_ms = 0.0
        self._prompt_tokens = 0
        self._computed_tokens = 0
        self._loaded_tokens = 0
        self._output_tokens = 0.0
        self._at_window_end: tuple[dict[tuple[str, str], float], float] | None = None

    def arrived(self, request: SimRequest) -> Passage:
        """A request joins its line."""
        key = request.tier, request.tenant
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = Line()
        passage = Passage(request, line)
        talk = self._talk_of(request)
        if talk is not None:
            talk.append(passage)
        if talk is None or talk[0] is passage:
            line.waiting[request.request_id] = request.at_ms
        self._tallies[request.tier].requests += 1
        y = self._yardstick
        self._demand[key] += (
            y.prompt_weight * request.prompt_tokens + y.output_weight * request.output_tokens
        )
        return passage

    def _talk_of(self, request: SimRequest) -> list[Passage] | None:
        """The open requests of its conversation: only the first of them may start, so only that one waits."""
        if request.conversation_id is None:
            return None
        return self._talks.setdefault((request.tenant, request.conversation_id), [])

    def _ended(self, passage: Passage, now_ms: float) -> None:
        """The next turn of its conversation, if there is one already, waits from now on."""
        talk = self._talk_of(passage.request)
        if talk is None:
            return
        talk.remove(passage)
        if not talk:
            del self._talks[passage.request.tenant, passage.request.conversation_id or ""]
        elif talk[0].worker_id is None:
            talk[0].line.waiting[talk[0].request.request_id] = now_ms

    def dispatched(self, passage: Passage, now_ms: float) -> None:
        """It goes to a worker."""
        request = passage.request
        if passage.started_ms is None:
            passage.started_ms = now_ms
        self._passing.started(passage.line, request.tier, request.request_id, now_ms)
        self._taken += 1

    def first_token(
        self, passage: Passage, now_ms: float, computed_tokens: int, loaded_tokens: int = 0
    ) -> None:
        """Its first token is out; so much of its prompt was computed, and loaded from the KV tier."""
        self._computed_tokens += computed_tokens
        self._loaded_tokens += loaded_tokens
        if passage.first_ms is None:
            passage.first_ms = now_ms
            request = passage.request
            self._prompt_tokens += request.prompt_tokens
            self._service[request.tier, request.tenant] += (
                self._yardstick.prompt_weight * request.prompt_tokens
            )

    def left_worker(self, passage: Passage, since_ms: float, emitted: int, now_ms: float) -> None:
        """It is no longer on a worker, where it was since ``since_ms``, with so many tokens out in all."""
        window_ms = self._yardstick.window_ms
        self._slot_ms += max(0.0, min(now_ms, window_ms) - min(since_ms, window_ms))
        self._taken -= 1
        new = emitted - passage.emitted
        passage.emitted = emitted
        passage.worker_id = None
        self._output_tokens += new
        request = passage.request
        self._service[request.tier, request.tenant] += self._yardstick.output_weight * new

    def waits_again(self, passage: Passage, now_ms: float, *, preempted: bool) -> None:
        """It is back in its line: taken from its worker, or its worker was lost."""
        passage.line.waiting[passage.request.request_id] = now_ms
        self._tallies[passage.request.tier].preempted += preempted

    def completed(self, passage: Passage, now_ms: float) -> None:
        """Its last token is out."""
        request = passage.request
        assert passage.started_ms is not None
        assert passage.first_ms is not None
        tally = self._tallies[request.tier]
        ttft = passage.first_ms - request.at_ms
        tally.at.append(request.at_ms)
        tally.ttft.append(ttft)
        tally.wait.append(passage.started_ms - request.at_ms)
        if request.output_tokens > 1:
            tally.tpot.append((now_ms - passage.first_ms) / (request.output_tokens - 1))
        tally.within_target += ttft <= self._yardstick.targets_ms[request.tier]
        self._ended(passage, now_ms)

    def dropped(self, passage: Passage, now_ms: float, *, expired: bool) -> None:
        """It ended without a reply: it expired, or it was given up."""
        request = passage.request
        line, tally = passage.line, self._tallies[request.tier]
        line.waiting.pop(request.request_id, None)
        line.broken = line.broken or not line.waiting
        self._ended(passage, now_ms)
        if expired:
            tally.expired += 1
        else:
            tally.failed += 1
        if passage.started_ms is None:
            self._passing.starved[request.request_id] = request.tier

    def sample(self, now_ms: float) -> None:
        """Take the state of everything; called at equal intervals."""
        service, output = self._progress(now_ms)
        # The sum of many intervals can fall short of the window by a rounding error.
        if self._at_window_end is None and now_ms >= self._yardstick.window_ms * (1 - 1e-9):
            self._at_window_end = service, output
        waiting = dict.fromkeys(self._tallies, 0)
        backlogged: dict[str, list[str]] = {tier: [] for tier in self._tallies}
        unbroken: dict[str, set[str]] = {tier: set() for tier in self._tallies}
        for (tier, tenant), line in self._lines.items():
            if line.waiting:
                waiting[tier] += len(line.waiting)
                backlogged[tier].append(tenant)
                if not line.broken:
                    unbroken[tier].add(tenant)
            line.broken = not line.waiting
        for tier, gap in self._gaps.items():
            of_tier = {tenant: service.get((tier, tenant), 0.0) for tenant in backlogged[tier]}
            gap.sample(of_tier, backlogged[tier], unbroken[tier])
        self._samples.append(Sample(now_ms, waiting, self._taken / self._slots))

    def _progress(self, now_ms: float) -> tuple[dict[tuple[str, str], float], float]:
        """Service of each line and output tokens up to now, with what is still running."""
        service = dict(self._service)
        output = self._output_tokens
        for worker in self._workers:
            for run, emitted in worker.progress(now_ms):
                new = emitted - run.emitted_before
                if new:
                    key = run.request.tier, run.request.tenant
                    service[key] = service.get(key, 0.0) + self._yardstick.output_weight * new
                    output += new
        return service, output

    def report(self, policy: str, unfinished: Iterable[Passage], now_ms: float) -> Report:
        """Everything together.

        Args:
            unfinished: requests that have not ended.
        """
        window_ms = self._yardstick.window_ms
        left = dict.fromkeys(self._tallies, 0)
        for passage in unfinished:
            request = passage.request
            left[request.tier] += 1
            if passage.started_ms is None:
                self._passing.starved[request.request_id] = request.tier
        for (tier, _), line in self._lines.items():
            self._passing.judge(line, tier, now_ms)
        for worker in self._workers:
            for run in worker.runs.values():
                self._slot_ms += max(0.0, min(now_ms, window_ms) - min(run.since_ms, window_ms))
        service, output = self._at_window_end or self._progress(now_ms)
        by_tier: dict[str, dict[str, float]] = {tier: {} for tier in self._tallies}
        for tier, tenant in self._lines:
            by_tier[tier][tenant] = service.get((tier, tenant), 0.0)
        seconds = window_ms / 1000
        return Report(
            policy=policy,
            window_ms=window_ms,
            end_ms=now_ms,
            utilisation=self._slot_ms / (self._slots * window_ms),
            tokens_per_second=output / seconds,
            goodput_per_second=sum(t.within_target for t in self._tallies.values()) / seconds,
            cached_share=1 - self._computed_tokens / self._prompt_tokens if self._prompt_tokens else 0.0,
            loaded_share=self._loaded_tokens / self._prompt_tokens if self._prompt_tokens else 0.0,
            tiers={
                tier: self._tier_report(tier, tally, left[tier], by_tier[tier])
                for tier, tally in self._tallies.items()
            },
            service=by_tier,
            samples=self._samples,
            ttft_course={tier: self._course(tally) for tier, tally in self._tallies.items()},
        )

    def _tier_report(
        self, tier: str, tally: _Tally, unfinished: int, service: dict[str, float]
    ) -> TierReport:
        demands = {tenant: self._demand[tier, tenant] for tenant in service}
        return TierReport(
            requests=tally.requests,
            completed=len(tally.ttft),
            expired=tally.expired,
            failed=tally.failed,
            unfinished=unfinished,
            preempted=tally.preempted,
            starved=sum(1 for t in self._passing.starved.values() if t == tier),
            within_target=tally.within_target,
            ttft=Quantiles.of(tally.ttft),
            tpot=Quantiles.of(tally.tpot),
            queue_wait=Quantiles.of(tally.wait),
            max_gap=self._gaps[tier].worst,
            jain=jain_index(service, demands),
        )

    def _course(self, tally: _Tally) -> list[tuple[float, Quantiles]]:
        part_ms = self._yardstick.window_ms / COURSE_PARTS
        parts: defaultdict[int, list[float]] = defaultdict(list)
        for at_ms, ttft in zip(tally.at, tally.ttft, strict=True):
            parts[min(COURSE_PARTS - 1, int(at_ms / part_ms))].append(ttft)
        return [(part * part_ms, Quantiles.of(parts[part])) for part in sorted(parts)]
