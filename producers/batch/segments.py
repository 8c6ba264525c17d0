"""What the storage holds of a batch's results: segments while it runs, the result files at its end.

Functions block: call them in a thread.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Final

from contracts.batch import BatchRecord, BatchStatus, ResultKind
from infra.file_storage_fsspec import ContentMissing, ContentWriter, FileStorage

from .lines import BatchLine, LineSplitter, parse_line
from .results import LineResult, Tally, cut_off, decode_result
from .storage_layout import result_path, run_of_segment, segment_path, work_folder

log = logging.getLogger(__name__)

#: From so many segments on, new ones are written the less often the more there are.
_MANY_SEGMENTS: Final = 100
_LONGEST_SECONDS: Final = 30.0


def gathering_seconds(base_seconds: float, segments: int) -> float:
    """How long results gather before they make another segment.

    A batch that takes a day would else have so many that a successor reads them for minutes. What is not yet
    in one is not lost with its runner: the ends of requests are in their token streams.
    """
    return min(base_seconds * max(1.0, segments / _MANY_SEGMENTS), max(base_seconds, _LONGEST_SECONDS))


def write_segment(
    storage: FileStorage, batch: BatchRecord, number: int, results: Sequence[LineResult]
) -> None:
    """Make results durable."""
    with storage.writing(segment_path(batch, number)) as file:
        file.write(b"".join(result.encode() for result in results))


def find_last_run(storage: FileStorage, batch_id: str) -> int:
    """Number of the last run that has written a segment; 0 where none has."""
    names = storage.names(work_folder(batch_id))
    return run_of_segment(names[-1]) if names else 0


def _results(storage: FileStorage, batch: BatchRecord) -> Iterator[LineResult]:
    """All results on the storage in order, repeated ones too; records that were cut off are left out."""
    folder = work_folder(batch.id)
    for name in storage.names(folder):
        for record in storage.lines(f"{folder}/{name}"):
            result = decode_result(record)
            if result is not None:
                yield result


def load_tally(storage: FileStorage, batch: BatchRecord) -> Tally:
    """Which lines have results."""
    tally = Tally()
    for result in _results(storage, batch):
        tally.add(result)
    return tally


@dataclass
class ResultFiles:
    """The result files that were written.

    Attributes:
        sizes: bytes of each file that has lines; those without any are not there.
    """

    tally: Tally
    sizes: dict[ResultKind, int] = field(default_factory=dict)


def write_result_files(storage: FileStorage, batch: BatchRecord, ending: BatchStatus) -> ResultFiles:
    """Put every line's result into the file it belongs to, once.

    A line without a result gets one that says why, where its batch had to end before it.
    """
    written = ResultFiles(Tally())
    with ExitStack() as stack:
        files: dict[ResultKind, ContentWriter] = {}

        def put(result: LineResult) -> None:
            if not written.tally.add(result):
                return
            kind = result.kind
            if kind not in files:
                path = result_path(batch, kind, batch.runs)
                files[kind] = stack.enter_context(storage.writing(path))
            files[kind].write(result.text + b"\n")

        for result in _results(storage, batch):
            put(result)
        if ending is not BatchStatus.COMPLETED and batch.counts.total:
            for line in _missing_lines(storage, batch, written.tally):
                put(cut_off(batch, line.number, line.custom_id, ending))
        written.sizes = {kind: file.size_bytes for kind, file in files.items()}
    return written


def _missing_lines(storage: FileStorage, batch: BatchRecord, tally: Tally) -> Iterator[BatchLine]:
    splitter = LineSplitter()
    try:
        for block in storage.read_blocks(batch.input_path):
            for number, raw in splitter.feed(block):
                yield from _missing(batch, number, raw, tally)
        for number, raw in splitter.finish():
            yield from _missing(batch, number, raw, tally)
    except ContentMissing:
        log.error("input of a batch is gone before its end", extra={"batch_id": batch.id})


def _missing(batch: BatchRecord, number: int, raw: bytes, tally: Tally) -> Iterator[BatchLine]:
    if tally.has(number):
        return
    line = parse_line(number, raw, batch.endpoint)
    if isinstance(line, BatchLine):
        yield line
