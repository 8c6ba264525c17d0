"""The report of a run: what was done, what became of it, what did not hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

from contracts.entries import Started, StreamEntry, Text
from contracts.reply import Reply
from contracts.stream_ids import DISPATCHED, MODERATED, StreamId

from .checks import Violation
from .faults import Injected, counts
from .ledger import Call, Reading

#: Violations that are written out; the JSON report has all.
_SHOWN = 60


@dataclass
class Report:
    """Figures of a run."""

    seed: int
    engine: str
    load_seconds: float
    settle_seconds: float
    requests: int
    by_kind: dict[str, dict[str, int]] = field(default_factory=dict)
    faults: list[tuple[str, str, int]] = field(default_factory=list)
    faults_missed: int = 0
    takeovers: int = 0
    pauses: dict[str, float] = field(default_factory=dict)
    reconnects: int = 0
    repeated_creates: int = 0
    batch_lines: dict[str, int] = field(default_factory=dict)
    violations: list[Violation] = field(default_factory=list)
    trouble: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    timeline: list[dict[str, Any]] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return asdict(self)

    def as_text(self) -> str:
        """For people."""
        statuses = sorted({s for row in self.by_kind.values() for s in row})
        width = max([len(k) for k in self.by_kind], default=4) + 2
        lines = [
            f"seed {self.seed}, engine {self.engine}, load {self.load_seconds:.0f} s, "
            f"settled in {self.settle_seconds:.1f} s",
            f"{self.requests} requests, {self.reconnects} connections beyond the first, "
            f"{self.repeated_creates} repeated creates, {self.takeovers} takeovers",
            "",
            "".join([" " * width, *(f"{s:>11}" for s in statuses)]),
        ]
        for kind, row in sorted(self.by_kind.items()):
            lines.append("".join([f"{kind:<{width}}", *(f"{row.get(s, 0):>11}" for s in statuses)]))
        lines += ["", *(f"{n} lines of batches in {kind} files" for kind, n in self.batch_lines.items())]
        total = sum(number for *_, number in self.faults)
        lines += ["", f"{total} faults ({self.faults_missed} found no target)"]
        lines += [f"  {target:<12}{action:<6}{number:>5}" for target, action, number in self.faults]
        lines += [
            "",
            *(f"{name}: {seconds:.2f} s" for name, seconds in self.pauses.items()),
            *self.notes,
        ]
        if self.trouble:
            lines += ["", "error lines in the logs"]
            lines += [f"  {n:>4}  {what}" for what, n in sorted(self.trouble.items())]
        rules = Counter(v.rule for v in self.violations)
        lines += [
            "",
            f"{len(self.violations)} violations",
            *(f"  {n:>4}  {r}" for r, n in rules.items()),
        ]
        for v in self.violations[:_SHOWN]:
            lines.append(f"  {v.rule}: {v.request_id or '-'} ({v.kind}) {v.evidence}")
        return "\n".join(lines)


def by_kind(
    calls: Sequence[Call], streams: Mapping[str, list[StreamEntry]]
) -> dict[str, dict[str, int]]:
    """How many requests of each kind ended how."""
    table: dict[str, Counter[str]] = {}
    for call in calls:
        reply = Reply().extend(streams.get(call.request_id or "", []))
        status = reply.terminal.status.value if reply.terminal is not None else "open"
        if call.request_id is None:
            status = "not taken"
        table.setdefault(call.plan.kind, Counter())[status] += 1
    return {kind: dict(counter) for kind, counter in table.items()}


def pauses(
    calls: Sequence[Call], streams: Mapping[str, list[StreamEntry]], done: Sequence[Injected]
) -> dict[str, float]:
    """The longest pauses readers saw where one attempt followed another, by what had happened.

    A clean takeover: the kill of a worker while everything else was ready and no other fault was near.
    Only connections that lasted over the pause count, as a reader that was away saw none.
    """
    longest: dict[str, float] = {}
    for call in calls:
        entries = streams.get(call.request_id or "", [])
        workers = {e.id.attempt: e.entry.worker_id for e in entries if isinstance(e.entry, Started)}
        for reading in call.readings:
            for began, ended, attempt in _gaps(reading):
                name = "longest pause of a reader over a takeover"
                longest[name] = max(longest.get(name, 0.0), ended - began)
                if _clean(workers.get(attempt, ""), began, ended, done):
                    name = "longest pause after a clean kill of the worker"
                    longest[name] = max(longest.get(name, 0.0), ended - began)
    return longest


def waits(calls: Sequence[Call]) -> dict[str, float]:
    """The longest waits of requests for each step, as readers on websockets saw them."""
    longest: dict[str, float] = {}
    steps = [("accepted", MODERATED), ("moderated", DISPATCHED), ("dispatched", StreamId(1, 0))]
    for call in calls:
        for reading in call.readings:
            before = call.accepted_at
            for name, offset in steps:
                at = reading.reached.get(offset)
                if at is None or reading.connections > 1:
                    break
                name = f"longest wait once {name}"
                longest[name] = max(longest.get(name, 0.0), at - before)
                before = at
    return longest


def _gaps(reading: Reading) -> list[tuple[float, float, int]]:
    """(from, to, attempt before) of the pauses between attempts on one connection."""
    pairs = zip(reading.seen, reading.seen[1:], strict=False)
    return [
        (a.at, b.at, a.offset.attempt)
        for a, b in pairs
        if a.offset.attempt != b.offset.attempt and a.connection == b.connection
    ]


def _clean(worker_id: str, began: float, ended: float, done: Sequence[Injected]) -> bool:
    near = [i for i in done if i.began < ended and i.ended > began - 3.0]
    if len(near) != 1:
        return False
    [only] = near
    hit = f"-{only.index}-" in worker_id and only.fault.target == "worker"
    return hit and only.fault.action == "kill" and not only.others


def takeovers(streams: Mapping[str, list[StreamEntry]]) -> int:
    """Attempts that went on after text of earlier ones."""
    found = 0
    for entries in streams.values():
        text = False
        for item in entries:
            text = text or isinstance(item.entry, Text)
            found += text and isinstance(item.entry, Started)
    return found


def fill(
    report: Report,
    calls: Sequence[Call],
    streams: Mapping[str, list[StreamEntry]],
    done: Sequence[Injected],
) -> Report:
    """Add the figures that follow from the ledger and the streams."""
    report.by_kind = by_kind(calls, streams)
    report.faults = list(counts(done))
    report.timeline = [
        {
            "clock": datetime.fromtimestamp(i.clock, UTC).isoformat(timespec="milliseconds"),
            "process": f"{i.fault.target}-{i.index}",
            "action": i.fault.action,
            "frozen_seconds": i.fault.frozen_seconds,
        }
        for i in sorted(done, key=lambda i: i.clock)
    ]
    report.takeovers = takeovers(streams)
    report.pauses |= waits(calls) | pauses(calls, streams, done)
    report.reconnects = sum(max(0, r.connections - 1) for c in calls for r in c.readings)
    report.repeated_creates = sum(max(0, c.attempts - 1) for c in calls)
    return report
