"""One line of a batch, from its text to its result: the request is submitted, followed to its end, and read.

A line's requests have ids that follow from the line alone. So whoever comes after a runner that died finds
what that one began: a request that runs is followed, one that has ended is read, and only one that is not
there is made.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from contracts.batch import BatchRecord, LineFault
from contracts.entries import Terminal
from contracts.errors import ApiError, ErrorCode, error_body
from contracts.identity import Principal, make_request_id
from contracts.stream_ids import ACCEPTED
from contracts.tiers import Status
from infra.settings import Settings
from infra.stream_redis import RedisTokenStreams

from ..chat_request import ChatRequest
from ..intake import PipelineIntake
from .endpoints import ENDPOINTS
from .entrance import Entrance
from .ids import line_bytes
from .line_outcome import MAX_ATTEMPTS, PASSING, is_cut_off, result_of
from .lines import parse_line
from .results import LineResult, refused
from .running import Running, Slot
from .seal_watch import SealWatch

log = logging.getLogger(__name__)

#: Longest pause between two tries of a line that was refused for now.
_LONGEST_PAUSE_SECONDS: Final = 30.0
_SHORTEST_PAUSE_SECONDS: Final = 0.5
#: Whole replies in memory at the same time.
_READS: Final = 8


@dataclass(frozen=True, slots=True)
class FinishedLine:
    """A line with a result.

    Attributes:
        request_ids: the requests that were made of it; their streams are not needed any more once the
            result is on the storage.
    """

    result: LineResult
    request_ids: tuple[str, ...] = ()


class LineRunner:
    """Runs the lines of all batches of one process.

    Args:
        settings: what is in force when it is called.
        entrance: what a line is in until moderation has seen it.
    """

    def __init__(
        self,
        settings: Callable[[], Settings],
        intake: PipelineIntake,
        streams: RedisTokenStreams,
        watch: SealWatch,
        entrance: Entrance,
    ) -> None:
        self._settings = settings
        self._intake = intake
        self._streams = streams
        self._watch = watch
        self._entrance = entrance
        self._reads = asyncio.Semaphore(_READS)

    async def run(
        self, batch: BatchRecord, number: int, raw: bytes, running: Running, slot: Slot
    ) -> FinishedLine | None:
        """The result of a line; None where its batch ends before it.

        Args:
            slot: given to others while the line waits for the limits of its tenant.

        Raises:
            StreamsUnavailable: Redis cannot be reached.
        """
        line = parse_line(number, raw, batch.endpoint)
        first_id = _request_id(batch, number, 0)
        if isinstance(line, LineFault):  # the file is another one than was validated
            error = error_body(ErrorCode.INVALID_REQUEST, line.message, line.param)
            return FinishedLine(refused(batch, number, "", first_id, error))
        try:
            settings = self._settings()
            request = ENDPOINTS[batch.endpoint](line.body, settings, _creator(settings, batch))
        except ApiError as error:
            return FinishedLine(refused(batch, number, line.custom_id, first_id, error.body))
        made: list[str] = []
        for attempt in range(MAX_ATTEMPTS):
            request_id = _request_id(batch, number, attempt)
            running.requests.add(request_id)
            try:
                if not await self._to_its_end(batch, request.chat, request_id, running, slot):
                    return None
            except ApiError as error:
                return FinishedLine(refused(batch, number, line.custom_id, request_id, error.body))
            finally:
                running.requests.discard(request_id)
            made.append(request_id)
            async with self._reads:
                entries = await self._streams.read_all(request_id)
                if running.ending.is_set() and is_cut_off(entries):
                    return None
                result = result_of(
                    batch,
                    number,
                    line.custom_id,
                    request_id,
                    request.answer,
                    entries,
                    self._settings(),
                    attempt,
                )
            if result is not None:
                return FinishedLine(result, tuple(made))
            log.info("line is run again", extra={"batch_id": batch.id, "request_id": request_id})
        raise AssertionError("the last attempt has a result")

    async def cut_off(self, running: Running) -> None:
        """End what runs of a batch that begins no more lines."""
        running.ending.set()
        cancelled = Terminal(status=Status.CANCELLED)
        await self._streams.seal_many([(request_id, cancelled) for request_id in running.requests])

    async def _to_its_end(
        self,
        batch: BatchRecord,
        request: ChatRequest,
        request_id: str,
        running: Running,
        slot: Slot,
    ) -> bool:
        """Make the request unless it is there, and wait for its end; False where its batch ends first.

        Raises:
            ApiError: a refusal that does not pass.
        """
        (last,) = await self._streams.last_ids([request_id])
        # One that is only accepted may have no record yet: whoever made it died in between.
        if last is None or last == ACCEPTED:
            pause = _SHORTEST_PAUSE_SECONDS
            while (wanted := await self._submit(batch, request, request_id, running)) is not None:
                wait = min(max(pause, wanted), _LONGEST_PAUSE_SECONDS)
                if running.ending.is_set() or await running.pause(slot, wait):
                    return False
                pause *= 2
        self._watch.begin(request_id)
        try:
            if running.ending.is_set():
                await self._streams.seal(request_id, Terminal(status=Status.CANCELLED))
            await self._watch.ended(request_id)
        finally:
            self._watch.forget(request_id)
        return True

    async def _submit(
        self, batch: BatchRecord, request: ChatRequest, request_id: str, running: Running
    ) -> float | None:
        """Have a request accepted and moderated; seconds to wait where it is refused for now.

        Raises:
            ApiError: a refusal that does not pass.
        """
        async with self._entrance.place():
            if running.ending.is_set():
                return 0.0
            try:
                await self._intake.submit(_of_lines(batch), request, request_id=request_id)
            except ApiError as error:
                if error.code not in PASSING:
                    raise
                return float(error.retry_after_seconds or 0)
            self._watch.begin(request_id)
            try:
                await self._watch.moderated(request_id)
            finally:
                self._watch.forget(request_id)
        return None


def _request_id(batch: BatchRecord, number: int, attempt: int) -> str:
    return make_request_id(batch.created_ms, line_bytes(batch, number, attempt))


def _creator(settings: Settings, batch: BatchRecord) -> Principal:
    """Who made the batch: what it may use, its lines may.

    Raises:
        ApiError: its key is gone.
    """
    if not any(key.id == batch.key_id and key.tenant == batch.tenant for key in settings.keys):
        raise ApiError(ErrorCode.INVALID_API_KEY, "The API key of this batch is no longer valid.")
    return Principal(key_id=batch.key_id, tenant=batch.tenant, tier=batch.tier)


def _of_lines(batch: BatchRecord) -> Principal:
    """Whom its lines count for."""
    return Principal(key_id=batch.key_id, tenant=batch.tenant, tier=batch.line_tier)
