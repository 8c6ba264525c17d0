"""What every role's process does around its work: settings, logs, traces, ops port, signals, drain."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import uvloop
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from .live_settings import LiveSettings
from .logs import configure_logging
from .redis_facts import RedisWatch, require_fit
from .settings import Settings, SettingsError, load
from .tasks import end_tasks
from .telemetry import configure_tracing
from .terminal import Terminal

log = logging.getLogger(__name__)

#: New objects between two collections of the youngest; 700 by default.
_GC_THRESHOLD = 10_000

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)

EXIT_CONFIGURATION = 78  # EX_CONFIG: restarting does not help
#: What ``/readyz`` says from the signal to stop on.
DRAINING = "draining"


class Role(Protocol):
    """A role of the pipeline, as its process drives it."""

    async def start(self) -> None:
        """Connect and begin. May raise anything: the process retries with back-off until it is stopped."""

    async def not_ready(self) -> str | None:
        """Why the role cannot do its work right now, or None. Must answer within a second."""

    async def drain(self) -> None:
        """Take nothing new and let what runs finish; bounded by the role's own grace time.

        Cancelled when the process is told to stop a second time: then the grace is over at once.
        """

    async def stop(self) -> None:
        """Hand over or send away what still runs, and let go of everything; takes a few seconds at most.

        Called once, also after a failed :meth:`start`, and without :meth:`drain` when the role has failed.
        """

    async def run(self) -> None:
        """Return or raise only when the role cannot go on; the supervisor then restarts the process."""

    def reconfigure(self, settings: Settings) -> None:
        """Go by these settings from now on: what differs can change at run time
        (:func:`infra.live_settings.check_live`). Called at any time before :meth:`stop`; must not fail.
        """


class _Ops:
    """The role's own small HTTP port: ``/healthz``, ``/readyz``, ``/metrics``."""

    def __init__(self, name: str, index: int, live: LiveSettings) -> None:
        self.name = name
        self.index = index
        self.live = live
        self.role: Role | None = None
        self.draining = False
        self._runner: web.AppRunner | None = None

    async def _state(self) -> str | None:
        if self.draining:
            return DRAINING
        if self.role is None:
            return "starting"
        try:
            return await asyncio.wait_for(self.role.not_ready(), 1.0)
        except TimeoutError:
            return "no answer within a second"
        except Exception as error:
            return type(error).__name__

    async def _readyz(self, _: web.Request) -> web.Response:
        reason = await self._state()
        facts = {"name": self.name, "index": self.index, "ready": reason is None, "reason": reason}
        return web.json_response(facts, status=200 if reason is None else 503)

    async def _healthz(self, _: web.Request) -> web.Response:
        facts = {"name": self.name, "pid": os.getpid(), "config_error": self.live.error}
        return web.json_response(facts)

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=generate_latest(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def start(self, host: str, port: int) -> None:
        app = web.Application()
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._metrics)
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False)
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port).start()

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()


