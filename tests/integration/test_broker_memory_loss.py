"""The embedded broker is killed under a whole stack and forgets everything: no request stays open (I5, G)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from contracts.reply import Reply
from contracts.tiers import Status
from infra.settings import RedisSettings, StreamSettings, development
from infra.stream_redis import RedisTokenStreams, connect
from tests.integration.worker_bench import eventually
from tests.stack_process import PAID_KEY, StackProcess

URL = "/v1/chat/completions"
HEADERS = {"Authorization": f"Bearer {PAID_KEY}"}
WAIT_SECONDS = 40.0
#: Longest time to a terminal state: the tier's wait, the reaper's margin, and some for a busy machine.
BOUND_SECONDS = WAIT_SECONDS + 35.0

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[StackProcess]:
    raw: dict[str, Any] = development("sim").model_dump(mode="json")
    raw["tiers"]["paid"] |= {"max_wait_seconds": WAIT_SECONDS, "leave_grace_seconds": None}
    raw["scheduler"] |= {"orphan_seconds": 4.0}
    raw["kafka"] |= {"session_timeout_ms": 3_000}
    config = tmp_path / "config.json"
    config.write_text(json.dumps(raw))
    with StackProcess(tmp_path / "data", "--config", str(config)) as made:
        made.wait_ready(60)
        yield made


def _pid(stack: StackProcess, name: str) -> int:
    pid = stack.process_state(name).pid
    assert pid is not None
    return pid


async def test_i5_requests_waiting_when_the_broker_forgets_all_end_within_their_bound(
    stack: StackProcess,
) -> None:
    client = connect(RedisSettings(url=stack.state().redis))
    streams = RedisTokenStreams(client, StreamSettings())
    body = {"model": "default", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 20}

    async def open_ids() -> set[str]:
        return {raw.decode() for raw in await client.zrange("hr:open", 0, -1)}

    async with httpx.AsyncClient(base_url=stack.url, headers=HEADERS, timeout=BOUND_SECONDS) as http:
        worker, moderation = _pid(stack, "worker"), _pid(stack, "moderation")
        # Some wait for a worker that is frozen; some for moderation, whose topic will be gone.
        os.kill(worker, signal.SIGSTOP)
        waiting = [asyncio.create_task(http.post(URL, json=body)) for _ in range(5)]

        async def moderated() -> bool:
            ids = await open_ids()
            heads = [await streams.last_ids([i]) for i in ids]
            return len(ids) == 5 and all(last is not None and last.token >= 2 for (last,) in heads)

        await eventually(moderated, "five wait behind moderation", 30)
        os.kill(moderation, signal.SIGSTOP)
        lost = [asyncio.create_task(http.post(URL, json=body)) for _ in range(5)]

        async def accepted() -> bool:
            return len(await open_ids()) == 10

        await eventually(accepted, "ten are open", 30)
        accepted_ids = await open_ids()
        broker = _pid(stack, "broker")
        os.kill(broker, signal.SIGKILL)

        async def reborn() -> bool:
            state = stack.process_state("broker")
            return state.pid not in (None, broker) and state.ready

        await eventually(reborn, "the broker is back", 30)
        os.kill(worker, signal.SIGCONT)
        os.kill(moderation, signal.SIGCONT)

        async def all_ended() -> bool:
            replies = [Reply().extend(await streams.read_all(i)) for i in accepted_ids]
            return all(r.terminal is not None for r in replies)

        await eventually(all_ended, "every accepted request has ended", BOUND_SECONDS)
        answers = await asyncio.gather(*waiting, *lost)
        for answer in answers:
            assert answer.status_code == 200 or answer.json()["error"]["code"] in (
                "service_unavailable",
                "request_lost",
                "deadline_exceeded",
                "worker_lost",
            )
        assert await client.zcard("hr:open") == 0
        # And the pipeline serves again, without anybody's help.
        await asyncio.to_thread(stack.wait_ready, 60)

        async def served() -> bool:
            answer = await http.post(URL, json=body)
            return answer.status_code == 200

        await eventually(served, "a new request is answered", BOUND_SECONDS)
    codes = [a.json()["error"]["code"] for a in answers[5:] if a.status_code != 200]
    assert "request_lost" in codes, "what was lost is said to be, before its deadline"
    statuses = [Reply().extend(await streams.read_all(i)).terminal for i in accepted_ids]
    assert {s.status for s in statuses if s is not None} <= {
        Status.COMPLETED, Status.FAILED, Status.EXPIRED,
    }  # fmt: skip
    await client.aclose()
