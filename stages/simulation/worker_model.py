"""A worker with continuous batching and chunked prefill, moved from change to change, not step by step.

An engine step gives each decoding request one token and prefills up to a budget of prompt tokens, first come
first served. Between two changes of the batch all steps are alike, so any number of them is one calculation:
the result is that of the step-by-step engine.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from kv.layout import CHUNK_TOKENS

from .prefix_cache import PrefixCache
from .requests import SimRequest
from .tier_link import TierLink


class WorkerModel(BaseModel):
    """How fast a worker is and what it has room for. Where the defaults come from: docs/SIMULATOR.md.

    Attributes:
        max_seqs: requests it runs at once.
        kv_tokens: room of its KV cache, tokens.
        prefix_tokens: room of its prefix cache, tokens, besides ``kv_tokens``.
        step_ms: time of a step without requests.
        decode_ms: what each decoding request adds to a step.
        prefill_ms: what each prompt token adds to the step that prefills it.
        batched_tokens: most tokens of a step, decoded and prefilled (vLLM's ``max_num_batched_tokens``).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_seqs: int = Field(default=64, ge=1)
    kv_tokens: int = Field(default=400_000, ge=1)
    prefix_tokens: int = Field(default=200_000, ge=0)
    step_ms: float = Field(default=10.0, gt=0)
    decode_ms: float = Field(default=0.1, ge=0)
    prefill_ms: float = Field(default=0.1, ge=0)
    batched_tokens: int = Field(default=2_048, ge=1)


@dataclass(slots=True, eq=False)
class Run:
    """A request on a worker, from its dispatch until it leaves.

    Attributes:
        since_ms / emitted_before: when it was dispatched, and output tokens of earlier attempts.
        emitted: output tokens that are out, of all attempts; of a decoding one, as of ``start_step``.
        prefill_left: prompt tokens (with emitted ones) still to prefill.
        computed / loaded: prompt tokens that were in no cache / that came from the KV tier.
        kv_held: KV room it holds, as of ``start_step``.
        admitted: its number among those the worker took into its batch; 0 = not in the batch.
        start_step: the worker's step count when its decode began; None while it does not decode.
        aborted: it leaves at the end of the step.
    """

    request: SimRequest
    since_ms: float
    emitted_before: int = 0
    emitted: int = 0
    prefill_left: int = 0
    computed: int = 0
    loaded: int = 0
    kv_held: int = 0
    admitted: int = 0
    start_step: int | None = None
    aborted: bool = False


class Changes(NamedTuple):
    """What the end of a step brought: runs whose first token of this attempt came, that ended, that left."""

    started: list[Run]
    finished: list[Run]
    aborted: list[Run]


@dataclass(slots=True, eq=False)
class SimWorker:
    """One worker. Who drives it calls :meth:`step_ends` at :attr:`next_ms`, which every call may change.

    Attributes:
        time_ms: the step boundary its state is of.
        next_ms: when its batch changes next; None while it has nothing to do.
        kv_used: KV tokens taken at ``time_ms``.
        runs: all it was given that have not left, by request id.
        tier: its way to the KV tier; None = it has none.
    """

    model: WorkerModel
    index: int
    worker_id: str
    tier: TierLink | None = None
    time_ms: float = 0.0
    next_ms: float | None = None
    kv_used: int = 0
    steps: int = 0
    cache: PrefixCache = field(init=False)
    runs: dict[str, Run] = field(default_factory=dict)
    _joining: list[Run] = field(default_factory=list)
    _waiting: deque[Run] = field(default_factory=deque)
    #: A heap by the time at which what they load is there.
    _loading: list[tuple[float, int, Run]] = field(default_factory=list)
    _prefilling: deque[Run] = field(default_factory=deque)
    #: A heap by the step count at which the last token comes.
    _decoding: list[tuple[int, int, Run]] = field(default_factory=list)
    _admissions: int = 0
    _planned_steps: int = 0
    _planned_ms: float = 0.0
    _planned_prefill: int = 0
    _leaving: bool = False

    def __post_init__(self) -> None:
        self.cache = PrefixCache(self.model.prefix_tokens)

    def restarted(self) -> SimWorker:
        """Its successor, which knows nothing but the way to the tier."""
        tier = TierLink(self.tier.store, self.tier.load_ms) if self.tier is not None else None
        return SimWorker(self.model, self.index, f"{self.worker_id}.again", tier)

    @property
    def batch(self) -> int:
        """Requests in its batch, those included that wait for what they load."""
        return len(self._loading) + len(self._prefilling) + len(self._decoding)

    def kv_free(self, now_ms: float) -> int:
        """KV room that is left at ``now_ms``, tokens."""
        return self.model.kv_tokens - self.kv_used - self._whole_steps(now_ms) * len(self._decoding)

    def prefill_backlog(self) -> int:
        """Prompt tokens it has taken and not prefilled, as of the last change."""
        if not (self._prefilling or self._waiting or self._joining or self._loading):
            return 0
        total = sum(run.prefill_left for run in self._prefilling)
        total += sum(run.prefill_left for _, _, run in self._loading)
        return total + sum(
            r.request.prompt_tokens + r.emitted for q in (self._waiting, self._joining) for r in q
        )

    def progress(self, now_ms: float) -> Iterator[tuple[Run, int]]:
        """Each request it was given, with its output tokens that are out at ``now_ms``."""
        steps = self.steps + self._whole_steps(now_ms)
        for run in self.runs.values():
            yield run, run.emitted if run.start_step is None else run.emitted + steps - run.start_step

    def join(self, request: SimRequest, emitted: int, now_ms: float) -> Run:
        """A dispatch arrives; it enters the batch at the next step, if there is room.

        Args:
            emitted: output tokens of earlier attempts: they are prefilled with the prompt.
        """
        run = Run(request, now_ms, emitted, emitted)
        self.runs[request.request_id] = run
        self._joining.append(run)
        self._wake(now_ms)
        return run

    def abort(self, request_id: str, now_ms: float) -> None:
        """Take a request out of the batch at the end of the step; ignored if it is not there."""
        run = self.runs.get(request_id)
        if run is not None:
            run.aborted = self._leaving = True
            self._wake(now_ms)

    def _whole_steps(self, now_ms: float) -> int:
        """Steps of the plan that are over at ``now_ms``; the last one is left to :meth:`step_ends`."""
        if self._planned_steps == 0:
            return 0
        return max(0, min(int((now_ms - self.time_ms) / self._planned_ms), self._planned_steps - 1))

    def _wake(self, now_ms: float) -> None:
        """Make the step under way the last of the plan; a worker without a step starts at once."""
        if self._planned_steps == 0:
            self.time_ms = self.next_ms = now_ms
        elif self._planned_steps > 1:
            self._advance(self._whole_steps(now_ms))
            self._planned_steps = 1
            self.next_ms = self.time_ms + self._planned_ms

    def _advance(self, steps: int) -> None:
        self.steps += steps
        self.time_ms += steps * self._planned_ms
        self.kv_used += steps * len(self._decoding)
        if self._planned_prefill and steps:
            self._prefilling[0].prefill_left -= steps * self._planned_prefill

    def step_ends(self) -> Changes:
        """The plan is over: what changed, and the next plan."""
        started: list[Run] = []
        finished: list[Run] = []
        if self.next_ms is not None and self._planned_steps == 0:
            self.time_ms = self.next_ms
        elif self._planned_steps:
            if self._planned_prefill:
                self._advance(self._planned_steps)
            else:
                budget = self.model.batched_tokens - len(self._decoding)
                self._advance(self._planned_steps)
                if self._prefilling:
                    started = self._prefill(max(1, budget))
            decoding = self._decoding
            while decoding and decoding[0][0] <= self.steps:
                run = heapq.heappop(decoding)[2]
                run.emitted = run.request.output_tokens
                self._leave(run)
                finished.append(run)
            for run in started:
                self._begin_decode(run, finished)
        aborted = self._take_aborted() if self._leaving else []
        self._admit()
        self._plan()
        return Changes(started, finished, aborted)

    def _prefill(self, budget: int) -> list[Run]:
        """One step's prefill over the requests in line; those whose prompt is complete."""
        done: list[Run] = []
        while self._prefilling and budget > 0:
            run = self._prefilling[0]
            taken = min(budget, run.prefill_left)
            run.prefill_left -= taken
            budget -= taken
            if run.prefill_left == 0:
                done.append(self._prefilling.popleft())
        return done

    def _begin_decode(self, run: Run, finished: list[Run]) -> None:
        """The step that completes a prompt also gives the first token."""
        run.emitted += 1
        run.kv_held += 1
        self.kv_used += 1
        run.start_step = self.steps
        self._keep(run.request.prefix_hashes)
        if run.emitted >= run.request.output_tokens:
            self._leave(run)
            finished.append(run)
        else:
            last_step = self.steps + run.request.output_tokens - run.emitted
            heapq.heappush(self._decoding, (last_step, run.admitted, run))

    def _leave(self, run: Run) -> None:
        """Free a run's room; it is no longer in the batch."""
        if run.admitted:
            self.kv_used -= run.kv_held
            if run.start_step is not None:
                self.kv_used -= self.steps - run.start_step
                self._keep_reply(run)
        del self.runs[run.request.request_id]

    def _keep_reply(self, run: Run) -> None:
        """The chunks that its reply filled are in the caches too, after those of the prompt."""
        request = run.request
        filled = (request.prompt_tokens + run.emitted) // CHUNK_TOKENS
        if min(filled, len(request.chunks)) > request.prompt_tokens // CHUNK_TOKENS:
            self._keep(request.chunks[:filled])

    def _keep(self, chunks: Sequence[str]) -> None:
        self.cache.add(chunks)
        if self.tier is not None:
            self.tier.save(chunks)

    def _take_aborted(self) -> list[Run]:
        self._leaving = False
        aborted = [run for run in self.runs.values() if run.aborted]
        for run in aborted:
            self._unbatch(run)
            self._leave(run)
        return aborted

    def _unbatch(self, run: Run) -> None:
        """Take a run out of the line it stands in; its ``emitted`` is brought up to now."""
        decoding = [entry for entry in self._decoding if entry[2] is not run]
        if len(decoding) < len(self._decoding):
            heapq.heapify(decoding)
            self._decoding = decoding
            assert run.start_step is not None
            run.emitted += self.steps - run.start_step
            run.kv_held += self.steps - run.start_step
            run.start_step = self.steps
        elif any(entry[2] is run for entry in self._loading):
            self._loading = [entry for entry in self._loading if entry[2] is not run]
            heapq.heapify(self._loading)
        else:
            next(
                line for line in (self._joining, self._waiting, self._prefilling) if run in line
            ).remove(run)

    def _admit(self) -> None:
        """Take waiting requests into the batch while slots and KV room last, in order of arrival.

        One that loads from the tier comes to its prefill when that is there; others do not wait for it.
        """
        while self._loading and self._loading[0][0] <= self.time_ms:
            self._prefilling.append(heapq.heappop(self._loading)[2])
        self._waiting.extend(self._joining)
        self._joining.clear()
        model = self.model
        while self._waiting and self.batch < model.max_seqs:
            run = self._waiting[0]
            context = run.request.prompt_tokens + run.emitted
            # Its first token needs room too, and those in the batch one more each.
            if self.kv_used + context + 1 + self.batch > model.kv_tokens:
                break
            self._waiting.popleft()
            self._admissions += 1
            run.admitted = self._admissions
            run.kv_held = context
            self.kv_used += context
            self._begin_prefill(run, context)

    def _begin_prefill(self, run: Run, context: int) -> None:
        chunks = run.request.chunks
        held = self.cache.cached_tokens(chunks, context)
        run.loaded, there_ms = 0, self.time_ms
        if self.tier is not None:
            run.loaded, there_ms = self.tier.load(chunks, context, held, self.time_ms)
        run.computed = run.prefill_left = context - held - run.loaded
        if run.loaded:
            heapq.heappush(self._loading, (there_ms, run.admitted, run))
        else:
            self._prefilling.append(run)

    def _plan(self) -> None:
        """How many equal steps come next, and how long each is."""
        while self.batch > 1 and self.kv_used + self.batch > self.model.kv_tokens:
            self._evict_youngest()
        model = self.model
        decoding = len(self._decoding)
        self._planned_prefill = 0
        if not decoding and not self._prefilling:
            self._planned_steps = 0
            self.next_ms = self._loading[0][0] if self._loading else None
            return
        steps = self._decoding[0][0] - self.steps if decoding else 1 << 60
        if decoding:
            steps = min(steps, max(1, (model.kv_tokens - self.kv_used) // self.batch))
        prefill = 0
        if self._prefilling:
            budget = max(1, model.batched_tokens - decoding)
            left = self._prefilling[0].prefill_left
            if left > budget:
                prefill = self._planned_prefill = budget
                steps = min(steps, (left - 1) // budget)
            else:
                steps = 1
                for run in self._prefilling:
                    prefill += run.prefill_left
                    if prefill >= budget:
                        prefill = budget
                        break
        self._planned_ms = model.step_ms + model.decode_ms * decoding + model.prefill_ms * prefill
        if self._loading:
            steps = min(
                steps, max(1, math.ceil((self._loading[0][0] - self.time_ms) / self._planned_ms))
            )
        self._planned_steps = steps
        self.next_ms = self.time_ms + steps * self._planned_ms

    def _evict_youngest(self) -> None:
        """No room for another token of each: the latest in the batch gives its own up, and starts again."""
        ordered = (run for _, _, run in (*self._loading, *self._decoding))
        run = max((*self._prefilling, *ordered), key=lambda r: r.admitted)
        self._unbatch(run)
        self.kv_used -= run.kv_held
        run.kv_held = run.admitted = run.prefill_left = 0
        run.start_step = None
        self._waiting.appendleft(run)
