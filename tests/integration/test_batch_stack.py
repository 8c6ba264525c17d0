"""A batch on a whole stack whose runner is killed: every line ends in one file, once."""

from __future__ import annotations

import io
import json
import os
import signal
from collections import Counter
from pathlib import Path

import openai

from infra.settings import development
from tests.batches import CHAT
from tests.integration.batch_fixture import FINAL, chat_line
from tests.stack_process import PAID_KEY, StackProcess, eventually

LINES = 200


def test_a_batch_whose_runner_is_killed_twice_K13_K14(tmp_path: Path) -> None:
    settings = development("sim").model_dump(mode="json")
    settings["batch"] |= {"lease_seconds": 1.0, "flush_seconds": 0.2, "entrance_share": 1.0}
    config = tmp_path / "config.json"
    config.write_text(json.dumps(settings))
    options = ("--engine", "sim", "--sim-ttft-ms", "200", "--config", str(config))
    with StackProcess(tmp_path / "data", *options) as stack:
        stack.wait_ready()
        client = openai.OpenAI(base_url=f"{stack.url}/v1", api_key=PAID_KEY, max_retries=2)
        content = b"".join(chat_line(f"line {n}", f"{n} " * 300, max_tokens=8) for n in range(LINES))
        file = client.files.create(file=("in.jsonl", io.BytesIO(content)), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")

        def done() -> int:
            counts = client.batches.retrieve(batch.id).request_counts
            return counts.completed if counts is not None else 0

        for part in (1, LINES // 2):
            eventually(lambda part=part: done() >= part, 40, f"{part} lines are done")
            victim = stack.process_state("batch-runner").pid
            assert victim is not None
            os.kill(victim, signal.SIGKILL)
            eventually(
                lambda victim=victim: stack.process_state("batch-runner").pid not in (None, victim),
                10,
                "another runner",
            )
        eventually(lambda: client.batches.retrieve(batch.id).status in FINAL, 60, "the end")
        batch = client.batches.retrieve(batch.id)
        assert (batch.status, batch.error_file_id) == ("completed", None)
        assert batch.request_counts is not None
        assert batch.request_counts.to_dict() == {"total": LINES, "completed": LINES, "failed": 0}
        output = client.files.content(batch.output_file_id or "").read().split(b"\n")[:-1]
        results = [json.loads(line) for line in output]
        assert Counter(r["custom_id"] for r in results) == {f"line {n}": 1 for n in range(LINES)}
        assert all(r["response"]["body"]["usage"]["completion_tokens"] == 8 for r in results)
        assert batch.usage is not None
        assert batch.usage.output_tokens == 8 * LINES
