"""One attempt at a reply: the engine's tokens in, entries of the token stream out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from enum import Enum

from contracts.entries import SealAfter, StartAfter, Started, Terminal, Text
from contracts.errors import ErrorCode, error_body
from contracts.records import DispatchRecord, Usage
from contracts.reply import ChoiceState, Reply
from contracts.stream_ids import SEAL, START, StreamId
from contracts.tiers import FinishReason, Status
from contracts.token_stream import Appended

from .assembler import Assembler, Piece
from .errors import EngineDead, RequestFailed
from .protocols import Engine, EngineRequest, TokenDelta
from .takeover import Generate, ended_as
from .trail import Trail
from .writer import StreamWriter

log = logging.getLogger(__name__)


class Ending(Enum):
    """How an attempt ended for this worker."""

    #: This attempt wrote the seal.
    SEALED = "sealed"
    #: Somebody else did (a cancel, a deadline).
    SEALED_ELSEWHERE = "sealed_elsewhere"
    #: Another attempt has taken over; the request is no longer ours.
    FENCED = "fenced"
    #: It was told to make room: another attempt goes on.
    HANDED_OVER = "handed_over"
    #: The stream is gone.
    GONE = "gone"
    #: The token streams could not be reached: whoever finds the lease run out goes on.
    UNREACHABLE = "unreachable"


_REFUSED = {
    Appended.SEALED: Ending.SEALED_ELSEWHERE,
    Appended.FENCED: Ending.FENCED,
    Appended.GONE: Ending.GONE,
}


class Generation:
    """An attempt; used once, by one task.

    Attributes:
        emitted: output tokens of earlier attempts that it goes on after.
        reply: the fold of the stream with what this attempt has written, its seal included.
        trail: see :class:`workers.writer.Sink`.
        started: ``<a>-0`` is in the stream; an attempt that ended without has never happened.
        first_token_at: monotonic seconds at which its first text went to the writer, or None.
        last_token_at: the same for its latest tokens from the engine.
        new_tokens: output tokens this attempt has generated.
        cached_tokens: prompt tokens the engine had in a cache.
    """

    def __init__(
        self,
        record: DispatchRecord,
        plan: Generate,
        reply: Reply,
        *,
        engine: Engine,
        writer: StreamWriter,
        prefill_seconds: float,
        hang_seconds: float,
        on_started: Callable[[Generation], None],
        on_prefilled: Callable[[], None],
    ) -> None:
        """An attempt at ``record`` as :func:`workers.takeover.decide` planned it.

        Args:
            on_started: called once when ``<a>-0`` is in the stream.
            on_prefilled: called once when the engine gives its first tokens.
            prefill_seconds: without a first token for so long, it counts as hung.
            hang_seconds: the same between tokens.
        """
        self.request_id = record.request_id
        self.accepted_ms = record.created_ms
        self.leave_grace_ms = record.leave_grace_ms
        self.attempt = plan.attempt
        self.reply = reply
        self.trail = Trail()
        self.started = False
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None
        self.cached_tokens = 0
        self._record = record
        self.emitted = plan.emitted
        self._engine = engine
        self._writer = writer
        self._on_started = on_started
        self._on_prefilled = on_prefilled
        self._prefill_seconds = prefill_seconds
        self._hang_seconds = hang_seconds
        self._loop = asyncio.get_running_loop()
        self._progress = self._written = self._loop.time()
        self._tokens_out = len(plan.emitted)
        self._last_written = StreamId(plan.attempt, 0)
        self._text: list[list[str]] = [[] for _ in range(record.sampling.n)]
        self._answer: asyncio.Future[Appended | None] = self._loop.create_future()
        self._handed_over = False
        self._generating: asyncio.Task[object] | None = None
        self._request = EngineRequest(
            engine_id=f"{record.request_id}/{plan.attempt}",
            prompt_token_ids=record.prompt_token_ids,
            emitted_token_ids=plan.emitted,
            sampling=record.sampling,
            priority=record.queue_class.rank,
            cache_salt=record.tenant,
            shared_tokens=record.shared_tokens,
        )
        self._emitted_texts = self._texts(plan.emitted)
        self._choices = [
            Assembler(
                engine.detokenizer(self._request),
                stop=record.sampling.stop,
                min_tokens=record.sampling.min_tokens,
                emitted_tokens=len(plan.emitted),
                emitted_text="".join(self._emitted_texts[record.sampling.min_tokens :]),
            )
            for _ in range(record.sampling.n)
        ]

    def _texts(self, emitted: Sequence[int]) -> list[str]:
        """What each emitted token completes."""
        if not emitted:
            return []
        detokenizer = self._engine.detokenizer(replace(self._request, emitted_token_ids=()))
        return [detokenizer.push(token_id) for token_id in emitted]

    @property
    def new_tokens(self) -> int:
        """Output tokens this attempt has generated."""
        return sum(c.generated for c in self._choices) - len(self.emitted) * len(self._choices)

    @property
    def usage(self) -> Usage:
        """Tokens of the whole reply so far, each counted once over all attempts."""
        prompt = len(self._record.prompt_token_ids)
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=sum(c.generated for c in self._choices),
            cached_tokens=min(self.cached_tokens, prompt),
        )

    # -- what the writer and the lease keeper see

    @property
    def closed(self) -> bool:
        """See :class:`workers.writer.Sink`."""
        return self._answer.done()

    def appended(self, entry_id: StreamId) -> None:
        """See :class:`workers.writer.Sink`."""
        self._written = self._loop.time()
        if entry_id.is_attempt_start:
            self.started = True
            self._on_started(self)
        elif entry_id == SEAL:
            self._set_answer(Appended.OK)

    def refused(self, result: Appended | None) -> None:
        """See :class:`workers.writer.Sink`. Ends the generation at once."""
        self._set_answer(result)
        if self._generating is not None:
            self._generating.cancel()
            self._generating = None

    def hand_over(self) -> None:
        """Stop generating and leave the stream as it is, if another attempt can go on from there.

        What the writer still has is dropped: the next attempt generates it again. A reply that only waits
        for its seal is not stopped, as it is about to make room by itself.
        """
        if self._generating is None or self._answer.done():
            return
        # See takeover.decide(): with text out, such a reply would have to end as failed.
        continues = len(self._choices) == 1 and self._engine.continues(self._record.sampling)
        if continues or self.first_token_at is None:
            self._handed_over = True
            self.refused(None)

    def hung(self, now: float) -> bool:
        """See :class:`workers.leases.Leased`."""
        patience = self._prefill_seconds if self.last_token_at is None else self._hang_seconds
        return now - self._progress > patience

    def wrote_since(self, then: float) -> bool:
        """See :class:`workers.leases.Leased`."""
        return self._written > then

    def _set_answer(self, result: Appended | None) -> None:
        if not self._answer.done():
            self._answer.set_result(result)

    # -- what the task that runs it calls, in this order

    def begin(self, worker_id: str, model_revision: str) -> None:
        """Write ``<a>-0``, and do not wait for it: what is generated until it is refused goes nowhere."""
        started = Started(
            worker_id=worker_id, model_revision=model_revision, tokens_out=len(self.emitted)
        )
        # Without a look at the stream there is nothing to go on after: the id rule alone decides.
        looked = self.reply.last_id
        entry = started if looked == START else StartAfter(started, looked)
        self._writer.put(self, StreamId(self.attempt, 0), entry)
        self._progress = self._loop.time()
        self.reply.attempts = self.attempt

    async def run(self) -> Ending:
        """Generate to the end, and seal.

        Raises:
            workers.errors.EngineDead: nothing was sealed; another worker goes on.
        """
        try:
            await self._generate_or_stop()
        except RequestFailed as error:
            code = ErrorCode.INVALID_VALUE if error.client_fault else ErrorCode.ENGINE_ERROR
            return await self._seal(
                self._failed(code, f"the engine refused the request: {error.reason}")
            )
        except EngineDead:
            raise
        except Exception:
            log.exception("an attempt failed", extra={"request_id": self.request_id})
            return await self._seal(self._failed(ErrorCode.ENGINE_ERROR, "the engine failed"))
        if self._answer.done():
            return self._ending()
        reasons = [c.finish_reason or FinishReason.LENGTH for c in self._choices]
        return await self._seal(
            Terminal(status=Status.COMPLETED, finish_reasons=reasons, usage=self.usage)
        )

    async def _generate_or_stop(self) -> None:
        """Generate until all choices have ended, or until the writer or the lease keeper says stop."""
        if self._answer.done() or self._ended_before():
            return
        task = asyncio.current_task()
        self._generating = task
        try:
            await self._generate()
        except asyncio.CancelledError:
            # Ours, from refused(), unless somebody cancels the task as well.
            if task is None or not self._answer.done() or task.uncancel() > 0:
                raise
        finally:
            self._generating = None

    async def _generate(self) -> None:
        running = len(self._choices)
        async with aclosing(self._engine.generate(self._request)) as deltas:
            async for delta in deltas:
                now = self._loop.time()
                if self.last_token_at is None:
                    self._on_prefilled()
                self._progress = self.last_token_at = now
                if delta.cached_tokens is not None:
                    self.cached_tokens = delta.cached_tokens
                if self._take(delta, now):
                    running -= 1
                    if not running:
                        return
                if self._writer.full:
                    await self._writer.room()
        raise RequestFailed("it ended without saying why")

    def _take(self, delta: TokenDelta, now: float) -> bool:
        """Write what is out because of ``delta``; whether its choice ended with it."""
        choice = self._choices[delta.index]
        if choice.ended:  # by a stop string, while other choices run on
            return False
        piece = choice.push(delta.token_ids, delta.logprobs)
        if piece is not None:
            self._write(delta.index, piece, now)
        if delta.finish_reason is not None:
            piece = choice.finish(delta.finish_reason)
            if piece is not None:
                self._write(delta.index, piece, now)
        return choice.ended

    def _ended_before(self) -> bool:
        """Whether the attempt this one goes on from had written all the text, and only not the seal."""
        if not self.emitted:
            return False
        self._choices[0].finish_reason = ended_as(
            len(self.emitted),
            "".join(self._emitted_texts),
            self.reply.choices[0].text,
            self._record.sampling.max_tokens,
        )
        return self._choices[0].ended

    def _write(self, index: int, piece: Piece, now: float) -> None:
        if self.first_token_at is None:
            self.first_token_at = now
        self._tokens_out += len(piece.token_ids)
        self._text[index].append(piece.text)
        logprobs = None if piece.logprobs is None else tuple(piece.logprobs)
        entry = Text(piece.text, tuple(piece.token_ids), index, logprobs)
        self._last_written = StreamId(self.attempt, self._tokens_out)
        self._writer.put(self, self._last_written, entry)

    def _failed(self, code: ErrorCode, message: str) -> Terminal:
        return Terminal(status=Status.FAILED, usage=self.usage, error=error_body(code, message))

    async def _seal(self, terminal: Terminal) -> Ending:
        """Write the terminal entry behind the last text, and wait for what becomes of it."""
        self._writer.put(self, SEAL, SealAfter(terminal, self._last_written))
        await self._answer
        ending = self._ending()
        if ending is Ending.SEALED:
            self._fold(terminal)
        return ending

    def _fold(self, terminal: Terminal) -> None:
        """Bring :attr:`reply` up to date from what was written, without reading it again."""
        for index, parts in enumerate(self._text):
            if parts:
                self.reply.choices.setdefault(index, ChoiceState()).text += "".join(parts)
        self.reply.tokens_out = self._tokens_out
        self.reply.terminal = terminal
        self.reply.last_id = SEAL

    def _ending(self) -> Ending:
        if self._handed_over:
            return Ending.HANDED_OVER
        result = self._answer.result()
        if result is None:
            return Ending.UNREACHABLE
        return Ending.SEALED if result is Appended.OK else _REFUSED[result]
