"""The admin step: every topic exists as :mod:`contracts.topics` says, or a clear error says what differs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import KafkaError, TopicAlreadyExistsError, for_code

from contracts.topics import TopicSpec

from .settings import Settings

log = logging.getLogger(__name__)

_MAX_BYTES = "max.message.bytes"
_RETENTION = "retention.ms"


class TopicsError(Exception):
    """A topic cannot be made, or exists but not as it must; the message is meant for people."""


@dataclass(frozen=True, slots=True)
class Existing:
    """A topic as a broker describes it; None where the broker does not say."""

    partitions: int
    max_message_bytes: int | None = None


def missing_topics(wanted: Sequence[TopicSpec], existing: Mapping[str, Existing]) -> list[TopicSpec]:
    """The topics to create."""
    return [spec for spec in wanted if spec.name not in existing]


def topic_problems(wanted: Sequence[TopicSpec], existing: Mapping[str, Existing]) -> list[str]:
    """What keeps existing topics from doing their job, a line each.

    More partitions than wanted are fine. Too few are not added here: that would move keys to other
    partitions under a running deployment, which is its operator's decision.
    """
    problems = []
    for spec in wanted:
        found = existing.get(spec.name)
        if found is None:
            continue
        if found.partitions < spec.partitions:
            problems.append(
                f"topic {spec.name} has {found.partitions} partitions, {spec.partitions} are needed"
            )
        if found.max_message_bytes is not None and found.max_message_bytes < spec.max_message_bytes:
            problems.append(
                f"topic {spec.name} takes records of {found.max_message_bytes} bytes "
                f"({_MAX_BYTES}), {spec.max_message_bytes} are needed"
            )
    return problems


async def ensure_topics(settings: Settings, deadline_seconds: float = 30.0) -> list[str]:
    """Create what is missing and check what exists; returns the names of the topics it created.

    Idempotent, also when several run at once. Tries again until a broker answers or the deadline passes.

    Raises:
        TopicsError: no broker in time, a topic cannot be created, or one exists with too few partitions
            or too small records.
    """
    wanted = settings.kafka.topics.specs(settings.pools)
    deadline = time.monotonic() + deadline_seconds
    wait = 0.05
    while True:
        try:
            return await _ensure_once(settings, wanted)
        except (KafkaError, OSError, TimeoutError) as error:
            if time.monotonic() + wait > deadline:
                reason = str(error) or type(error).__name__
                raise TopicsError(f"no topics on {settings.kafka.bootstrap}: {reason}") from error
            log.debug("topics not ready, trying again", extra={"error": type(error).__name__})
        await asyncio.sleep(wait)
        wait = min(wait * 2, 2.0)


async def _ensure_once(settings: Settings, wanted: Sequence[TopicSpec]) -> list[str]:
    admin = AIOKafkaAdminClient(
        bootstrap_servers=settings.kafka.bootstrap,
        request_timeout_ms=settings.kafka.request_timeout_ms,
        client_id="headrace-topics",
    )
    try:
        await admin.start()
        missing = missing_topics(wanted, await _describe(admin, wanted))
        if missing:
            await _create(admin, missing, settings.kafka.replication_factor)
        existing = await _described_whole(admin, wanted)
    finally:
        await admin.close()
    problems = topic_problems(wanted, existing)
    if problems:
        raise TopicsError("; ".join(problems))
    return [spec.name for spec in missing]


async def _create(admin: AIOKafkaAdminClient, specs: Sequence[TopicSpec], replication: int) -> None:
    response = await admin.create_topics(
        [
            NewTopic(
                spec.name,
                spec.partitions,
                replication,
                topic_configs={
                    _RETENTION: str(spec.retention_ms),
                    _MAX_BYTES: str(spec.max_message_bytes),
                },
            )
            for spec in specs
        ]
    )
    for name, code, *message in response.topic_errors:
        error = for_code(code)
        if code == 0 or error is TopicAlreadyExistsError:
            continue
        if error.retriable:
            raise error(name)
        detail = next((m for m in message if m), error.__name__)
        raise TopicsError(f"topic {name} cannot be created: {detail}")


async def _described_whole(
    admin: AIOKafkaAdminClient, wanted: Sequence[TopicSpec]
) -> dict[str, Existing]:
    """What exists, once all of it is visible: a broker may answer a creation before it shows it."""
    for pause in (0.0, 0.05, 0.1, 0.2, 0.5, 1.0):
        await asyncio.sleep(pause)
        existing = await _describe(admin, wanted)
        absent = missing_topics(wanted, existing)
        if not absent:
            limits = await _record_limits(admin, wanted)
            return {n: Existing(e.partitions, limits.get(n)) for n, e in existing.items()}
    raise KafkaError(f"topic {absent[0].name} was created but is not visible")


async def _describe(admin: AIOKafkaAdminClient, wanted: Sequence[TopicSpec]) -> dict[str, Existing]:
    # All topics rather than these: asking for one by name can create it, with the broker's defaults.
    names = {spec.name for spec in wanted}
    found: list[dict[str, Any]] = await admin.describe_topics()
    return {
        topic["topic"]: Existing(len(topic["partitions"]))
        for topic in found
        if topic["topic"] in names and not topic["error_code"]
    }


async def _record_limits(admin: AIOKafkaAdminClient, wanted: Sequence[TopicSpec]) -> dict[str, int]:
    """Each topic's ``max.message.bytes`` where the broker tells it."""
    resources = [ConfigResource(ConfigResourceType.TOPIC, s.name) for s in wanted]
    limits: dict[str, int] = {}
    for response in await admin.describe_configs(resources):
        for code, _, _, name, entries in response.resources:
            for entry in entries:
                if code == 0 and entry[0] == _MAX_BYTES and entry[1]:
                    limits[name] = int(entry[1])
    return limits
