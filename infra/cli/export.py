"""``headrace export``: conversations from the log as JSON lines, or their replies as recordings."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from contracts.entries import StreamEntry
from contracts.token_stream import StreamsUnavailable

from ..replay.recordings import recording_object, redacted, turn_recording
from ..replay.shelf import Shelf
from ..replay.sources import recorded_turn
from ..replay.turns import Wanted, conversation_object
from ..settings import Settings
from ..stack.errors import StackError
from ..stream_redis import RedisTokenStreams, connect
from .log import settings_of, shelf_of_log, told


def export(
    *,
    config: Path | None,
    data_dir: Path,
    output: Path | None,
    wanted: Wanted,
    redact: bool,
    streams: bool = False,
) -> int:
    """Write the conversations of the log, one a line, to ``output`` or to standard output.

    Args:
        streams: write what ``headrace play`` plays instead, a reply a line.
    """
    logging.basicConfig(level="CRITICAL")
    settings = settings_of(config, data_dir)
    with shelf_of_log(settings.kafka, wanted) as (shelf, tally), written(output) as file:
        if streams:
            what = asyncio.run(_write_streams(settings, shelf, file, redact=redact))
        else:
            what = _write(shelf, file, redact=redact)
    print(f"{what} with {told(tally)}", file=sys.stderr)
    return 0


def unix_ms(text: str) -> int:
    """A time in ISO 8601 as Unix milliseconds; UTC where it names no zone.

    Raises:
        ValueError: it is none.
    """
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return int(moment.timestamp() * 1000)


@contextmanager
def written(output: Path | None) -> Iterator[IO[str]]:
    """A file to write to, or standard output.

    Raises:
        StackError: it cannot be written.
    """
    if output is None:
        yield sys.stdout
        return
    try:
        with output.open("w", encoding="utf-8") as file:
            yield file
    except OSError as error:
        raise StackError(f"{output}: {error.strerror}") from None


def write_line(file: IO[str], value: object) -> None:
    """Write a JSON value as a line."""
    file.write(json.dumps(value, ensure_ascii=False) + "\n")


def _write(shelf: Shelf, file: IO[str], *, redact: bool) -> str:
    count = 0
    for tenant, conversation, turns in shelf.conversations():
        write_line(file, conversation_object(conversation, tenant, turns, redact=redact))
        count += 1
    return f"{count:,} conversations"


async def _write_streams(settings: Settings, shelf: Shelf, file: IO[str], *, redact: bool) -> str:
    client = connect(settings.redis)
    streams = RedisTokenStreams(client, settings.streams)
    count = kept = 0
    try:
        for _, _, turns in shelf.conversations():
            for turn in turns:
                items = await _whole_stream(streams, turn["request_id"])
                recording = turn_recording(recorded_turn(turn), turn["request_id"], items)
                write_line(file, recording_object(redacted(recording) if redact else recording))
                count += 1
                kept += bool(items)
    except StreamsUnavailable as error:
        raise StackError(f"Redis: {error}") from None
    finally:
        await client.aclose()
    return f"{count:,} replies ({kept:,} as they were streamed, the others from their texts)"


async def _whole_stream(streams: RedisTokenStreams, request_id: str) -> list[StreamEntry]:
    """A token stream that is still kept, with its end; else nothing."""
    items = await streams.read_all(request_id)
    return items if items and items[-1].id.is_seal else []
