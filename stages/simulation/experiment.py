"""An experiment: the same requests on the same workers, once for each policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from infra.settings import SchedulerSettings, Settings

from ..policy import PolicyName
from ..protocols import SchedulingPolicy
from .load import make_requests
from .load_spec import LoadSpec, WorkerLoad
from .meter import Meter, Yardstick
from .prefix_cache import ChunkStore
from .report import Report
from .requests import SimRequest
from .simulator import Fall, Pace, Simulator, TierRules
from .tier_link import TierLink
from .worker_model import SimWorker

MakePolicy = Callable[[PolicyName, SchedulerSettings, int], SchedulingPolicy]

#: Heartbeats of a simulation, all workers together: they come less often in long ones.
MOST_HEARTBEATS = 100_000
#: Times the policy is asked without an event, in the window.
MOST_TICKS = 100_000
TICK_MS = 250.0
#: Times the state is looked at in the window.
SAMPLES = 300
#: A worker counts as gone after so many heartbeats that did not come, where they come less often.
MISSED_HEARTBEATS = 4


@dataclass(frozen=True)
class Experiment:
    """What all policies of a comparison have in common.

    Attributes:
        requests: gives them anew, in order of arrival, each time it is called.
        window_ms: time in which they arrive.
        drain_ms: time after that for what still waits.
        tiers / targets_ms: their rules and their times to first token, by name.
        workers: how many and of what kind.
        starving_ms: see :class:`~.fairness.Passing`.
        deaths: times at which a worker dies, milliseconds; the first takes worker 0, the next 1, ...
        restarts: times at which one restarts, in the same way.
    """

    requests: Callable[[], Iterable[SimRequest]]
    window_ms: float
    drain_ms: float
    tiers: Mapping[str, TierRules]
    targets_ms: Mapping[str, float]
    workers: WorkerLoad
    starving_ms: float = 30_000.0
    deaths: tuple[float, ...] = ()
    restarts: tuple[float, ...] = ()

    @classmethod
    def of_load(cls, spec: LoadSpec, seed: int) -> Experiment:
        """A drawn load."""
        return cls(
            requests=lambda: make_requests(spec, seed),
            window_ms=spec.seconds * 1000,
            drain_ms=spec.drain_seconds * 1000,
            tiers={
                name: TierRules(tier.queue_class, tier.max_wait_seconds * 1000)
                for name, tier in spec.tiers.items()
            },
            targets_ms={name: tier.target_ms for name, tier in spec.tiers.items()},
            workers=spec.workers,
            starving_ms=spec.starving_seconds * 1000,
        )

    @classmethod
    def of_trace(
        cls, requests: list[SimRequest], settings: Settings, workers: WorkerLoad, drain_ms: float
    ) -> Experiment:
        """A recorded load, with the tiers of a configuration."""
        return cls(
            requests=lambda: requests,
            window_ms=max(1_000.0, requests[-1].at_ms),
            drain_ms=drain_ms,
            tiers={
                name: TierRules(tier.queue_class, tier.max_wait_seconds * 1000)
                for name, tier in settings.tiers.items()
            },
            targets_ms={name: tier.ttft_target_seconds * 1000 for name, tier in settings.tiers.items()},
            workers=workers,
        )

    def run(self, name: PolicyName, make_policy: MakePolicy, settings: Settings) -> Report:
        """Simulate one policy.

        Args:
            settings: of the scheduler, the workers' heartbeats, and the leases.
        """
        count = self.workers.count
        heartbeat_ms = max(float(settings.worker.heartbeat_ms), count * self.window_ms / MOST_HEARTBEATS)
        scheduler = settings.scheduler
        rare = heartbeat_ms > settings.worker.heartbeat_ms
        if rare:
            patience_ms = int(MISSED_HEARTBEATS * heartbeat_ms)
            scheduler = scheduler.model_copy(
                update={"worker_timeout_ms": max(scheduler.worker_timeout_ms, patience_ms)}
            )
        workers = self._make_workers()
        yardstick = Yardstick(self.window_ms, self.targets_ms, self.starving_ms)
        meter = Meter(yardstick, workers)
        simulator = Simulator(
            make_policy(name, scheduler, settings.streams.lease_ms),
            workers,
            self.tiers,
            meter,
            Pace(
                heartbeat_ms=heartbeat_ms,
                tells_all=rare,
                tick_ms=max(TICK_MS, self.window_ms / MOST_TICKS),
                sample_ms=self.window_ms / SAMPLES,
                give_up_ms=self.window_ms + self.drain_ms,
            ),
            scheduler.window_per_class,
            self._falls(),
        )
        end_ms = simulator.run(self.requests())
        return meter.report(name, simulator.unfinished, end_ms)

    def _make_workers(self) -> list[SimWorker]:
        model = self.workers
        store = ChunkStore(model.tier_tokens) if model.has_tier else None
        return [
            SimWorker(
                model, i, f"w{i}", TierLink(store, model.tier_load_ms) if store is not None else None
            )
            for i in range(model.count)
        ]

    def _falls(self) -> list[Fall]:
        count = self.workers.count
        deaths = [Fall(at_ms, index) for index, at_ms in enumerate(self.deaths[:count])]
        return deaths + [
            Fall(at_ms, index, restarts=True) for index, at_ms in enumerate(self.restarts[:count])
        ]
