"""``headrace batch``: a file of prompts or batch lines goes in, its results come out."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from ..stack.errors import StackError
from ..stack.state import state_to_call
from .batch_api import BatchApi
from .batch_input import PromptOptions, batch_lines, endpoint_of

_FINAL: Final = ("completed", "failed", "expired", "cancelled")
_LOOK_SECONDS: Final = 1.0
#: A gateway that does not answer for so long while a batch is waited for ends the waiting.
_GIVE_UP_SECONDS: Final = 60.0


@contextmanager
def _api(url: str | None, key: str, data_dir: Path) -> Iterator[BatchApi]:
    if url is None:
        url = state_to_call(data_dir, "--url").url
    api = BatchApi(url, key)
    try:
        yield api
    finally:
        api.close()


def submit(
    path: Path,
    options: PromptOptions,
    *,
    wait: bool,
    output: Path | None,
    url: str | None,
    key: str,
    data_dir: Path,
) -> int:
    """Upload a file and begin its batch; its id goes to standard output.

    Returns:
        0; with ``wait`` 0 only when every line was answered, 130 after Ctrl-C, which leaves it running.
    """
    with _api(url, key, data_dir) as api, tempfile.NamedTemporaryFile("w+b", suffix=".jsonl") as lines:
        count = 0
        for line in batch_lines(path, options):
            lines.write(line)
            count += 1
        if not count:
            raise StackError(f"{path} has no prompts")
        _say(f"uploading {count:,} lines ({lines.tell() / 1e6:,.1f} MB)")
        lines.seek(0)
        file_id = api.upload(f"{path.stem}.jsonl", lines.file)
        batch = api.create(file_id, endpoint_of(Path(lines.name)))
        print(batch["id"], flush=True)
        if not wait and output is None:
            _say(f"it runs: headrace batch status {batch['id']}")
            return 0
        return _wait(api, batch["id"], output)


def status(batch_id: str, *, wait: bool, url: str | None, key: str, data_dir: Path) -> int:
    """Say how far a batch is; 1 for one that has ended otherwise than completed."""
    with _api(url, key, data_dir) as api:
        if wait:
            return _wait(api, batch_id, None)
        batch = api.get(batch_id)
        _show(batch)
        return int(batch["status"] in _FINAL and batch["status"] != "completed")


def cancel(batch_id: str, *, url: str | None, key: str, data_dir: Path) -> int:
    """End a batch; what is done can be fetched."""
    with _api(url, key, data_dir) as api:
        _show(api.cancel(batch_id))
    return 0


def results(batch_id: str, *, output: Path | None, url: str | None, key: str, data_dir: Path) -> int:
    """Write the results of a batch that has ended: to ``output``, or to standard output."""
    with _api(url, key, data_dir) as api:
        batch = api.get(batch_id)
        if batch["status"] not in _FINAL:
            raise StackError(f"the batch is {batch['status']}: headrace batch status {batch_id} --wait")
        return _fetch(api, batch, output)


def _wait(api: BatchApi, batch_id: str, output: Path | None) -> int:
    try:
        batch = _followed(api, batch_id)
    except KeyboardInterrupt:
        _say(f"it goes on: headrace batch status {batch_id} --wait, or headrace batch cancel {batch_id}")
        return 130
    _show(batch)
    if output is not None:
        return _fetch(api, batch, output)
    if batch["output_file_id"] or batch["error_file_id"]:
        _say(f"its results: headrace batch results {batch_id}")
    return _code(batch)


def _followed(api: BatchApi, batch_id: str) -> dict[str, Any]:
    """The batch at its end, with a bar while it runs."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    reached = time.monotonic()
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("validating", total=None, rate="")
        while True:
            try:
                batch = api.get(batch_id)
                reached = time.monotonic()
            except StackError:
                if time.monotonic() - reached > _GIVE_UP_SECONDS:
                    raise
                time.sleep(_LOOK_SECONDS)
                continue
            counts = batch["request_counts"]
            done = counts["completed"] + counts["failed"]
            speed = bar.tasks[0].speed
            bar.update(
                task,
                description=batch["status"],
                total=counts["total"] or None,
                completed=done,
                rate=f"{speed:,.1f} lines/s" if speed else "",
            )
            if batch["status"] in _FINAL:
                return batch
            time.sleep(_LOOK_SECONDS)


def _fetch(api: BatchApi, batch: dict[str, Any], output: Path | None) -> int:
    """Both result files: errors go beside the output, or after it."""
    found = (("output_file_id", output), ("error_file_id", _errors_beside(output)))
    for name, path in found:
        if batch[name] is None:
            continue
        if path is None:
            api.download(batch[name], sys.stdout.buffer.write)
            sys.stdout.buffer.flush()
            continue
        try:
            with path.open("wb") as file:
                api.download(batch[name], file.write)
        except OSError as error:
            raise StackError(f"{path}: {error.strerror}") from None
        _say(f"{path}: {'answers' if name == 'output_file_id' else 'lines that failed'}")
    return _code(batch)


def _errors_beside(output: Path | None) -> Path | None:
    return output.with_name(f"{output.stem}.errors{output.suffix}") if output is not None else None


def _code(batch: dict[str, Any]) -> int:
    whole = batch["status"] == "completed" and not batch["request_counts"]["failed"]
    return 0 if whole else 1


def _show(batch: dict[str, Any]) -> None:
    counts = batch["request_counts"]
    _say(
        f"{batch['id']} {batch['status']}: {counts['completed']:,} answered and {counts['failed']:,} failed "
        f"of {counts['total']:,}"
    )
    for fault in ((batch.get("errors") or {}).get("data") or [])[:10]:
        where = f"line {fault['line']}: " if fault.get("line") else ""
        _say(f"  {where}{fault['message']}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
