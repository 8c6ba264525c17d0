"""A gateway and a batch runner in one process, with the pipeline double behind them."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import openai
from anyio.from_thread import BlockingPortal, start_blocking_portal
from openai.types import Batch

from contracts.batch import BatchStatus
from infra.settings import DEV_PAID_KEY, Settings
from producers.batch.role import BatchRunnerRole
from tests.batches import CHAT
from tests.integration.gateway_fixture import Gateway, running_gateway
from tests.stack_process import eventually

FINAL = [status.value for status in BatchStatus if status.is_final]


@dataclass
class BatchSystem:
    portal: BlockingPortal
    gateway: Gateway
    runners: list[BatchRunnerRole] = field(default_factory=list)

    def client(self, api_key: str = DEV_PAID_KEY) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.gateway.url}/v1", api_key=api_key, max_retries=0, timeout=20
        )

    def upload(self, content: bytes, api_key: str = DEV_PAID_KEY, **more: Any) -> str:
        form = {"file": ("in.jsonl", io.BytesIO(content)), "purpose": "batch", **more}
        return self.client(api_key).files.create(**form).id

    def submit(self, content: bytes, **more: Any) -> Batch:
        return self.client().batches.create(
            input_file_id=self.upload(content), endpoint=CHAT, completion_window="24h", **more
        )

    def wait(self, batch: Batch, states: Sequence[str] = FINAL, seconds: float = 15.0) -> Batch:
        client = self.client()

        def reached() -> Batch | None:
            found = client.batches.retrieve(batch.id)
            return found if found.status in states else None

        found: Batch = eventually(reached, seconds, f"{batch.id} is {states}")
        return found

    def results(self, file_id: str | None) -> list[dict[str, Any]]:
        if file_id is None:
            return []
        content = self.client().files.content(file_id).read()
        return [json.loads(line) for line in content.split(b"\n")[:-1]]

    def ended(self, batch: Batch) -> tuple[Batch, list[dict[str, Any]], list[dict[str, Any]]]:
        """The batch at its end, with its output and its errors."""
        batch = self.wait(batch)
        return batch, self.results(batch.output_file_id), self.results(batch.error_file_id)

    def made_since(self, before: set[str]) -> dict[str, Any]:
        """Requests that came through Kafka since then."""
        records = self.gateway.double.records
        return {rid: record for rid, record in records.items() if rid not in before}

    def start_runner(self) -> None:
        self.runners.append(self.portal.call(_started, self.gateway.role._settings))

    def stop_runner(self) -> None:
        self.portal.call(self.runners.pop().stop)


async def _started(settings: Settings) -> BatchRunnerRole:
    role = BatchRunnerRole(settings)
    await role.start()
    return role


@contextmanager
def batch_system(settings: Settings) -> Iterator[BatchSystem]:
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(running_gateway(settings)) as gateway,
    ):
        system = BatchSystem(portal, gateway)
        system.start_runner()
        try:
            yield system
        finally:
            while system.runners:
                system.stop_runner()


def chat_line(custom_id: str, content: str = "hi", **more: Any) -> bytes:
    """A line of an input file."""
    body = {"model": "default", "messages": [{"role": "user", "content": content}], **more}
    line = {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body}
    return json.dumps(line).encode() + b"\n"


def played(custom_id: str, **script: Any) -> bytes:
    """A line whose reply the pipeline double plays."""
    return chat_line(custom_id, json.dumps(script))
