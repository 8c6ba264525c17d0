"""``headrace up``: brings a stack up, keeps it up, and drains it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from redis.exceptions import RedisError

from contracts.token_stream import StreamsUnavailable

from ..embedded import LOOPBACK
from ..listeners import bind_listener
from ..live_settings import check_live
from ..open_requests_redis import OpenRequests
from ..redis_facts import require_fit
from ..settings import Settings, SettingsError
from ..stream_redis import connect
from ..terminal import Terminal
from ..topics import TopicsError, ensure_topics
from .configure import Addresses, UpOptions, base_settings, effective_settings, reachable_host
from .display import Display
from .errors import StackError
from .ports import PortKeeper
from .process import Watchdog
from .state import SETTINGS_FILE, StackState, data_dir_lock, state_file, write_json
from .supervisor import Supervisor
from .units import Unit, broker_unit, cache_unit, redis_unit, role_units, worker_interpreter

log = logging.getLogger(__name__)

PREFERRED_PORT = 8000
PREFERRED_WS_PORT = 8001

_SERVICES_SECONDS = 30.0
_EXTERNAL_SECONDS = 10.0

#: Asked once the stack is ready: (websocket URL, question).
Ask = Callable[[str, str], Awaitable[object]]


async def up(options: UpOptions, display: Display, ask: Ask) -> int:
    """Run a stack until SIGINT or SIGTERM, or until its terminal is closed; returns the exit code.

    SIGHUP has the configuration file read again (:mod:`infra.live_settings`).

    Raises:
        StackError: it cannot be started or kept running.
        SettingsError: the configuration cannot be used.
    """
    base = base_settings(options)
    worker_interpreter(base)
    keeper = PortKeeper()
    # A socket's path must be short, which a data folder's need not be.
    with data_dir_lock(options.data_dir), TemporaryDirectory(prefix="headrace-") as scratch:
        addresses = _addresses(options, base, keeper, doorbells=Path(scratch))
        try:
            return await _Run(options, base, display, ask, addresses).run()
        finally:
            keeper.release()


def _addresses(options: UpOptions, base: Settings, keeper: PortKeeper, doorbells: Path) -> Addresses:
    http_host, edge_host = base.http.host, base.edge.host

    def pick(given: int | None, option: str, preferred: int, host: str) -> int:
        if given:
            return keeper.given(given, option, host)
        return keeper.any(preferred, host)

    # A file's port is a wish like the built-in one: two stacks of one file can run side by side.
    port = pick(options.port, "--port", base.http.port or PREFERRED_PORT, http_host)
    ws_port = pick(options.ws_port, "--ws-port", base.edge.port or PREFERRED_WS_PORT, edge_host)
    kafka = options.kafka or f"{LOOPBACK}:{keeper.any()}"
    redis = options.redis or f"redis://{LOOPBACK}:{keeper.any()}/0"
    needs_cache = base.kv.enabled and base.worker.engine == "vllm" and base.kv.redis_url is None
    cache = f"redis://{LOOPBACK}:{keeper.any()}/0" if needs_cache else None
    return Addresses(port, ws_port, kafka, redis, doorbells, cache)


class _Run:
    """One life of a stack."""

    def __init__(
        self, options: UpOptions, base: Settings, display: Display, ask: Ask, addresses: Addresses
    ) -> None:
        self._options = options
        self._base = base
        self._addresses = addresses
        self._display = display
        self._ask = ask
        self._settings = self._effective(base)
        self._terminal = Terminal()
        http_host, edge_host = reachable_host(base.http.host), reachable_host(base.edge.host)
        self._state = StackState(
            url=f"http://{http_host}:{addresses.port}",
            ws_url=base.http.public_ws_url or f"ws://{edge_host}:{addresses.ws_port}/v1/ws",
            pid=os.getpid(),
            engine=base.worker.engine,
            kafka=addresses.kafka,
            redis=_without_password(addresses.redis),
        )
        self._stop = asyncio.Event()
        self._signals = 0
        self._supervisor: Supervisor | None = None

    def _effective(self, base: Settings) -> Settings:
        return effective_settings(base, self._addresses, self._options)

    async def run(self) -> int:
        self._listen_to_signals()
        data_dir = self._options.data_dir
        settings_file = data_dir / SETTINGS_FILE
        write_json(settings_file, self._settings.model_dump_json(indent=1))
        listeners = self._listeners()
        watchdog = Watchdog()
        supervisor = Supervisor(
            self._state, state_file(data_dir), data_dir / "logs", watchdog, self._display.update
        )
        self._supervisor = supervisor
        try:
            async with aiohttp.ClientSession() as http:
                try:
                    await self._until_stopped(
                        supervisor, self._bring_up(supervisor, settings_file, http, listeners)
                    )
                finally:
                    self._display.note("stopping")
                    await supervisor.drain()
        finally:
            watchdog.close()
            for listener in listeners.values():
                listener.close()
        self._display.note("stopped")
        return 0 if self._signals < 2 else 130

    def _listeners(self) -> dict[str, socket.socket]:
        """The sockets that gateway and edge serve on, for as long as this stack lives.

        Raises:
            StackError: one cannot be had.
        """
        found: dict[str, socket.socket] = {}
        for name, section in (("gateway", self._settings.http), ("edge", self._settings.edge)):
            try:
                found[name] = bind_listener(section.host, section.port)
            except OSError as error:
                for listener in found.values():
                    listener.close()
                where = f"{section.host}:{section.port}"
                raise StackError(f"{name} cannot listen on {where}: {error.strerror}") from None
        return found

    async def _until_stopped(self, supervisor: Supervisor, bringing_up: Awaitable[None]) -> None:
        work = asyncio.ensure_future(bringing_up)
        stopped = asyncio.ensure_future(self._stop.wait())
        waiting: set[asyncio.Future[Any]] = {work, stopped, supervisor.failure}
        try:
            while not stopped.done():
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if supervisor.failure.done():
                    raise supervisor.failure.result()
                if work.done() and work in waiting:
                    work.result()
                    waiting.discard(work)
        finally:
            for task in (work, stopped):
                task.cancel()
            await asyncio.gather(work, stopped, return_exceptions=True)

    async def _bring_up(
        self,
        supervisor: Supervisor,
        settings_file: Path,
        http: aiohttp.ClientSession,
        listeners: dict[str, socket.socket],
    ) -> None:
        options, settings = self._options, self._settings
        services: list[Unit] = []
        if options.redis is None:
            port = urlsplit(settings.redis.url).port or 0
            services.append(redis_unit(port, options.data_dir))
        if self._addresses.cache is not None:
            port = urlsplit(self._addresses.cache).port or 0
            services.append(cache_unit(port, settings.kv.memory_mib))
        if options.kafka is None:
            port = int(settings.kafka.bootstrap.rpartition(":")[2])

            async def topics_again() -> None:
                if settings.kafka.topics.requests in await ensure_topics(settings, 10.0):
                    await _note_topics_born(settings)

            services.append(broker_unit(port, options.data_dir, topics_again))
        supervisor.start(services)
        try:
            await asyncio.wait_for(supervisor.wait_ready(), _SERVICES_SECONDS)
        except TimeoutError:
            slow = next((r for r in self._state.roles if not r.ready), None)
            name, reason = (slow.name, slow.reason) if slow else ("a service", "")
            raise StackError(f"the embedded {name} did not come up: {reason}; see its log") from None
        if options.redis is not None:
            await _check_redis(settings)
            await require_fit(settings.redis)
        if options.kafka is not None:
            try:
                await ensure_topics(settings, _EXTERNAL_SECONDS)
            except TopicsError as error:
                raise StackError(str(error)) from None
        stack_file = state_file(options.data_dir)
        supervisor.start(
            role_units(settings, settings_file, stack_file, options.workers, http, listeners)
        )
        await supervisor.wait_ready()
        self._display.note(f"Headrace is ready: {self._state.url}  (websocket {self._state.ws_url})")
        if options.ask is not None:
            await self._ask(self._state.ws_url, options.ask)
            self._display.note(f"The chat page: {self._state.url}  (Ctrl-C stops)")

    def _listen_to_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for sig in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(sig, self._on_signal)
        loop.add_signal_handler(signal.SIGHUP, self._on_hangup)

    def _on_signal(self) -> None:
        self._signals += 1
        self._stop.set()
        if self._signals > 1 and self._supervisor is not None:
            self._supervisor.kill()

    def _on_hangup(self) -> None:
        if self._terminal.is_gone():
            self._on_signal()
        elif self._supervisor is not None:
            error = self._reload()
            self._supervisor.note_reload(error)
            self._display.note(f"not reloaded: {error}" if error else "configuration reloaded")

    def _reload(self) -> str | None:
        """Read the configuration file again and pass it on; why that changed nothing, or None.

        What the file says is compared with what it said, not with the ports and addresses that this stack
        has in their place.
        """
        assert self._supervisor is not None
        if self._options.config is None:
            return "there is no configuration file to read again"
        try:
            base = base_settings(self._options)
            check_live(self._base, base)
            settings = self._effective(base)
            write_json(self._options.data_dir / SETTINGS_FILE, settings.model_dump_json(indent=1))
        except (SettingsError, StackError, OSError) as error:
            return str(error)
        self._base, self._settings = base, settings
        self._supervisor.reload()
        return None


async def _note_topics_born(settings: Settings) -> None:
    """Let the reaper know that records from before are gone; without Redis it goes by deadlines alone."""
    client = connect(settings.redis)
    index = OpenRequests(client, settings.kafka.topic_prefix)
    try:
        async with asyncio.timeout(_EXTERNAL_SECONDS):
            while True:
                try:
                    await index.topics_born(time.time_ns() // 1_000_000)
                except StreamsUnavailable:
                    await asyncio.sleep(0.1)
                else:
                    return
    except TimeoutError:
        log.warning("topics made anew, not noted in Redis")
    finally:
        await client.aclose()


async def _check_redis(settings: Settings) -> None:
    client = connect(settings.redis)
    try:
        async with asyncio.timeout(_EXTERNAL_SECONDS):
            while True:
                try:
                    await client.execute_command("PING")  # type: ignore[no-untyped-call]
                except (RedisError, OSError) as error:
                    reason = str(error)
                else:
                    return
                await asyncio.sleep(0.2)
    except TimeoutError:
        where = _without_password(settings.redis.url)
        raise StackError(f"no Redis on {where}: {reason}") from None
    finally:
        await client.aclose()


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return parts._replace(netloc=host, query="").geturl()
