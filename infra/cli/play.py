"""``headrace play``: recorded replies for a front end, without a GPU, Kafka or Redis."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from producers.door import KeyDoor
from producers.http_server import HttpServer
from producers.replies import Replies
from streaming_edge.server_websockets import EdgeServer

from ..listeners import bind_listener
from ..replay.app_fastapi import make_play_app
from ..replay.player import Player
from ..replay.recordings import Recording, read_recordings, redacted
from ..settings import Settings, development, hash_key, parse
from ..stack.errors import StackError
from .stop_signals import stop_signals

#: Time for replies that are open to be told that they end.
_FAREWELL_SECONDS = 1.0


@dataclass(frozen=True)
class PlayOptions:
    """How recordings are served.

    Attributes:
        speed: 1 = at their own times, 2 = twice as fast; None = all at once.
        port / ws_port: of HTTP and of the websocket; 0 = any.
    """

    key: str
    speed: float | None = 1.0
    host: str = "127.0.0.1"
    port: int = 8000
    ws_port: int = 8001
    redact: bool = False


def play(path: Path, options: PlayOptions) -> int:
    """Serve the replies of a file until Ctrl-C."""
    logging.basicConfig(level="CRITICAL")
    recordings = _read(path, redact=options.redact)
    return asyncio.run(_serve(recordings, options))


@asynccontextmanager
async def playing(recordings: Sequence[Recording], options: PlayOptions) -> AsyncIterator[Settings]:
    """Serve recordings, for the length of a block; gives the settings with the ports that are served.

    Raises:
        StackError: a port is taken.
    """
    with _bind(options.host, options.port) as http, _bind(options.host, options.ws_port) as sockets:
        models = {recording.model for recording in recordings}
        settings = _settings(options, http.getsockname()[1], sockets.getsockname()[1], models)
        door = KeyDoor(settings)
        player = Player(recordings, options.speed, settings)
        replies = Replies()
        edge = EdgeServer(settings, door, player, player, player)
        gateway = HttpServer(make_play_app(settings, door, player, replies), http)
        try:
            await edge.start(sockets)
            await gateway.start()
            yield settings
        finally:
            replies.closing = True
            replies.end_all()
            await replies.wait_empty(_FAREWELL_SECONDS)
            await gateway.stop()
            await edge.stop()


async def _serve(recordings: Sequence[Recording], options: PlayOptions) -> int:
    with stop_signals() as stopped:
        async with playing(recordings, options) as settings:
            _tell(options.host, settings, len(recordings))
            await stopped.wait()
    return 0


def _tell(host: str, settings: Settings, count: int) -> None:
    host = f"[{host}]" if ":" in host else host
    print(
        f"{count:,} replies, one for each request, from the first again after the last\n"
        f"http://{host}:{settings.http.port}/v1 and its page, "
        f"ws://{host}:{settings.edge.port}/v1/ws; Ctrl-C stops",
        file=sys.stderr,
    )


def _read(path: Path, *, redact: bool) -> list[Recording]:
    try:
        with path.open(encoding="utf-8") as file:
            read = read_recordings(file)
    except (OSError, UnicodeDecodeError) as error:
        raise StackError(f"{path}: {error}") from None
    if read.unreadable or read.incomplete:
        print(
            f"{path}: {read.unreadable:,} entries cannot be played, {read.incomplete:,} replies are not "
            "complete and end as failed",
            file=sys.stderr,
        )
    if not read.found:
        raise StackError(f"{path} has nothing to play (docs/REPLAY.md says which formats are read)")
    return [redacted(recording) for recording in read.found] if redact else read.found


def _bind(host: str, port: int) -> socket.socket:
    try:
        return bind_listener(host, port)
    except OSError as error:
        raise StackError(f"{host}:{port}: {error.strerror}") from None


def _settings(options: PlayOptions, port: int, ws_port: int, models: Iterable[str]) -> Settings:
    """The development settings with one key, and every recorded model under its name."""
    raw: dict[str, Any] = development("sim").model_dump(mode="json")
    ((name, model),) = raw["models"].items()
    model["aliases"] += sorted(set(models) - {"", name, *model["aliases"]})
    tier = next(iter(raw["tiers"]))
    raw["keys"] = [{"id": "play", "sha256": hash_key(options.key), "tenant": "play", "tier": tier}]
    raw["http"] |= {"host": options.host, "port": port}
    raw["edge"] |= {"host": options.host, "port": ws_port}
    return parse(raw)
