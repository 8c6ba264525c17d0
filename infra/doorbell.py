"""Wakes a machine's consumers when a record has come, for a broker that does not wake a waiting fetch.

Apache Kafka answers a waiting fetch when a record arrives. The embedded broker looks a few times within the
fetch's wait, so quick hops need hundreds of fetches a second and consumer, nearly all of them empty: more
than half a core for an idle pipeline. Instead a producer rings once its record is acknowledged, and a
consumer fetches when it was rung for.

A ring is an empty datagram to a socket in a folder that all processes of the machine share. It is a hint: one
that is lost costs :data:`UNRUNG_SECONDS`.

The embedded broker lists a partition's log for every fetch, and gives up when the fetch's wait is over: in a
log of some thousand records a short fetch finds nothing, though records are there. It says where the log ends
all the same. So a consumer that knows of more than it has fetches at once, and with patience. Every partition
of a fetch costs the broker time, so most fetches ask for those which were rung for or are known to have more.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
import socket
import zlib
from collections.abc import Set
from pathlib import Path
from typing import Any

from aiokafka import AIOKafkaConsumer
from aiokafka.protocol.fetch import FetchRequest

#: Every partition is asked for as often, rung for or not.
UNRUNG_SECONDS = 0.25

#: Wait of a fetch for records that are known to be there.
_PATIENT_MS = 500
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

    def ring(self, partition: Partition) -> None:
        """Wake who listens for the partition. Never fails and never waits."""
        door = _door(self._folder, partition)
        try:
            bells = os.listdir(door)
        except FileNotFoundError:
            return
        for bell in bells:
            path = door / bell
            try:
                self._socket.sendto(b"", str(path))
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
    """The consumer's side: which of its partitions were rung for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._rung: set[Partition] = set()
        self._heard = asyncio.Event()
        self._bells: dict[Partition, tuple[socket.socket, Path]] = {}

    def listen(self, partitions: Set[Partition]) -> None:
        """Be rung for these, and no others. A new one counts as rung: something may have come before."""
        for partition in self._bells.keys() - partitions:
            self._unhang(partition)
        for partition in partitions - self._bells.keys():
            self._hang(partition)

    async def wait(self, partitions: Set[Partition]) -> set[Partition]:
        """Those of ``partitions`` that were rung for, once one was, or after a while.

        One that was rung for need not be among them: a consumer leaves out of a fetch what it still has
        records of, and must come back for it, so that ring stays.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(UNRUNG_SECONDS):
                await self._heard.wait()
        return self.rung(partitions)

    def rung(self, partitions: Set[Partition]) -> set[Partition]:
        """Those of ``partitions`` that were rung for since they were last asked about."""
        found = self._rung & partitions
        self._silence(found)
        return found

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
        self._rung.add(partition)
        self._heard.set()

    def _unhang(self, partition: Partition) -> None:
        bell, path = self._bells.pop(partition)
        asyncio.get_running_loop().remove_reader(bell)
        bell.close()
        path.unlink(missing_ok=True)
        self._silence({partition})

    def _hear(self, partition: Partition, bell: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                bell.recv(1)
                self._rung.add(partition)
                self._heard.set()

    def _silence(self, partitions: Set[Partition]) -> None:
        self._rung -= partitions
        if not self._rung:
            self._heard.clear()


def fetch_when_rung(consumer: AIOKafkaConsumer, folder: Path) -> None:
    """Have a consumer that has not started wait for the bell before each fetch.

    There is no public way in; the assertions make a renamed attribute a failure to start.
    """
    client: Any = consumer._client
    send, close = client.send, client.close
    assert callable(send)
    assert callable(close)
    doorbell = Doorbell(folder)
    ends: dict[Partition, int] = {}
    all_asked_at = -math.inf

    async def send_when_rung(node: Any, request: Any, **options: Any) -> Any:
        nonlocal all_asked_at
        if not isinstance(request, FetchRequest):
            return await send(node, request, **options)
        doorbell.listen(consumer.assignment())
        wanted = {(topic, p[0]): p[1] for topic, those in request.topics for p in those}
        behind = {partition for partition in wanted if wanted[partition] < ends.get(partition, 0)}
        if behind:
            assert isinstance(request._max_wait_ms, int)
            request._max_wait_ms = _PATIENT_MS
            asked = behind | doorbell.rung(wanted.keys())
        else:
            asked = await doorbell.wait(wanted.keys())
        now = asyncio.get_running_loop().time()
        if not asked or now - all_asked_at >= UNRUNG_SECONDS:
            asked, all_asked_at = set(wanted), now
        assert isinstance(request._topics, list)
        request._topics = [
            (topic, kept)
            for topic, those in request.topics
            if (kept := [p for p in those if (topic, p[0]) in asked])
        ]
        response = await send(node, request, **options)
        for topic, those in response.topics:
            ends.update({(topic, partition): end for partition, _error, end, *_ in those})
        return response

    async def close_all() -> None:
        doorbell.close()
        await close()

    client.send, client.close = send_when_rung, close_all
