"""Batches beside the other clients: whatever dies, each line ends once, in its own words."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from .checks import Violation
from .expected import Turn, completed, prompt_ids
from .plan import KEYS, MARKER
from .wire import Cut, Network, Refused, said
from .wire_http import call

_ENDPOINT = "/v1/chat/completions"
_LINES = 40
_KEY = KEYS[-1][0]
_FINAL = {"completed", "failed", "expired", "cancelled"}
_PAUSE_SECONDS = 0.3
_CALL_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a batch."""

    custom_id: str
    prompt: str
    max_tokens: int

    def as_json(self) -> dict[str, Any]:
        """As it stands in the input file."""
        body = {
            "model": "default",
            "messages": [{"role": "user", "content": self.prompt}],
            "max_tokens": self.max_tokens,
            "temperature": 0,
        }
        return {"custom_id": self.custom_id, "method": "POST", "url": _ENDPOINT, "body": body}

    def text(self) -> str:
        """What the simulated engine says to it."""
        return completed(prompt_ids([Turn("user", self.prompt)]), None, 0, self.max_tokens, None).text


def lines_of(seed: int, number: int) -> list[Line]:
    """The lines of the run's n-th batch, a pure function of the seed."""
    rng = random.Random(seed * 1_000 + number)
    return [
        Line(f"line-{n}", f"{MARKER} batch {number} line {n}", rng.choice((5, 20, 60, 120)))
        for n in range(_LINES)
    ]


class BatchClient:
    """Submits batches as long as the load lasts, and looks at what they have become.

    Attributes:
        ended: how many lines ended, by the file they are in.
        violations: what did not hold.
    """

    def __init__(self, network: Network, seed: int, patience_seconds: float, *, simulated: bool) -> None:
        self._network = network
        self._seed = seed
        self._patience_seconds = patience_seconds
        self._simulated = simulated
        self.ended: dict[str, int] = {}
        self.violations: list[Violation] = []

    async def run(self, seconds: float) -> None:
        """One batch after another; the last one begins before ``seconds`` are over."""
        until = time.monotonic() + seconds
        number = 0
        while time.monotonic() < until:
            try:
                async with asyncio.timeout(self._patience_seconds):
                    await self._batch(number)
            except TimeoutError:
                self._broken("no end for a batch", f"batch {number}")
            except Refused as refusal:
                self._broken("refused", f"batch {number}: {refusal.code}")
            number += 1

    async def _batch(self, number: int) -> None:
        lines = lines_of(self._seed, number)
        content = "".join(json.dumps(line.as_json()) + "\n" for line in lines)
        file = await self._asked("POST", "/v1/files", lambda: {"data": _form(content)})
        body = {"input_file_id": file["id"], "endpoint": _ENDPOINT, "completion_window": "24h"}
        once = {"headers": {"Idempotency-Key": f"chaos-batch-{number}"}, "json": body}
        batch = await self._asked("POST", "/v1/batches", lambda: once)
        while batch["status"] not in _FINAL:
            await asyncio.sleep(_PAUSE_SECONDS)
            batch = await self._asked("GET", f"/v1/batches/{batch['id']}")
        results: dict[str, list[dict[str, Any]]] = {}
        for kind in ("output", "error"):
            file_id = batch[f"{kind}_file_id"]
            text = await self._text("GET", f"/v1/files/{file_id}/content") if file_id else ""
            results[kind] = [json.loads(line) for line in text.splitlines()]
            self.ended[kind] = self.ended.get(kind, 0) + len(results[kind])
        for rule, evidence in _wrong(lines, batch, results, simulated=self._simulated):
            self._broken(rule, f"batch {number}: {evidence}")

    async def _asked(
        self, method: str, path: str, options: Callable[[], dict[str, Any]] = dict
    ) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(await self._text(method, path, options))
        return found

    async def _text(self, method: str, path: str, options: Callable[[], dict[str, Any]] = dict) -> str:
        """The body of an answer, asked for again until it comes.

        Raises:
            Refused: the service says no.
        """
        timeout = aiohttp.ClientTimeout(total=_CALL_SECONDS)
        while True:
            try:
                async with call(
                    self._network, method, path, _KEY, timeout=timeout, **options()
                ) as response:
                    if response.status == 200:
                        return await response.text()
                    raise said((await response.json())["error"])
            except Cut:
                await asyncio.sleep(_PAUSE_SECONDS)

    def _broken(self, rule: str, evidence: str) -> None:
        self.violations.append(Violation(rule, None, "batch", evidence))


def _form(content: str) -> aiohttp.FormData:
    form = aiohttp.FormData({"purpose": "batch"})
    form.add_field("file", content, filename="in.jsonl", content_type="application/jsonl")
    return form


def _wrong(
    lines: Sequence[Line],
    batch: dict[str, Any],
    results: dict[str, list[dict[str, Any]]],
    *,
    simulated: bool,
) -> Iterator[tuple[str, str]]:
    """(rule, evidence) of all that is not as it must be."""
    if batch["status"] != "completed":
        yield "unexpected end of a batch", batch["status"]
    ids = sorted(result["custom_id"] for kind in results.values() for result in kind)
    if ids != sorted(line.custom_id for line in lines):
        yield "lines lost or doubled", f"{len(lines)} lines, {len(ids)} results, {len(set(ids))} ids"
    counts = {"total": len(lines), "completed": len(results["output"]), "failed": len(results["error"])}
    if batch["request_counts"] != counts:
        yield "wrong counts of a batch", f"{batch['request_counts']}, the files have {counts}"
    for result in results["error"]:
        yield "unexpected end of a line", f"{result['custom_id']}: {json.dumps(result)[:200]}"
    if not simulated:
        return
    texts = {line.custom_id: line.text() for line in lines}
    for result in results["output"]:
        text = result["response"]["body"]["choices"][0]["message"]["content"]
        if text != texts.get(result["custom_id"]):
            yield "wrong text of a line", result["custom_id"]
