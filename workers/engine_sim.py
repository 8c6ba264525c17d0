"""The simulated engine: continuous batching, timing and faults of a model without the model.

One timer drives all requests. Token times are deadlines counted from the first one, so they do not drift;
an engine that was kept from its timer catches up, its tokens then come in larger deltas.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from contracts.records import Sampling
from contracts.tiers import FinishReason
from infra.settings import SimSettings

from .errors import EngineDead, RequestFailed
from .protocols import Capacity, Detokenizer, EngineRequest, TierNews, TokenDelta
from .sim_script import Plan, load_script
from .sim_text import EOS, SimDetokenizer, reply_base, token_bytes, word_id

#: KV cache of the simulated engine, tokens per slot.
KV_TOKENS_PER_SEQ = 8_192
#: Output tokens where a request sets no budget.
DEFAULT_MAX_TOKENS = 256
#: Steps run in one go by an engine that was kept from its timer; what is later than that is not caught up.
_MAX_CATCH_UP = 100
#: uvloop's clock and timers go in milliseconds: a timer may come this much early.
_CLOCK_STEP_SECONDS = 0.001


@dataclass(slots=True)
class _Choice:
    index: int
    base: int
    position: int
    done: bool = False


@dataclass(slots=True, eq=False)
class _Run:
    """A request in the engine."""

    request: EngineRequest
    choices: list[_Choice]
    budget: int
    left: int
    plan: Plan | None
    faults: bool
    ready_at: float = 0.0
    due: float = 0.0
    kv_tokens: int = 0
    admitted: bool = False
    hanging: bool = False
    outbox: list[TokenDelta] = field(default_factory=list)
    waiter: asyncio.Future[None] | None = None
    error: Exception | None = None

    @property
    def done(self) -> bool:
        return not self.left

    def end(self, choice: _Choice) -> None:
        if not choice.done:
            choice.done = True
            self.left -= 1

    def wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


class SimEngine:
    """See :class:`workers.protocols.Engine`; docs/SIM_ENGINE.md for its text, timing and script."""

    def __init__(self, settings: SimSettings, max_seqs: int, kv_tokens: int | None = None) -> None:
        """An engine that generates ``max_seqs`` choices at once.

        Args:
            kv_tokens: size of the KV cache, tokens; None for :data:`KV_TOKENS_PER_SEQ` per slot.
        """
        self._ttft = settings.ttft_ms / 1000
        self._tpot = settings.tpot_ms / 1000
        self._slowdown = settings.slowdown_per_request
        self._script_path = settings.script
        self._max_seqs = max_seqs
        self._kv_total = kv_tokens or max_seqs * KV_TOKENS_PER_SEQ
        self._kv_used = 0
        self._seqs = 0
        self._waiting: list[tuple[int, int, _Run]] = []
        self._prefilling: list[_Run] = []
        self._decoding: list[_Run] = []
        self._next_step: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._order = count()
        self._dead: str | None = "not started"

    async def start(self) -> None:
        """See :class:`workers.protocols.Engine`; raises ``ScriptError`` for a bad script."""
        self._script = load_script(self._script_path)
        self._dead = None

    async def close(self) -> None:
        """See :class:`workers.protocols.Engine`."""
        self._die("closed")

    async def check(self) -> None:
        """See :class:`workers.protocols.Engine`."""
        if self._dead is not None:
            raise EngineDead(self._dead)

    def capacity(self) -> Capacity:
        """See :class:`workers.protocols.Engine`."""
        waiting = sum(len(run.choices) for _, _, run in self._waiting)
        free = max(0, self._kv_total - self._kv_used)
        return Capacity(self._max_seqs, self._seqs + waiting, self._kv_total, free)

    def detokenizer(self, request: EngineRequest) -> Detokenizer:
        """See :class:`workers.protocols.Engine`."""
        return SimDetokenizer(self._script.pieces)

    def continues(self, sampling: Sampling) -> bool:
        """See :class:`workers.protocols.Engine`. Like vLLM, not within a schema."""
        return sampling.json_schema is None

    def take_tier_news(self, limit: int) -> TierNews | None:
        """See :class:`workers.protocols.Engine`. It has no tier."""
        return None

    async def generate(self, request: EngineRequest) -> AsyncGenerator[TokenDelta, None]:
        """See :class:`workers.protocols.Engine`."""
        run = self._submit(request)
        loop = asyncio.get_running_loop()
        try:
            while True:
                if not run.outbox:
                    if run.error is not None:
                        raise run.error
                    if run.done:
                        return
                    run.waiter = loop.create_future()
                    await run.waiter
                deltas, run.outbox = run.outbox, []
                for delta in deltas:
                    yield delta
        finally:
            self._remove(run)

    def _submit(self, request: EngineRequest) -> _Run:
        if self._dead is not None:
            raise EngineDead(self._dead)
        sampling = request.sampling
        emitted = len(request.emitted_token_ids)
        choices = [
            _Choice(i, reply_base(request.prompt_token_ids, sampling.seed, i), emitted)
            for i in range(sampling.n)
        ]
        if len(choices) > self._max_seqs or len(request.prompt_token_ids) > self._kv_total:
            raise RequestFailed("larger than the engine", client_fault=True)
        plan = self._script.match(request.prompt_token_ids)
        attempt = request.engine_id.rpartition("/")[2]
        faults = plan is not None and plan.faults_on(int(attempt) if attempt.isdecimal() else 1)
        budget = DEFAULT_MAX_TOKENS if sampling.max_tokens is None else sampling.max_tokens
        run = _Run(request, choices, budget, len(choices), plan, faults)
        heapq.heappush(self._waiting, (request.priority, next(self._order), run))
        self._admit()
        self._arm()
        return run

    def _admit(self) -> None:
        """Give waiting requests slots, in order of priority, as long as there is room for the first."""
        now = asyncio.get_running_loop().time()
        while self._waiting:
            run = self._waiting[0][2]
            prompt = len(run.request.prompt_token_ids) + len(run.request.emitted_token_ids)
            if self._seqs + len(run.choices) > self._max_seqs:
                return
            if self._kv_used and self._kv_used + prompt > self._kv_total:
                return
            heapq.heappop(self._waiting)
            self._seqs += len(run.choices)
            run.admitted = True
            run.kv_tokens = prompt
            self._kv_used += prompt
            scripted = run.plan.reply.ttft_ms if run.plan else None
            run.ready_at = now + (self._ttft if scripted is None else scripted / 1000)
            self._prefilling.append(run)

    def _arm(self) -> None:
        """Set the one timer to the next thing that happens."""
        times = [run.ready_at for run in self._prefilling]
        if self._next_step is not None:
            times.append(self._next_step)
        if self._timer is not None:
            if times and self._timer_at == min(times):
                return
            self._timer.cancel()
            self._timer = None
        if times:
            self._timer_at = min(times)
            self._timer = asyncio.get_running_loop().call_at(self._timer_at, self._tick)

    def _tick(self) -> None:
        self._timer = None
        try:
            self._run_steps(asyncio.get_running_loop().time() + _CLOCK_STEP_SECONDS)
        except Exception as error:  # a bug here must end as a dead engine, not as a silent timer
            self._die(f"step loop: {type(error).__name__}")
            raise
        if self._dead is None:
            self._admit()
            self._arm()

    def _run_steps(self, now: float) -> None:
        ready = [run for run in self._prefilling if run.ready_at <= now]
        if ready:
            self._prefilling = [run for run in self._prefilling if run.ready_at > now]
            for run in ready:
                # The steps are common: a request joins at the one nearest to its own second token.
                run.due = run.ready_at + (_pause(run) or self._step_seconds() / 2)
                self._decoding.append(run)
                self._emit(run)
            if self._dead is not None:
                return
            if self._next_step is None:
                self._next_step = ready[0].ready_at + self._step_seconds()
        for _ in range(_MAX_CATCH_UP):
            if self._next_step is None or self._next_step > now:
                break
            self._step(self._next_step)
            if self._dead is not None:
                return
            step = self._step_seconds()
            self._next_step = self._next_step + step if step else now
            if not step:
                break
        self._decoding = [run for run in self._decoding if not run.done and run.error is None]
        if not self._decoding:
            self._next_step = None
        elif self._next_step is not None and self._next_step <= now:
            self._next_step = now + self._step_seconds()

    def _step(self, at: float) -> None:
        for run in self._decoding:
            if run.due <= at and not run.done:
                run.due = at + _pause(run)
                self._emit(run)

    def _step_seconds(self) -> float:
        return self._tpot * (1 + self._slowdown * max(0, len(self._decoding) - 1))

    def _emit(self, run: _Run) -> None:
        """The next token of each choice, or the scripted fault."""
        for choice in run.choices:
            if choice.done or run.hanging or run.error is not None:
                continue
            if run.faults and self._fault(run, choice.position):
                continue
            if choice.position >= run.budget:
                run.end(choice)
                self._put(run, TokenDelta(choice.index, (), None, FinishReason.LENGTH))
                continue
            token_id = self._token(run, choice)
            choice.position += 1
            run.kv_tokens += 1
            self._kv_used += 1
            reason = None
            if token_id == EOS:
                reason = FinishReason.STOP
            elif choice.position >= run.budget:
                reason = FinishReason.LENGTH
            if reason is not None:
                run.end(choice)
            top = run.request.sampling.top_logprobs
            logprobs = None if top is None else (self._logprob(token_id, top),)
            self._put(run, TokenDelta(choice.index, (token_id,), logprobs, reason))
        run.wake()

    def _put(self, run: _Run, delta: TokenDelta) -> None:
        if run.outbox:
            last = run.outbox[-1]
            if last.index == delta.index and last.finish_reason is None and last.logprobs is None:
                ids = (*last.token_ids, *delta.token_ids)
                run.outbox[-1] = TokenDelta(delta.index, ids, None, delta.finish_reason)
                return
        run.outbox.append(delta)

    def _token(self, run: _Run, choice: _Choice) -> int:
        position, plan, sampling = choice.position, run.plan, run.request.sampling
        if plan is not None:
            scripted = plan.token_ids[position] if position < len(plan.token_ids) else None
            if plan.reply.eos_at is not None and position >= plan.reply.eos_at:
                scripted = EOS
            if scripted is not None and (
                scripted != EOS or (not sampling.ignore_eos and position >= sampling.min_tokens)
            ):
                return scripted
        return word_id(choice.base, position)

    def _fault(self, run: _Run, position: int) -> bool:
        if run.plan is None:
            return False
        reply = run.plan.reply
        if position == reply.dead_at:
            self._die("scripted")
        elif position == reply.raise_at:
            run.error = RequestFailed("scripted", client_fault=reply.client_fault)
        elif position == reply.hang_at:
            run.hanging = True
        else:
            return False
        return True

    def _logprob(self, token_id: int, top: int) -> dict[str, Any]:
        raw = token_bytes(token_id, self._script.pieces)
        text = raw.decode("utf-8", "replace")
        return {
            "token": text,
            "logprob": -0.25,
            "bytes": list(raw),
            "top_logprobs": [
                {"token": text, "logprob": -0.25 - rank, "bytes": list(raw)} for rank in range(top)
            ],
        }

    def _remove(self, run: _Run) -> None:
        """Let go of a request, wherever it is; its room is free at once."""
        if run.admitted:
            self._kv_used -= run.kv_tokens
            self._seqs -= len(run.choices)
            run.admitted = False
        for choice in run.choices:
            run.end(choice)
        if run in self._prefilling:
            self._prefilling.remove(run)
        elif run in self._decoding:
            self._decoding.remove(run)
        elif any(run is waiting for _, _, waiting in self._waiting):
            self._waiting = [item for item in self._waiting if item[2] is not run]
            heapq.heapify(self._waiting)
        if self._dead is None:
            self._admit()
            self._arm()

    def _die(self, reason: str) -> None:
        if self._dead is None:
            self._dead = reason
        for run in [*self._decoding, *self._prefilling, *(w for _, _, w in self._waiting)]:
            run.error = run.error or EngineDead(reason)
            run.wake()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._next_step = None


def _pause(run: _Run) -> float:
    """Seconds the script puts between two tokens; 0 leaves it to the engine's steps."""
    return (run.plan.reply.tpot_ms or 0.0) / 1000 if run.plan is not None else 0.0
