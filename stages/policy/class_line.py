"""The waiting requests of one class in one pool: fair between tenants, long prompts let shorter ones pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from contracts.tiers import QueueClass
from infra.settings import SchedulerSettings

from .counters import VirtualCounters
from .line import Line
from .prefixes import PrefixIndex
from .request import Request

#: Tenants that are looked at for one dispatch, in order of their counters, and requests of each.
TENANTS = 4
REQUESTS = 4


class Option(NamedTuple):
    """A request that may be served next, and those that it would pass."""

    request: Request
    passed: list[Request]


class ClassLine:
    """Order inside a class.

    The next tenant is the one with the lowest virtual token counter (see :mod:`stages.policy.counters`),
    its next request the oldest one. Two things may change that, both within bounds: who does not fit lets
    others pass, and who has a longer cached prefix may go first if its tenant is at most
    ``locality_quantum`` ahead (deficit longest prefix match, https://arxiv.org/abs/2501.14312). Nobody is
    passed more than ``max_overtakes`` times.

    Attributes:
        queue_class / rank: whose line it is.
        since_guest: dispatches in this class's turn since one of a lower class had it.
    """

    def __init__(self, queue_class: QueueClass, settings: SchedulerSettings) -> None:
        self.queue_class = queue_class
        self.rank = queue_class.rank
        self.since_guest = 0
        self._settings = settings
        self._all = Line()
        self._tenants: dict[str, Line] = {}
        self._flying: Counter[str] = Counter()
        self._counters: VirtualCounters[str] = VirtualCounters(
            lambda tenant: self._settings.tenant_weights.get(tenant, 1.0)
        )

    def __len__(self) -> int:
        return len(self._all)

    def reconfigure(self, settings: SchedulerSettings) -> None:
        """These settings from now on."""
        self._settings = settings

    def oldest(self) -> Request | None:
        """The one that was queued first."""
        return self._all.head()

    def join(self, request: Request, now_ms: int) -> None:
        """A request stands in the line.

        A tenant that comes back does not pass one whose request has waited for ``ageing_seconds``:
        otherwise ever new tenants could keep that one waiting for ever.
        """
        tenant = request.job.tenant
        line = self._tenants.get(tenant)
        if line is None:
            line = self._tenants[tenant] = Line()
            oldest = self._all.head()
            aged = oldest is not None and lifts(oldest, self._settings, now_ms) > 0
            self._counters.activate(tenant, self._counters[oldest.job.tenant] if oldest and aged else 0)
        line.add(request)
        self._all.add(request)

    def leave(self, request: Request) -> None:
        """A request leaves the line."""
        tenant = request.job.tenant
        self._all.remove(request)
        line = self._tenants[tenant]
        line.remove(request)
        if not line:
            del self._tenants[tenant]
            self._counters.deactivate(tenant)

    def takes_off(self, request: Request) -> None:
        """A request is in flight: its tenant's counter is kept."""
        self._flying[request.job.tenant] += 1

    def lands(self, request: Request) -> None:
        """A request is no longer in flight."""
        tenant = request.job.tenant
        self._flying[tenant] -= 1
        if not self._flying[tenant]:
            del self._flying[tenant]
            self._counters.forget_idle(self._flying.__contains__)

    def charge(self, tenant: str, tokens: float) -> None:
        """Count weighted tokens to a tenant."""
        self._counters.charge(tenant, tokens)

    def options(self, prefixes: PrefixIndex) -> Iterator[Option]:
        """Requests that may be served next, best first."""
        if not prefixes:
            yield from self._in_order(float("inf"))
            return
        near = list(self._in_order(self._settings.locality_quantum))
        cached = [prefixes.longest(option.request.job.prefix_hashes) for option in near]
        by_prefix = sorted(range(len(near)), key=lambda i: -cached[i])
        yield from (near[i] for i in by_prefix)
        seen = {option.request for option in near}
        yield from (o for o in self._in_order(float("inf")) if o.request not in seen)

    def barred(self, request: Request) -> bool:
        """Whether nobody may pass a request any more."""
        return request.overtaken >= self._settings.max_overtakes and not request.kept

    def _in_order(self, within: float) -> Iterator[Option]:
        """Oldest requests of the next tenants, as far as nobody is passed who may not be."""
        first = self._counters.lowest()
        if first is None:
            return
        passed: list[Request] = []
        yield from self._of(first, passed)
        for tenant in self._counters.first(TENANTS, within):
            if tenant != first:
                if any(self.barred(request) for request in passed):
                    return
                yield from self._of(tenant, passed)
            passed.append(self._tenants[tenant].first(1)[0])

    def _of(self, tenant: str, passed: list[Request]) -> Iterator[Option]:
        earlier = list(passed)
        for request in self._tenants[tenant].first(REQUESTS):
            yield Option(request, list(earlier))
            if self.barred(request):
                return
            earlier.append(request)


def lifts(request: Request, settings: SchedulerSettings, now_ms: int) -> int:
    """By how many classes its waiting lifts a request."""
    return int(max(0, now_ms - request.job.queued_ms) / (1000 * settings.ageing_seconds))