def role_arguments(description: str) -> argparse.ArgumentParser:
    """The options every role's command has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--config", type=Path, help="configuration file (TOML or JSON)")
    parser.add_argument("--index", type=int, default=0, help="which instance of the role this is")
    parser.add_argument("--ops-host", default="127.0.0.1", help="address of /readyz and /metrics")
    parser.add_argument("--ops-port", type=int, default=0, help="port of /readyz and /metrics (0: any)")
    return parser


def main(name: str, options: argparse.Namespace, make: Callable[[Settings], Role]) -> int:
    """Run a role until SIGTERM or SIGINT; returns the exit code (0 after a clean drain).

    The signal takes the readiness away at once and begins the drain; a second one ends the grace time.
    SIGHUP has the configuration file read again, unless it comes from a terminal that is closed.
    """
    try:
        settings = load(options.config)
    except SettingsError as error:
        print(f"headrace {name}: {error}", file=sys.stderr)
        return EXIT_CONFIGURATION
    configure_logging(name, settings.log_level)
    # As the policy, so that loops which libraries make in threads (Faust's consumer) are quick too.
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    try:
        return asyncio.run(_run(name, options, settings, make))
    except SettingsError as error:
        log.error("cannot start: %s", error)
        print(f"headrace {name}: {error}", file=sys.stderr)
        return EXIT_CONFIGURATION


async def _run(
    name: str, options: argparse.Namespace, settings: Settings, make: Callable[[Settings], Role]
) -> int:
    provider = configure_tracing(name)
    stopping, hurrying = asyncio.Event(), asyncio.Event()
    live = LiveSettings(settings)
    terminal = Terminal()
    ops = _Ops(name, options.index, live)

    def told_to_stop() -> None:
        if stopping.is_set():
            hurrying.set()
        ops.draining = True
        stopping.set()

    def hung_up() -> None:
        if terminal.is_gone():
            told_to_stop()
            return
        try:
            live.reload(options.config)
        except SettingsError as error:
            log.error("configuration not reloaded: %s", error)
        else:
            log.info("configuration reloaded")

    loop = asyncio.get_running_loop()
    for sig in _STOP_SIGNALS:
        loop.add_signal_handler(sig, told_to_stop)
    loop.add_signal_handler(signal.SIGHUP, hung_up)
    # A supervisor starts us with it blocked, so that one which came early is pending and not deadly.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
    await ops.start(options.ops_host, options.ops_port)
    code = 0
    role: Role | None = None
    watch = asyncio.create_task(RedisWatch(settings.redis).run(), name="redis-watch")
    try:
        role = await _start_with_retries(live, make, stopping)
        if role is not None:
            _spare_the_collector()
            ops.role = role
            log.info("ready", extra={"index": options.index, "pid": os.getpid()})
            code = await _work(role, stopping)
            if code == 0:
                log.info("draining")
                await _drain(role, hurrying)
    finally:
        ops.draining = True
        await end_tasks([watch])
        if role is not None:
            live.unsubscribe(role.reconfigure)
            await role.stop()
        await ops.stop()
        if provider is not None:
            provider.shutdown()
        for sig in (*_STOP_SIGNALS, signal.SIGHUP):
            # A further one must not turn the clean end into a death by signal while the interpreter ends.
            loop.remove_signal_handler(sig)
            signal.signal(sig, signal.SIG_IGN)
    log.info("stopped", extra={"code": code})
    return code


def _spare_the_collector() -> None:
    """Leave what a started role has loaded out of garbage collections.

    These are 100,000 objects and more; to walk them takes tens of milliseconds, in which every reply stands
    still. And one request makes more objects than Python lets gather by default.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD, 20, 20)


async def _start_with_retries(
    live: LiveSettings, make: Callable[[Settings], Role], stopping: asyncio.Event
) -> Role | None:
    """A started role, or None if asked to stop first. Its services may come up later than we do."""
    wait = 0.2
    while not stopping.is_set():
        role = make(live.current)
        live.subscribe(role.reconfigure)
        starting = asyncio.ensure_future(_start(role, live.current))
        stopped = asyncio.ensure_future(stopping.wait())
        await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not starting.done():
            await end_tasks([starting])
            await role.stop()
            return None
        failure = starting.exception()
        if failure is None:
            return role
        live.unsubscribe(role.reconfigure)
        await role.stop()
        if isinstance(failure, SettingsError):
            raise failure
        log.warning("start failed, trying again", extra={"error": repr(failure)[:300]})
        try:
            await asyncio.wait_for(stopping.wait(), wait)
        except TimeoutError:
            wait = min(wait * 2, 3.0)
    return None


async def _start(role: Role, settings: Settings) -> None:
    await require_fit(settings.redis)
    await role.start()


async def _drain(role: Role, hurrying: asyncio.Event) -> None:
    draining = asyncio.ensure_future(role.drain())
    hurried = asyncio.ensure_future(hurrying.wait())
    await asyncio.wait({draining, hurried}, return_when=asyncio.FIRST_COMPLETED)
    hurried.cancel()
    if draining.done():
        draining.result()
        return
    log.info("told again to stop: the grace time is over")
    await end_tasks([draining])


async def _work(role: Role, stopping: asyncio.Event) -> int:
    working = asyncio.ensure_future(role.run())
    stopped = asyncio.ensure_future(stopping.wait())
    await asyncio.wait({working, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if stopping.is_set():
        await end_tasks([working])
        return 0
    failure = working.exception()
    log.error("the role ended by itself", exc_info=failure)
    return 1
