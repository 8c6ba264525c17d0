"""What the benchmarks share: percentiles, a streaming load generator's results, CPU time by process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import psutil


def percentile(values: Iterable[float], share: float) -> float:
    """The value below which ``share`` (0..1) of the values lie; NaN where there are none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


@dataclass
class Timeline:
    """When the chunks of one reply came, in seconds after its request was sent."""

    sent: float = field(default_factory=time.perf_counter)
    chunks: list[float] = field(default_factory=list)

    def chunk(self) -> None:
        """A chunk with text has arrived."""
        self.chunks.append(time.perf_counter() - self.sent)

    @property
    def gaps(self) -> list[float]:
        """Seconds between chunks."""
        return [b - a for a, b in zip(self.chunks, self.chunks[1:], strict=False)]


@dataclass
class Run:
    """Results of one closed-loop run."""

    timelines: list[Timeline]
    wall_seconds: float
    errors: list[str]

    def to_json(self) -> dict[str, Any]:
        """For another process; see :meth:`from_json`."""
        chunks = [t.chunks for t in self.timelines]
        return {"chunks": chunks, "wall_seconds": self.wall_seconds, "errors": self.errors}

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Run:
        """Inverse of :meth:`to_json`."""
        timelines = [Timeline(0.0, chunks) for chunks in raw["chunks"]]
        return cls(timelines, raw["wall_seconds"], raw["errors"])

    @property
    def ttft_ms(self) -> list[float]:
        """Time to first token of each reply, milliseconds."""
        return [1e3 * t.chunks[0] for t in self.timelines if t.chunks]

    @property
    def gaps_ms(self) -> list[float]:
        """All gaps between chunks, milliseconds."""
        return [1e3 * gap for t in self.timelines for gap in t.gaps]

    @property
    def chunks(self) -> int:
        """Chunks of all replies."""
        return sum(len(t.chunks) for t in self.timelines)

    @property
    def chunks_per_second(self) -> float:
        """Chunks over the wall time of the run."""
        return self.chunks / self.wall_seconds


async def closed_loop(one: Callable[[int], Awaitable[Timeline]], clients: int, requests: int) -> Run:
    """``clients`` workers send ``requests`` requests in all, each its next when its last has ended.

    Args:
        one: sends request number ``i`` and returns its timeline; raises on any failure.
    """
    numbers = iter(range(requests))
    timelines: list[Timeline] = []
    errors: list[str] = []

    async def client() -> None:
        for number in numbers:
            try:
                timelines.append(await asyncio.wait_for(one(number), 120))
            except Exception as error:
                errors.append(f"{type(error).__name__}: {error}"[:200])

    start = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    return Run(timelines, time.perf_counter() - start, errors)


class CpuMeter:
    """CPU seconds of named processes (with their children) between two moments."""

    def __init__(self, pids: dict[str, list[int]]) -> None:
        self._pids = pids
        self._before = self._read()

    def _read(self) -> dict[str, float]:
        seconds: dict[str, float] = {}
        for name, pids in self._pids.items():
            seconds[name] = sum(_cpu_seconds(pid) for pid in pids)
        return seconds

    def since(self) -> dict[str, float]:
        """CPU seconds by name since the meter was made."""
        now = self._read()
        return {name: now[name] - self._before[name] for name in now}


def _cpu_seconds(pid: int) -> float:
    try:
        root = psutil.Process(pid)
        family = [root, *root.children(recursive=True)]
        return sum(sum(p.cpu_times()[:2]) for p in family)
    except psutil.NoSuchProcess:
        return 0.0
