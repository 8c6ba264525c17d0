"""One run of a batch: from the moment a runner has it in hand until it is over, or somebody else has it.

Everything can be done again by the next run, in any order with what this one still does: requests, files and
results are named by the batch; its record changes only under the lease; which result files it has is decided
once. What is not yet on the storage is found in the token streams.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

from contracts.batch import BatchRecord, BatchStatus, FilePurpose, FileRecord, LineFault, ResultKind
from contracts.errors import ErrorCode, error_body
from contracts.token_stream import StreamsUnavailable
from infra.batches_redis import Batches, Lease, LeaseLost
from infra.file_storage_fsspec import ContentMissing, FileStorage, StorageUnavailable
from infra.files_redis import Files
from infra.stream_redis import RedisTokenStreams
from infra.tasks import end_tasks
from infra.telemetry import BATCH_LINES, BATCH_LINES_RUNNING, BATCHES

from . import life
from .gathering import Gathering
from .ids import result_file_id, result_id
from .line_runner import FinishedLine, LineRunner
from .lines import BatchLine, LineSplitter, Validation, parse_line
from .results import Tally, refused
from .running import Running, Slot
from .segments import find_last_run, gathering_seconds, load_tally, write_result_files, write_segment
from .storage_layout import result_path, work_folder

log = logging.getLogger(__name__)

#: Lifetime of a request's stream once its result is on the storage: enough for the pipeline to publish its
#: outcome, whoever dies meanwhile.
_SHORT_SECONDS: Final = 120


@dataclass(frozen=True, slots=True)
class BatchServices:
    """What runs of batches work with.

    Attributes:
        flush_seconds: see :class:`infra.settings.BatchSettings`.
        lease_seconds: likewise.
        now_ms: the clock, Unix milliseconds.
    """

    batches: Batches
    files: Files
    storage: FileStorage
    streams: RedisTokenStreams
    lines: LineRunner
    slots: asyncio.Semaphore
    flush_seconds: float
    lease_seconds: float
    now_ms: Callable[[], int]


class BatchRun:
    """A run of one batch, under its lease."""

    def __init__(self, services: BatchServices, batch_id: str, lease: Lease) -> None:
        self._services = services
        self._batch_id = batch_id
        self._lease = lease
        self._running = Running(services.slots)
        self._tally = Tally()
        self._segments = 0

    async def run(self) -> int | None:
        """Bring the batch as far as possible.

        Returns:
            When there is something left to do for it, Unix milliseconds; None = never.

        Raises:
            LeaseLost: somebody else has it now.
            StreamsUnavailable, StorageUnavailable: to be tried again later.
        """
        work = asyncio.create_task(self._work())
        keeping = asyncio.create_task(self._keep_lease())
        try:
            await asyncio.wait([work, keeping], return_when=asyncio.FIRST_COMPLETED)
            if keeping.done():
                keeping.result()
            return work.result()
        finally:
            await end_tasks([work, keeping])

    async def _keep_lease(self) -> None:
        """Keep the batch in hand, and end what runs of it once it begins no more lines."""
        services = self._services
        loop = asyncio.get_running_loop()
        kept = loop.time()
        while True:
            await asyncio.sleep(services.lease_seconds / 3)
            try:
                await self._lease.renew()
                kept = loop.time()
                batch = await services.batches.get(self._batch_id)
                if batch is not None and life.ending_of(batch, services.now_ms()) is not None:
                    await services.lines.cut_off(self._running)
            except StreamsUnavailable as error:
                if loop.time() - kept >= services.lease_seconds:
                    raise LeaseLost from error

    async def _work(self) -> int | None:
        last_run = await asyncio.to_thread(find_last_run, self._services.storage, self._batch_id)
        batch = await self._change(lambda b: life.taken(b, last_run))
        if batch is None:
            await self._clean(None)
            return None
        if batch.status.is_final:
            if self._services.now_ms() < life.settles_ms(batch):
                return life.settles_ms(batch)
            await self._clean(batch)
            return None
        if not batch.counts.total:
            batch = await self._validate(batch)
        if not batch.status.is_final and not batch.files:
            ending = life.ending_of(batch, self._services.now_ms())
            if ending is None:
                ending = await self._run_lines(batch)
            batch = await self._decide_files(ending)
        for record in batch.files.values():
            await self._services.files.add(record)
        batch = await self._changed(lambda b: life.ended(b, self._services.now_ms()))
        await self._services.files.release(batch.input_file_id, batch.id)
        BATCHES.labels(batch.status.value).inc()
        log.info("batch is over", extra={"batch_id": batch.id, "status": batch.status.value})
        return life.settles_ms(batch)

    async def _validate(self, batch: BatchRecord) -> BatchRecord:
        validation, splitter = Validation(batch.endpoint), LineSplitter()
        try:
            async for block in self._services.storage.blocks(batch.input_path):
                for number, raw in splitter.feed(block):
                    validation.add(number, raw)
            for number, raw in splitter.finish():
                validation.add(number, raw)
            faults = validation.finish()
        except ContentMissing:
            faults = [LineFault(code="file_not_found", message="The input file is gone.")]
        now_ms = self._services.now_ms()
        return await self._changed(lambda b: life.validated(b, validation.total, faults, now_ms))

    async def _run_lines(self, batch: BatchRecord) -> BatchStatus:
        """Run what has no result yet; returns which end the batch is to be brought to."""
        self._tally = await asyncio.to_thread(load_tally, self._services.storage, batch)
        gathering = Gathering(
            lambda lines: self._write(batch, lines),
            lambda: gathering_seconds(self._services.flush_seconds, self._segments),
        )
        writing = asyncio.create_task(gathering.run())
        feeding = asyncio.create_task(self._feed(batch, gathering))
        try:
            await asyncio.wait([writing, feeding], return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()
            await feeding
            gathering.finish()
            await writing
        finally:
            await end_tasks([writing, feeding])
        if self._tally.count == batch.counts.total:
            return BatchStatus.COMPLETED
        ending = life.ending_of(await self._changed(lambda b: b), self._services.now_ms())
        if ending is None:
            raise StorageUnavailable("lines of a batch have no results")
        return ending

    async def _feed(self, batch: BatchRecord, gathering: Gathering) -> None:
        """Begin lines as there is room, until the file or the batch ends; then wait for those that run."""
        begun: set[asyncio.Task[None]] = set()
        failures: list[BaseException] = []

        def done(task: asyncio.Task[None]) -> None:
            begun.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                failures.append(error)

        try:
            async with aclosing(self._open_lines(batch)) as lines:
                async for number, raw in lines:
                    slot = await self._running.slot()
                    if failures or self._running.ending.is_set():
                        slot.release()
                        break
                    task = asyncio.create_task(self._line(batch, number, raw, slot, gathering))
                    begun.add(task)
                    task.add_done_callback(done)
            while begun and not failures:
                await asyncio.wait(begun, return_when=asyncio.FIRST_COMPLETED)
            if failures:
                raise failures[0]
        finally:
            await end_tasks(list(begun))

    async def _open_lines(self, batch: BatchRecord) -> AsyncGenerator[tuple[int, bytes]]:
        """The lines of the input that have no result, with their numbers."""
        splitter = LineSplitter()
        async with aclosing(self._services.storage.blocks(batch.input_path)) as blocks:
            async for block in blocks:
                for number, raw in splitter.feed(block):
                    if not self._tally.has(number):
                        yield number, raw
        for number, raw in splitter.finish():
            if not self._tally.has(number):
                yield number, raw

    async def _line(
        self, batch: BatchRecord, number: int, raw: bytes, slot: Slot, gathering: Gathering
    ) -> None:
        BATCH_LINES_RUNNING.inc()
        try:
            line = await self._services.lines.run(batch, number, raw, self._running, slot)
        except (StreamsUnavailable, StorageUnavailable):
            raise
        except Exception:
            log.exception("a line failed", extra={"batch_id": batch.id, "line": number})
            line = _failed(batch, number, raw)
        finally:
            BATCH_LINES_RUNNING.dec()
            slot.release()
        if line is not None:
            await gathering.add(line)

    async def _write(self, batch: BatchRecord, lines: Sequence[FinishedLine]) -> None:
        """Make results durable, then let the batch's record tell of them."""
        services = self._services
        results = [line.result for line in lines]
        await asyncio.to_thread(write_segment, services.storage, batch, self._segments, results)
        self._segments += 1
        for result in results:
            if self._tally.add(result):
                BATCH_LINES.labels(result.kind.value).inc()
        counts, usage = self._tally.counts(batch.counts.total), self._tally.usage
        await self._changed(lambda b: life.progressed(b, counts, usage))
        await services.streams.shorten(
            [id_ for line in lines for id_ in line.request_ids], _SHORT_SECONDS
        )

    async def _decide_files(self, ending: BatchStatus) -> BatchRecord:
        """Make the result files, and let them be the batch's."""
        services = self._services
        batch = await self._changed(lambda b: life.finalizing(b, ending, services.now_ms()))
        assert batch.ending is not None
        written = await asyncio.to_thread(write_result_files, services.storage, batch, batch.ending)
        if batch.ending is BatchStatus.COMPLETED and written.tally.count != batch.counts.total:
            raise StorageUnavailable("results of a batch are gone from the storage")
        files = {kind: self._file(batch, kind, size) for kind, size in written.sizes.items()}
        counts = written.tally.counts(batch.counts.total)
        return await self._changed(lambda b: life.decided(b, files, counts, written.tally.usage))

    def _file(self, batch: BatchRecord, kind: ResultKind, size_bytes: int) -> FileRecord:
        now_ms = self._services.now_ms()
        return FileRecord(
            id=result_file_id(batch, kind),
            tenant=batch.tenant,
            filename=f"{batch.id}_{kind.value}.jsonl",
            purpose=FilePurpose.BATCH_OUTPUT,
            size_bytes=size_bytes,
            created_ms=now_ms,
            expires_ms=now_ms + batch.output_seconds * 1000,
            path=result_path(batch, kind, batch.runs),
        )

    async def _clean(self, batch: BatchRecord | None) -> None:
        """Remove what a batch was made from; None = it is no longer known."""
        storage = self._services.storage
        await storage.delete(work_folder(self._batch_id))
        if batch is None:
            return
        kept = {record.path for record in batch.files.values()}
        for run in range(1, batch.runs + 1):
            for kind in ResultKind:
                path = result_path(batch, kind, run)
                if path not in kept:
                    await storage.delete(path)

    async def _change(self, decide: Callable[[BatchRecord], BatchRecord]) -> BatchRecord | None:
        return await self._services.batches.change(self._batch_id, decide, self._lease)

    async def _changed(self, decide: Callable[[BatchRecord], BatchRecord]) -> BatchRecord:
        """:meth:`_change` of a batch that is there."""
        batch = await self._change(decide)
        if batch is None:
            raise LeaseLost
        return batch


def _failed(batch: BatchRecord, number: int, raw: bytes) -> FinishedLine:
    """A line that met an error of ours: its trouble is not its batch's."""
    line = parse_line(number, raw, batch.endpoint)
    custom_id = line.custom_id if isinstance(line, BatchLine) else ""
    error = error_body(ErrorCode.INTERNAL, "The server failed to run this line.")
    return FinishedLine(refused(batch, number, custom_id, result_id(batch, number), error))
