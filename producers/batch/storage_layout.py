"""Where files and batches are on the storage.

uploads/<2 hex digits>/<file id>     content of an uploaded file
results/<file id>-<run>              content of a result file, as this run of its batch made it
work/<batch id>/<run>-<number>       segments: results of lines, until the result files are there
"""

from __future__ import annotations

from contracts.batch import BatchRecord, ResultKind

from .ids import result_file_id


def upload_path(file_id: str) -> str:
    """Content of an uploaded file."""
    return f"uploads/{file_id[5:7]}/{file_id}"


def result_path(batch: BatchRecord, kind: ResultKind, run: int) -> str:
    """Content of a result file: every run writes one of its own."""
    return f"results/{result_file_id(batch, kind)}-{run}"


def work_folder(batch_id: str) -> str:
    """The segments of a batch."""
    return f"work/{batch_id}"


def segment_path(batch: BatchRecord, number: int) -> str:
    """The ``number``-th segment of the run that has the batch now. Names order by run, then by number."""
    return f"{work_folder(batch.id)}/{batch.runs:08d}-{number:08d}"


def run_of_segment(name: str) -> int:
    """The run that wrote a segment, from its name; 0 for what is none."""
    run = name.partition("-")[0]
    return int(run) if run.isascii() and run.isdecimal() else 0
