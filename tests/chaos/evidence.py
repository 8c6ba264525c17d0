"""What the stack holds at the end of a run, read from Redis, Kafka, metrics and logs."""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import redis.asyncio as redis
from aiokafka import AIOKafkaConsumer, TopicPartition

from contracts.entries import StreamEntry
from contracts.records import OutcomeRecord, decode
from contracts.topics import Topics
from infra.stack.state import StackState
from infra.stream_redis import request_id_of, stream_entry, stream_key

from .plan import KEYS, MARKER

_GAUGES = (
    "headrace_running",
    "headrace_readers",
    "headrace_sockets",
    "headrace_queue_depth",
    "headrace_batch_lines_running",
)
_SECRETS = re.compile("|".join([MARKER, *(re.escape(key) for key, _, _ in KEYS)]))
#: How long the outcomes topic is read without anything new before it counts as read.
_QUIET_SECONDS = 2.0


@dataclass
class Evidence:
    """Facts about the stack after the load.

    Attributes:
        streams: every token stream in Redis.
        leftovers: names of keys and of gauges that should be gone or 0, with their values.
        outcomes: every outcome record of each request, in order of the topic.
        leaks: log file and line number of every line with prompt text or a key.
        trouble: how often each kind of error line stands in the logs.
    """

    streams: dict[str, list[StreamEntry]] = field(default_factory=dict)
    leftovers: dict[str, str] = field(default_factory=dict)
    outcomes: dict[str, list[OutcomeRecord]] = field(default_factory=dict)
    leaks: list[str] = field(default_factory=list)
    trouble: dict[str, int] = field(default_factory=dict)


async def open_requests(client: Any) -> list[str]:
    """Requests whose streams are not sealed."""
    found = []
    for rid in await _request_ids(client):
        last = await client.xrevrange(stream_key(rid), count=1)
        if last and not last[0][0].startswith(b"18446744073709551615-"):
            found.append(rid)
    return found


async def settled(state: StackState, client: Any, seconds: float) -> float:
    """Wait until nothing is open or left over; the seconds it took, or the deadline.

    What is left then is for the checks to judge.
    """
    began = time.monotonic()
    while (took := time.monotonic() - began) < seconds:
        try:
            if not await open_requests(client) and not await leftovers(state, client):
                return took
        except redis.RedisError:
            pass
        await asyncio.sleep(0.5)
    return took


async def leftovers(state: StackState, client: Any) -> dict[str, str]:
    """Leases, queue entries, pending notes and gauges that are not what an idle stack has."""
    found: dict[str, str] = {}
    async for key in client.scan_iter("hr:{*}:lease", count=1000):
        found[f"lease {key[4:-7].decode()}"] = str(await client.get(key))
    async for key in client.scan_iter("hr:conv:*:pending", count=1000):
        found[f"pending turn {key.decode()}"] = str(await client.hlen(key))
    for name, value in (await client.hgetall("hr:queue:depth")).items():
        if int(value):
            found[f"queue depth {name.decode()}"] = value.decode()
    timeout = aiohttp.ClientTimeout(total=3)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        for role in state.roles:
            if role.kind != "role":
                continue
            try:
                async with http.get(f"http://127.0.0.1:{role.port}/metrics") as response:
                    text = await response.text()
            except (aiohttp.ClientError, OSError, TimeoutError):
                found[f"{role.name}-{role.index}"] = "no metrics"
                continue
            for line in text.splitlines():
                name, _, value = line.rpartition(" ")
                if name.startswith(_GAUGES) and float(value):
                    found[f"{name} of {role.name}-{role.index}"] = value
    return found


async def gather(
    state: StackState, client: Any, topics: Topics, logs: Path, *, outcomes: bool
) -> Evidence:
    """Everything the checks need."""
    evidence = Evidence(leftovers=await leftovers(state, client))
    for rid in await _request_ids(client):
        raw = await client.xrange(stream_key(rid))
        evidence.streams[rid] = [stream_entry(entry_id, fields) for entry_id, fields in raw]
    if outcomes:
        evidence.outcomes = await _outcomes(state.kafka, topics.outcomes)
    await asyncio.to_thread(_read_logs, logs, evidence)
    return evidence


async def _request_ids(client: Any) -> list[str]:
    return sorted({request_id_of(key) async for key in client.scan_iter("hr:{*}:s", count=1000)})


async def _outcomes(bootstrap: str, topic: str) -> dict[str, list[OutcomeRecord]]:
    consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap, enable_auto_commit=False)
    await consumer.start()
    found: dict[str, list[OutcomeRecord]] = {}
    try:
        partitions = [TopicPartition(topic, p) for p in consumer.partitions_for_topic(topic) or {0}]
        consumer.assign(partitions)
        await consumer.seek_to_beginning()
        quiet_since = time.monotonic()
        while time.monotonic() - quiet_since < _QUIET_SECONDS:
            for records in (await consumer.getmany(timeout_ms=200)).values():
                for record in records:
                    outcome = decode(OutcomeRecord, record.value)
                    found.setdefault(outcome.request_id, []).append(outcome)
                    quiet_since = time.monotonic()
    finally:
        await consumer.stop()
    return found


_QUOTED = re.compile(r'"(?:level|logger|message|role)": ?"((?:[^"\\]|\\.)*)"')


def _read_logs(logs: Path, evidence: Evidence) -> None:
    for file in sorted(logs.glob("*.log*")):
        with file.open(errors="replace") as lines:
            for number, line in enumerate(lines, 1):
                if _SECRETS.search(line):
                    evidence.leaks.append(f"{file.name}:{number}")
                if '"ERROR"' in line or '"CRITICAL"' in line or "Traceback" in line[:40]:
                    words = " ".join(_QUOTED.findall(line))[:160] or line.strip()[:160]
                    name = f"{file.name}: {words}"
                    evidence.trouble[name] = evidence.trouble.get(name, 0) + 1
