"""What one replica can do: how many replies at once, at which rate, and how soon they begin.

A replica that has B replies running completes B of them, on average, in the time of R decode steps (R
tokens a reply) and of the B prefills that come in between: one cycle. From it follow rate and TPOT, and from
the rate the wait for prefill.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .demand import Flow, Mix
from .kv_tier import load_bandwidth, load_seconds, recompute_seconds
from .memory import Engine, Shape
from .roofline import Prefill, decode_step, prefill


@dataclass(frozen=True, slots=True)
class Point:
    """One replica at work.

    Attributes:
        running: replies it generates at once.
        rate: requests/s that it completes.
        step_seconds: one decode step, without prefills.
        tpot_seconds: time per output token, with the prefills that come in between.
        ttft_seconds: by tier, 95 of 100 requests; infinite when prefills cannot keep up.
    """

    running: float
    rate: float
    step_seconds: float
    tpot_seconds: float
    ttft_seconds: dict[str, float]

    def output_rate(self, mix: Mix) -> float:
        """Output tokens/s."""
        return self.rate * mix.reply


@dataclass(frozen=True, slots=True)
class Capacity:
    """The most a replica can do within all bounds.

    Attributes:
        point: there; None when not even one reply at a time keeps to the targets.
        fits: replies of mean length the KV cache holds at once.
        bound: what does not let it do more, in words.
    """

    point: Point | None
    fits: int
    bound: str


@dataclass(frozen=True, slots=True)
class Replica:
    """A model in one shape under one mix of requests."""

    engine: Engine
    shape: Shape
    mix: Mix

    def at(self, running: float) -> Point:
        """With so many replies running."""
        mix, work = self.mix, self._prefill()
        step = decode_step(self.engine, self.shape, running, mix.prompt + mix.reply / 2)
        cycle = mix.reply * step + running * work.busy_seconds
        rate = running / cycle
        return Point(running, rate, step, cycle / mix.reply, self._ttft(rate, step, work))

    def at_rate(self, rate: float) -> Point:
        """With just so many replies running that ``rate`` requests/s are completed."""
        low, high = 1e-9, float(self.engine.assume.max_running)
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if self.at(middle).rate < rate else (low, middle)
        return self.at(high)

    def fits(self) -> int:
        """Replies at their full mean length that the KV cache holds."""
        whole = self.engine.blocks(self.mix.prompt + self.mix.reply)
        return self.engine.kv_room_tokens(self.shape) // whole

    def capacity(self) -> Capacity:
        """The most replies at once that keep within memory, ``max_running`` and the targets."""
        fits = self.fits()
        most = min(fits, self.engine.assume.max_running)
        if most < 1:
            return Capacity(None, fits, "KV memory: no reply of mean length fits")
        running = _largest(most, lambda n: self._missed(self.at(n)) is None)
        if running == most:
            bound = "KV memory" if most == fits else "max_running"
        else:
            bound = self._missed(self.at(running + 1)) or ""
        return Capacity(self.at(running) if running else None, fits, bound)

    def _missed(self, point: Point) -> str | None:
        target = self.mix.tpot_seconds
        if target is not None and point.tpot_seconds > target:
            return f"TPOT target {target * 1e3:g} ms"
        for flow in self.mix.flows:
            if point.ttft_seconds[flow.name] > (flow.ttft_seconds or 1e9):
                return f"TTFT target of {flow.name} {flow.ttft_seconds or 0:g} s"
        return None

    def _prefill(self) -> Prefill:
        return prefill(self.engine, self.shape, self.mix.prompt, self.mix.cached)

    def _ttft(self, rate: float, step: float, work: Prefill) -> dict[str, float]:
        """Of each tier: waiting for prefills that are before it, then what Redis brings, then its own.

        Prefills are one server with deterministic service, classes have non-preemptive priority (Cobham
        1954). While it prefills, each of its steps also serves the decoding replies.
        """
        mix, assume = self.mix, self.engine.assume
        # Short prompts share a step, so their part of it is what counts.
        new = max(1.0, mix.prompt - mix.cached)
        service = work.busy_seconds + step * new / assume.batched_tokens
        residual = rate * service**2 / 2
        before, found = 0.0, {}
        for rank in sorted({flow.queue_class.rank for flow in mix.flows}):
            members = [flow for flow in mix.flows if flow.queue_class.rank == rank]
            upto = before + service * rate * sum(flow.rate for flow in members) / mix.rate
            wait = residual / ((1 - before) * (1 - upto)) if upto < 1 else float("inf")
            for flow in members:
                own = prefill(self.engine, self.shape, flow.prompt, flow.cached)
                alone = own.latency_seconds + own.chunks * step + self._bring_seconds(flow)
                found[flow.name] = assume.pipeline_ms / 1e3 + wait * assume.wait_tail + alone
            before = upto
        return found

    def _bring_seconds(self, flow: Flow) -> float:
        """For the part of the cached tokens that is in Redis: loaded, or computed if that is faster."""
        tokens = flow.cached * self.engine.assume.hits_from_redis
        if tokens < 1:
            return 0.0
        bandwidth = load_bandwidth(self.engine, self.shape)
        loaded = load_seconds(self.engine, bandwidth, tokens)
        return min(loaded, recompute_seconds(self.engine, self.shape, tokens))


def _largest(most: int, good: Callable[[int], bool]) -> int:
    """The largest n of 0..most for which ``good(n)``, if all smaller ones are good too (0 always is)."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if good(middle) else (low, middle - 1)
    return low
