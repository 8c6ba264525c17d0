"""A batch whose runner dies anywhere, again and again: every line ends in exactly one file, once.

The runs are the real ones, on a storage in memory; a crash is an error before or after any effect, and a
segment's may leave a part of it. What a line ends in may differ from run to run, which is worse than it gets.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.batch import BatchRecord, BatchStatus, FileRecord, ResultKind
from contracts.errors import ErrorCode, error_body
from contracts.records import Usage
from contracts.token_stream import StreamsUnavailable
from infra.batches_redis import Lease
from infra.file_storage_fsspec import ContentWriter, FileStorage, StorageUnavailable
from producers.batch import life
from producers.batch.batch_run import BatchRun, BatchServices
from producers.batch.line_runner import FinishedLine
from producers.batch.lines import BatchLine, parse_line
from producers.batch.results import answered, refused
from producers.batch.running import Running, Slot
from producers.batch.shapes import batch_object
from tests.batches import input_lines, make_batch

_folders = itertools.count()


class World:
    """What survives a crash, and when crashes come."""

    def __init__(self, lines: int, crashes: list[int]) -> None:
        self.storage = CrashingStorage(self, f"memory://crash-{next(_folders)}")
        self.batch = make_batch()
        self.ids = [f"line {n}" for n in range(lines)]
        with self.storage.writing(self.batch.input_path) as file:
            file.write(input_lines(self.ids))
        self.files: dict[str, FileRecord] = {}
        self.shown: list[dict[str, Any]] = []
        self.run = 0
        self.now_ms = self.batch.created_ms
        self.cancelled_after: int | None = None
        self._crashes = iter(crashes)
        self._left = next(self._crashes, None)

    def effect(self) -> None:
        """A crash may come here."""
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                self._left = next(self._crashes, None)
                raise StreamsUnavailable("crash")

    def calm(self) -> None:
        """No more crashes."""
        self._left = None

    async def change(
        self, batch_id: str, decide: Callable[[BatchRecord], BatchRecord], lease: object = None
    ) -> BatchRecord:
        self.effect()
        self.batch = BatchRecord.model_validate_json(decide(self.batch).model_dump_json())
        self.effect()
        return self.batch

    async def get(self, batch_id: str) -> BatchRecord:
        return self.batch

    async def renew(self) -> None:
        pass

    async def add(self, record: FileRecord) -> None:
        self.effect()
        self.files[record.id] = record
        self.effect()

    async def release(self, file_id: str, batch_id: str) -> None:
        self.effect()

    async def shorten(self, request_ids: list[str], seconds: int) -> None:
        self.effect()

    async def cut_off(self, running: Running) -> None:
        running.ending.set()

    async def run_line(
        self, batch: BatchRecord, number: int, raw: bytes, running: Running, slot: Slot
    ) -> FinishedLine | None:
        await asyncio.sleep(0)
        self.effect()
        if running.ending.is_set():
            return None
        if self.cancelled_after == number:
            self.cancelled_after = None
            self.batch = life.cancelled(self.batch, self.now_ms)
            running.ending.set()
            return None
        line = parse_line(number, raw, batch.endpoint)
        assert isinstance(line, BatchLine)
        usage = Usage(prompt_tokens=1, completion_tokens=self.run)
        if (number + self.run) % 3 == 0:
            error = error_body(ErrorCode.ENGINE_ERROR, f"run {self.run}")
            return FinishedLine(refused(batch, number, line.custom_id, "r", error, usage))
        body = {"text": f"run {self.run}"}
        return FinishedLine(answered(batch, number, line.custom_id, "r", body, usage), ("r",))

    def services(self) -> BatchServices:
        return BatchServices(
            batches=cast(Any, self),
            files=cast(Any, self),
            storage=self.storage,
            streams=cast(Any, self),
            lines=cast(Any, Lines(self)),
            slots=asyncio.Semaphore(3),
            flush_seconds=0.0,
            lease_seconds=60.0,
            now_ms=lambda: self.now_ms,
        )

    async def to_the_end(self) -> int:
        """Run after run until the batch needs no more; how many there were."""
        for self.run in range(1, 100):
            try:
                again = await BatchRun(self.services(), self.batch.id, cast(Lease, self)).run()
            except (StreamsUnavailable, StorageUnavailable):
                continue
            finally:
                self.shown.append(cast(dict[str, Any], batch_object(self.batch)))
            if again is None:
                return self.run
            self.now_ms = max(self.now_ms, again)
        raise AssertionError("it never ends")

    def results(self, kind: ResultKind) -> list[dict[str, Any]]:
        record = self.batch.files.get(kind)
        if record is None:
            return []
        assert self.files[record.id] == record
        content = b"".join(self.storage.read_blocks(record.path))
        assert len(content) == record.size_bytes
        return [json.loads(line) for line in content.splitlines()]


class Lines:
    def __init__(self, world: World) -> None:
        self.run = world.run_line
        self.cut_off = world.cut_off


class CrashingStorage(FileStorage):
    """Writes may fail at any byte, and leave what was written."""

    def __init__(self, world: World, url: str) -> None:
        super().__init__(url)
        self._world = world

    @contextmanager
    def writing(self, path: str) -> Iterator[ContentWriter]:
        if not path.startswith("work/"):
            with super().writing(path) as writer:
                yield writer
            return
        self._world.effect()
        with super().writing(path) as writer:
            yield writer
        try:
            self._world.effect()
        except StreamsUnavailable:
            full = self._full(path)
            part = self._fs.cat(full)
            self._fs.pipe(full, part[: len(part) * 2 // 3])
            raise


def check(world: World, total: int) -> None:
    output, error = world.results(ResultKind.OUTPUT), world.results(ResultKind.ERROR)
    assert sorted(r["custom_id"] for r in output + error) == sorted(world.ids)
    assert len({r["id"] for r in output + error}) == total
    assert all(r["response"]["status_code"] == 200 for r in output)
    assert not any((r["response"] or {}).get("status_code") == 200 for r in error)
    counts = world.batch.counts
    assert (counts.total, counts.completed, counts.failed) == (total, len(output), len(error))
    names = [s["output_file_id"] for s in world.shown if s["output_file_id"]]
    assert len(set(names)) <= 1
    assert world.storage.names(f"work/{world.batch.id}") == []
    kept = {record.path.rpartition("/")[2] for record in world.batch.files.values()}
    assert set(world.storage.names("results")) == kept


_CRASHES = st.lists(st.integers(0, 40), max_size=6)


@settings(deadline=None, max_examples=60)
@given(lines=st.integers(1, 12), crashes=_CRASHES)
def test_every_line_ends_in_one_file_once_wherever_runners_die_K13_K17(
    lines: int, crashes: list[int]
) -> None:
    world = World(lines, crashes)
    runs = asyncio.run(world.to_the_end())
    assert runs <= len(crashes) + 2
    assert world.batch.status is BatchStatus.COMPLETED
    check(world, lines)


@settings(deadline=None, max_examples=40)
@given(lines=st.integers(1, 12), crashes=_CRASHES, at=st.integers(1, 12))
def test_what_is_cancelled_delivers_what_is_done_and_says_so_of_the_rest(
    lines: int, crashes: list[int], at: int
) -> None:
    world = World(lines, crashes)
    world.cancelled_after = at
    asyncio.run(world.to_the_end())
    if at <= lines:
        assert world.batch.status is BatchStatus.CANCELLED
        cut = [r for r in world.results(ResultKind.ERROR) if r["error"] is not None]
        assert {r["error"]["code"] for r in cut} == {"batch_cancelled"}
        assert all(r["response"] is None for r in cut)
    check(world, lines)


def test_what_is_late_delivers_what_is_done_and_says_so_of_the_rest_K10() -> None:
    world = World(6, [])
    world.batch = world.batch.model_copy(update={"window_ms": 5_000})
    world.now_ms += 5_000
    asyncio.run(world.to_the_end())
    assert world.batch.status is BatchStatus.EXPIRED
    codes = [r["error"]["code"] for r in world.results(ResultKind.ERROR)]
    assert codes == ["batch_expired"] * 6
    assert world.results(ResultKind.OUTPUT) == []
    check(world, 6)


def test_a_line_that_makes_trouble_is_alone_with_it_K5() -> None:
    world = World(5, [])
    plain = world.run_line

    async def run_line(batch: BatchRecord, number: int, *rest: Any) -> FinishedLine | None:
        if number == 3:
            raise RuntimeError("an engine's answer that nobody expected")
        return await plain(batch, number, *rest)

    world.run_line = run_line  # type: ignore[method-assign]
    asyncio.run(world.to_the_end())
    assert world.batch.counts.completed + world.batch.counts.failed == 5
    errors = world.results(ResultKind.ERROR)
    (trouble,) = [r for r in errors if r["response"]["body"]["error"]["code"] == "internal_error"]
    assert trouble["custom_id"] == "line 2"


@settings(deadline=None, max_examples=20)
@given(lines=st.integers(1, 8), effects=st.integers(0, 40))
def test_a_record_that_forgets_its_last_seconds_ends_the_same_way_again(
    lines: int, effects: int
) -> None:
    world = World(lines, [effects])

    async def forgetful() -> None:
        with suppress(StreamsUnavailable):
            await BatchRun(world.services(), world.batch.id, cast(Lease, world)).run()
        world.calm()
        before = world.batch
        await BatchRun(world.services(), world.batch.id, cast(Lease, world)).run()
        world.batch = before
        await world.to_the_end()

    asyncio.run(forgetful())
    check(world, lines)


@pytest.mark.parametrize("kind", list(ResultKind))
def test_a_file_without_lines_is_not_there_K11(kind: ResultKind) -> None:
    world = World(3, [])

    async def run_line(batch: BatchRecord, number: int, *_: Any) -> FinishedLine | None:
        if kind is ResultKind.OUTPUT:
            error = error_body(ErrorCode.CONTEXT_LENGTH_EXCEEDED, "Too long.")
            return FinishedLine(refused(batch, number, f"line {number - 1}", "r", error))
        return FinishedLine(answered(batch, number, f"line {number - 1}", "r", {}, Usage()))

    world.run_line = run_line  # type: ignore[method-assign]
    asyncio.run(world.to_the_end())
    assert world.batch.status is BatchStatus.COMPLETED
    assert kind not in world.batch.files
    check(world, 3)
