"""Good clients: they come back with a pause, at their offset, and repeat a create that nobody answered."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from contracts.stream_ids import StreamId

from .ledger import Call, End, Reading, Seen
from .plan import Door, Visit
from .wire import SILENCE_SECONDS, Accepted, Cut, Network, Refused, Status, Text
from .wire_http import EventStream, cancel, event_stream, whole
from .wire_websocket import Socket, socket

_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 2.0


class Client:
    """Carries out visits, and enters what it is told into the ledger's calls."""

    def __init__(self, network: Network, calls: list[Call], seed: int, patience_seconds: float) -> None:
        """Clients that wait so long for the end of a reply, all tries together."""
        self._network = network
        self._patience = patience_seconds
        self._calls = calls
        self._rng = random.Random(seed)

    async def visit(self, visit: Visit) -> None:
        """All requests of a visit, each after the end of the one before."""
        for plan in visit.plans:
            call = Call(plan)
            self._calls.append(call)
            try:
                async with asyncio.timeout(self._patience), asyncio.TaskGroup() as group:
                    if plan.late_reader is not None:
                        group.create_task(self._read_late(call, plan.late_reader))
                    await self._converse(call)
            except TimeoutError:
                call.gave_up = f"no end within {self._patience:.0f} s"
            except BaseExceptionGroup as group_error:
                raise group_error.exceptions[0] from None

    async def _converse(self, call: Call) -> None:
        if call.plan.door is Door.HTTP:
            await self._whole(call, call.reading("http"), create=True)
        else:
            await self._follow(call, call.reading(call.plan.kind), create=True)

    async def _read_late(self, call: Call, door: Door) -> None:
        """Another reader, from the start; joins a little after the request is known."""
        for _ in range(int(self._patience / 0.05)):
            if call.request_id is not None or call.refusal is not None:
                break
            await asyncio.sleep(0.05)
        if call.request_id is None:
            return
        reading = call.reading(f"late-{door}")
        if door is Door.HTTP:
            await self._whole(call, reading, create=False)
        else:
            await self._follow(call, reading, create=False, door=door)

    async def _follow(
        self, call: Call, reading: Reading, *, create: bool, door: Door | None = None
    ) -> None:
        """Read to the end (or to the planned leaving), over planned and unplanned losses of connection.

        Args:
            create: this reader is the one that makes the request and behaves as planned.
            door: how it always connects, where it is not the plan's reader.
        """
        pauses = _Pauses(self._rng)
        dropped = 0
        while reading.end is None and not reading.left:
            plan = call.plan
            way = door or (plan.door if not dropped else plan.door_of(dropped))
            cut = plan.cuts[dropped] if create and dropped < len(plan.cuts) else None
            before = len(reading.seen)
            try:
                if await self._connection(call, reading, way, cut, planned=create):
                    dropped += 1
                pauses.reset()
            except Refused as refused:
                if call.request_id is None:
                    call.refusal = refused.code
                else:
                    reading.end = End("failed", refused.code)
                return
            except Cut:
                if len(reading.seen) > before:
                    pauses.reset()
                await pauses.sleep()

    async def _connection(
        self, call: Call, reading: Reading, way: Door, cut: int | None, *, planned: bool
    ) -> bool:
        """One connection, until its end; whether the client itself dropped it."""
        plan, number, pieces, asked = call.plan, reading.connections, 0, False
        reading.connections += 1
        async with self._open(call, reading, way) as source:
            if cut == 0 and call.request_id is not None:
                source.abort()
                return True
            events = aiter(source.events())
            while True:
                async with _silence():
                    event = await anext(events)
                match event:
                    case Accepted():
                        call.accepted(event.request_id, time.monotonic())
                    case Status(offset=StreamId() as offset):
                        reading.reached.setdefault(offset, time.monotonic())
                    case Text():
                        _enter(reading, event, number)
                        pieces += 1
                    case End():
                        reading.end = event
                        return False
                if call.request_id is None:
                    continue
                total = len(reading.seen)
                if planned and plan.leave_after is not None and total >= plan.leave_after:
                    reading.left = True
                    source.abort()
                    return True
                if (
                    planned
                    and not asked
                    and plan.cancel_after is not None
                    and total >= plan.cancel_after
                ):
                    # Again on each connection: it is idempotent, and the last one may not have heard it.
                    asked = True
                    await self._cancel(call, source)
                if cut is not None and pieces >= cut:
                    source.abort()
                    return True

    @asynccontextmanager
    async def _open(
        self, call: Call, reading: Reading, way: Door
    ) -> AsyncIterator[Socket | EventStream]:
        plan, network, rid = call.plan, self._network, call.request_id
        if way is Door.WS:
            async with socket(network, plan.key) as opened:
                if rid is None:
                    frame = {
                        "type": "chat.create",
                        "ref": str(plan.number),
                        "body": plan.body(stream=True),
                    }
                    await opened.send(frame | {"idempotency_key": plan.idempotency_key})
                    call.attempts += 1
                else:
                    after = str(reading.last) if reading.last is not None else None
                    await opened.send({"type": "stream.subscribe", "request_id": rid, "after": after})
                yield opened
        elif rid is None:
            call.attempts += 1
            create = plan.body(stream=True), plan.idempotency_key
            async with event_stream(network, plan.key, create=create) as stream:
                yield stream
        else:
            async with event_stream(network, plan.key, read=(rid, reading.last)) as stream:
                yield stream

    async def _cancel(self, call: Call, source: Socket | EventStream) -> None:
        assert call.request_id is not None
        call.cancelled = True
        if call.plan.cancel_door is Door.WS and isinstance(source, Socket):
            await source.send({"type": "chat.cancel", "request_id": call.request_id})
            return
        pauses = _Pauses(self._rng)
        while True:
            try:
                await cancel(self._network, call.plan.key, call.request_id)
                return
            except Cut:
                await pauses.sleep()

    async def _whole(self, call: Call, reading: Reading, *, create: bool) -> None:
        pauses = _Pauses(self._rng)
        plan = call.plan
        while True:
            reading.connections += 1
            body = (plan.body(stream=False), plan.idempotency_key) if create else None
            call.attempts += create
            try:
                reply = await whole(
                    self._network,
                    plan.key,
                    self._patience,
                    create=body,
                    request_id=call.request_id or "",
                )
            except Refused as refused:
                if call.request_id is None:
                    call.refusal = refused.code
                else:
                    reading.end = End("failed", refused.code)
                return
            except Cut:
                await pauses.sleep()
                continue
            if reply.request_id is not None:
                call.accepted(reply.request_id, time.monotonic())
            reading.whole, reading.end = reply.texts, reply.end
            return


class _Pauses:
    """Exponential back-off with jitter."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._next = _FIRST_PAUSE_SECONDS

    def reset(self) -> None:
        self._next = _FIRST_PAUSE_SECONDS

    async def sleep(self) -> None:
        await asyncio.sleep(self._next * self._rng.uniform(0.5, 1.5))
        self._next = min(self._next * 2, _LONGEST_PAUSE_SECONDS)


@asynccontextmanager
async def _silence() -> AsyncIterator[None]:
    """A connection on which nothing comes for too long is given up, as a client with a watchdog does."""
    timeout = asyncio.timeout(SILENCE_SECONDS)
    try:
        async with timeout:
            yield
    except TimeoutError:
        if timeout.expired():
            raise Cut("silence") from None
        raise
    except StopAsyncIteration:
        raise Cut("ended") from None


def _enter(reading: Reading, event: Text, connection: int) -> None:
    last = reading.last
    if last is not None and event.offset <= last:
        reading.problems.append(f"offset {event.offset} after {last} on connection {connection}")
    reading.seen.append(Seen(event.offset, event.index, event.text, time.monotonic(), connection))
