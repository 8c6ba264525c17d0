"""Wakes a machine's consumers when a record has come, for a broker that does not wake a waiting fetch.

Apache Kafka answers a waiting fetch when a record arrives. The embedded broker looks a few times within the
fetch's wait, so quick hops need hundreds of fetches a second and consumer, nearly all of them empty: more
than half a core for an idle pipeline. Instead a producer rings once its record is acknowledged, and a
consumer fetches when it was rung for.

A ring is a datagram with the record's offset to a socket in a folder that all processes of the machine share.
It is a hint: one that is lost costs :data:`UNRUNG_SECONDS`.

The embedded broker lists a partition's log for every fetch that finds something, and gives up when the
fetch's wait is over: in a log of some thousand records a short fetch finds nothing, though records are there.
So what a ring, or an earlier answer, says to be there is fetched with patience, and nothing else with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
import socket
import struct
import zlib
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

from aiokafka import AIOKafkaConsumer
from aiokafka.protocol.fetch import FetchRequest

#: Every partition is asked for as often, rung for or not.
UNRUNG_SECONDS = 0.25

#: Wait of a fetch for records that are known to be there.
_PATIENT_MS = 500
_OFFSET = struct.Struct("!q")
#: Topic and number.
Partition = tuple[str, int]

_serial = itertools.count()


def _door(folder: Path, partition: Partition) -> Path:
    """Where those who listen for a partition put their sockets; short, as a socket's path must be."""
    topic, number = partition
    return folder / f"{zlib.crc32(topic.encode()):08x}-{number}"


class Ringer:
    """The producer's side."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)

    def ring(self, partition: Partition, offset: int) -> None:
        """Tell who listens for the partition of a record. Never fails and never waits."""
        door = _door(self._folder, partition)
        try:
            bells = os.listdir(door)
        except FileNotFoundError:
            return
        for bell in bells:
            path = door / bell
            try:
                self._socket.sendto(_OFFSET.pack(offset), str(path))
            except BlockingIOError:
                pass  # it has been rung often enough
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)  # its process is dead
            except FileNotFoundError:
                pass

    def close(self) -> None:
        """Ring no more."""
        self._socket.close()


class Doorbell:
    """The consumer's side: where the logs of its partitions end, as far as it was told.

    Attributes:
        ends: the end of each partition's log; none of a partition about which nothing is known.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.ends: dict[Partition, int] = {}
        self._heard = asyncio.Event()
        self._bells: dict[Partition, tuple[socket.socket, Path]] = {}

    def listen(self, partitions: Set[Partition]) -> None:
        """Be rung for these, and no others."""
        for partition in self._bells.keys() - partitions:
            self._unhang(partition)
        for partition in partitions - self._bells.keys():
            self._hang(partition)

    def behind(self, positions: Mapping[Partition, int]) -> set[Partition]:
        """The partitions that have more than these positions."""
        return {p for p, position in positions.items() if position < self.ends.get(p, position)}

    async def wait(self, positions: Mapping[Partition, int]) -> set[Partition]:
        """:meth:`behind`, once there are any; none after a while."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(UNRUNG_SECONDS):
                while not self.behind(positions):
                    self._heard.clear()
                    await self._heard.wait()
        return self.behind(positions)

    def close(self) -> None:
        """Hear no more."""
        self.listen(set())

    def _hang(self, partition: Partition) -> None:
        door = _door(self._folder, partition)
        door.mkdir(parents=True, exist_ok=True)
        path = door / f"{os.getpid()}-{next(_serial)}"
        bell = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        bell.setblocking(False)
        bell.bind(str(path))
        asyncio.get_running_loop().add_reader(bell, self._hear, partition, bell)
        self._bells[partition] = (bell, path)
        self.ends.pop(partition, None)

    def _unhang(self, partition: Partition) -> None:
        bell, path = self._bells.pop(partition)
        asyncio.get_running_loop().remove_reader(bell)
        bell.close()
        path.unlink(missing_ok=True)

    def _hear(self, partition: Partition, bell: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                (offset,) = _OFFSET.unpack(bell.recv(_OFFSET.size))
                self.ends[partition] = offset + 1
                self._heard.set()


def fetch_when_rung(consumer: AIOKafkaConsumer, folder: Path) -> None:
    """Have a consumer that has not started wait for the bell before each fetch.

    There is no public way in; the assertions make a renamed attribute a failure to start.
    """
    client: Any = consumer._client
    send, close = client.send, client.close
    assert callable(send)
    assert callable(close)
    doorbell = Doorbell(folder)
    all_asked_at = -math.inf

    async def send_when_rung(node: Any, request: Any, **options: Any) -> Any:
        nonlocal all_asked_at
        if not isinstance(request, FetchRequest):
            return await send(node, request, **options)
        loop = asyncio.get_running_loop()
        doorbell.listen(consumer.assignment())
        positions = {(topic, p[0]): p[1] for topic, those in request.topics for p in those}
        ask_all = bool(positions.keys() - doorbell.ends) or loop.time() - all_asked_at >= UNRUNG_SECONDS
        behind = doorbell.behind(positions) if ask_all else await doorbell.wait(positions)
        if behind:
            assert isinstance(request._max_wait_ms, int)
            request._max_wait_ms = _PATIENT_MS
        if behind and not ask_all:
            assert isinstance(request._topics, list)
            request._topics = [
                (topic, kept)
                for topic, those in request.topics
                if (kept := [p for p in those if (topic, p[0]) in behind])
            ]
        else:
            all_asked_at = loop.time()
        known = dict(doorbell.ends)
        response = await send(node, request, **options)
        for topic, those in response.topics:
            for number, _error, end, *_ in those:
                # A ring meanwhile may be of a record that came after the broker had looked.
                if doorbell.ends.get((topic, number)) == known.get((topic, number)):
                    doorbell.ends[topic, number] = end
        return response

    async def close_all() -> None:
        doorbell.close()
        await close()

    client.send, client.close = send_when_rung, close_all
