"""The guarantees, checked: what clients were told against what the stack holds. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from contracts.entries import Started, StreamEntry, Terminal, Text
from contracts.errors import ErrorCode
from contracts.records import OutcomeRecord
from contracts.reply import Reply
from contracts.stream_ids import SEAL
from contracts.tiers import Status

from .evidence import Evidence
from .expected import Expected, Turn, completed, prompt_ids, token_ids
from .ledger import Call, Reading

#: An expired request may be found so much later than its deadline, and clocks differ by nothing here.
_EARLY_MS = 100
#: How a request may fail that was in a Redis which has forgotten.
_FAILED_BY_REDIS = (ErrorCode.STREAM_LOST, ErrorCode.REQUEST_LOST)


@dataclass(frozen=True, slots=True)
class Violation:
    """A guarantee that did not hold.

    Attributes:
        rule: short name of the guarantee.
        request_id: of which request; None for the stack as a whole.
    """

    rule: str
    request_id: str | None
    kind: str
    evidence: str


@dataclass(frozen=True, slots=True)
class Rules:
    """What a run may expect.

    Attributes:
        max_wait_seconds: after so long a request that has not started is expired.
        simulated: the text is the simulated engine's.
        broker_lost: the broker lost its memory: requests may fail or expire, but must end.
        redis_lost: Redis was killed: a stream may be lost, but never half.
    """

    max_wait_seconds: float
    simulated: bool = True
    broker_lost: bool = False
    redis_lost: bool = False


def check(calls: Sequence[Call], evidence: Evidence, rules: Rules) -> list[Violation]:
    """Every violation, of the calls in their order, then of the rest."""
    known: set[str] = set()
    found: list[Violation] = []
    before: dict[tuple[str, str], list[Call]] = {}
    for call in calls:
        history: list[Turn] = []
        if call.plan.conversation is not None:
            earlier = before.setdefault((call.plan.key, call.plan.conversation), [])
            history = _history(earlier, evidence.streams)
            earlier.append(call)
        known |= {rid for rid in (call.request_id, *call.other_ids) if rid}
        found += _Checks(call, evidence, rules, history).run()
    for rid, entries in evidence.streams.items():
        if rid not in known and (not entries or entries[-1].id != SEAL):
            found.append(Violation("left open", rid, "never told", f"last entry {_last(entries)}"))
    found += [Violation("left over", None, "stack", f"{k}: {v}") for k, v in evidence.leftovers.items()]
    found += [Violation("prompt or key in a log", None, "stack", where) for where in evidence.leaks]
    return found


def _history(earlier: Sequence[Call], streams: Mapping[str, list[StreamEntry]]) -> list[Turn]:
    """The prompt's beginning: completed turns, and cancelled ones with the text that was out."""
    turns: list[Turn] = []
    for call in earlier:
        reply = Reply().extend(streams.get(call.request_id or "", []))
        text = reply.choices[0].text if 0 in reply.choices else ""
        status = reply.terminal.status if reply.terminal else None
        if status is Status.COMPLETED or (status is Status.CANCELLED and text):
            turns += [Turn("user", call.plan.prompt), Turn("assistant", text)]
    return turns


def _last(entries: Sequence[StreamEntry]) -> str:
    return str(entries[-1].id) if entries else "none"


class _Checks:
    """All checks of one call."""

    def __init__(self, call: Call, evidence: Evidence, rules: Rules, history: Sequence[Turn]) -> None:
        self._call = call
        self._plan = call.plan
        self._rules = rules
        self._entries = evidence.streams.get(call.request_id or "", [])
        self._outcomes = evidence.outcomes.get(call.request_id or "", [])
        self._reply = Reply().extend(self._entries)
        self._prompt = prompt_ids([*history, Turn("user", call.plan.prompt)])

    def run(self) -> Iterator[Violation]:
        call = self._call
        if call.gave_up is not None:
            yield self._broken(
                "no end for a client", f"{call.gave_up}, last entry {_last(self._entries)}"
            )
        if call.request_id is None:
            if call.refusal is not None:
                yield self._broken("refused", call.refusal)
            return
        if call.other_ids:
            yield self._broken("one key, two requests", ", ".join(call.other_ids))
        if not self._entries:
            if not self._rules.redis_lost:
                yield self._broken("stream lost", "no entries")
            return
        yield from self._ids()
        terminal = self._reply.terminal
        if terminal is None:
            yield self._broken("no terminal state", f"last entry {_last(self._entries)}")
        else:
            yield from self._ending(terminal)
            if not self._rules.broker_lost:
                yield from self._booked(terminal)
        if self._rules.simulated:
            yield from self._text(terminal)
        for reading in call.readings:
            yield from self._reader(reading, terminal)

    def _broken(self, rule: str, evidence: str) -> Violation:
        return Violation(rule, self._call.request_id, self._plan.kind, evidence)

    def _ids(self) -> Iterator[Violation]:
        """One seal, attempts that grow, token ids contiguous with the entry ids."""
        seals = [e for e in self._entries if isinstance(e.entry, Terminal)]
        if len(seals) > 1:
            yield self._broken("terminal states", f"{len(seals)} of them")
        out, attempt = 0, 0
        for item in self._entries:
            if isinstance(item.entry, Started):
                attempt = item.id.attempt
            elif isinstance(item.entry, Text):
                if item.id.attempt != attempt:
                    yield self._broken("text of a fenced attempt", f"{item.id} after {attempt}-0")
                out += len(item.entry.token_ids)
                if item.id.token != out:
                    yield self._broken("gap or repeat in ids", f"{item.id} where {out} tokens are out")
                    out = item.id.token

    def _ending(self, terminal: Terminal) -> Iterator[Violation]:
        code = terminal.error.code if terminal.error else None
        status, plan = terminal.status, self._plan
        if status is Status.CANCELLED and not self._call.cancelled:
            yield self._broken("cancelled by nobody", "")
        allowed = status in (Status.COMPLETED, Status.CANCELLED)
        if status is Status.FAILED:
            # docs/GUARANTEES.md: several choices cannot be continued once text is out.
            allowed = code == "worker_lost" and plan.n > 1 and bool(self._reply.choices)
            allowed = allowed or (self._rules.broker_lost and code == ErrorCode.REQUEST_LOST)
            allowed = allowed or (self._rules.redis_lost and code in _FAILED_BY_REDIS)
        if status is Status.EXPIRED:
            waited = [o.duration_ms or 0 for o in self._outcomes]
            limit = self._rules.max_wait_seconds * 1000 - _EARLY_MS
            allowed = not self._reply.attempts and all(ms >= limit for ms in waited)
        if not allowed:
            yield self._broken(
                "unexpected end", f"{status.value} {code}, attempts {self._reply.attempts}"
            )
        if status is not Status.COMPLETED or not self._rules.simulated:
            return
        tokens = sum(self._complete(i).tokens for i in range(plan.n))
        used = self._reply.usage.completion_tokens
        if used != tokens:
            yield self._broken("usage", f"{used} tokens booked, {tokens} generated")
        if terminal.usage is not None and terminal.usage.prompt_tokens != len(self._prompt):
            yield self._broken(
                "usage", f"{terminal.usage.prompt_tokens} of {len(self._prompt)} prompt tokens"
            )

    def _complete(self, choice: int) -> Expected:
        plan = self._plan
        return completed(self._prompt, plan.seed, choice, plan.max_tokens, plan.stop)

    def _text(self, terminal: Terminal | None) -> Iterator[Violation]:
        """The stored text and tokens are the engine's, whole or cut off."""
        plan, done = self._plan, terminal is not None and terminal.status is Status.COMPLETED
        for index in range(plan.n):
            choice = self._reply.choices.get(index)
            text, ids = (choice.text, choice.token_ids) if choice else ("", [])
            whole = self._complete(index).text
            if not whole.startswith(text) or (done and text != whole):
                yield self._broken("text", f"choice {index}: {_difference(text, whole)}")
            right = token_ids(self._prompt, plan.seed, index, plan.max_tokens)[: len(ids)]
            if ids != right:
                yield self._broken("tokens", f"choice {index}: {len(ids)} out, not the engine's")
        if extra := set(self._reply.choices) - set(range(plan.n)):
            yield self._broken("text", f"choices {sorted(extra)} nobody asked for")

    def _booked(self, terminal: Terminal) -> Iterator[Violation]:
        """One outcome, or several that agree, and they agree with the stream."""
        if not self._outcomes:
            yield self._broken("no outcome", terminal.status.value)
            return
        if len({_substance(o) for o in self._outcomes}) > 1:
            yield self._broken("outcomes differ", " / ".join(o.status.value for o in self._outcomes))
        said = self._outcomes[-1]
        texts = {c.index: c.text for c in said.choices if c.text}
        stored = {i: c.text for i, c in self._reply.choices.items()}
        if said.status is not terminal.status or texts != stored or said.usage != self._reply.usage:
            yield self._broken(
                "outcome is not the stream", f"{said.status.value}, {terminal.status.value}"
            )

    def _reader(self, reading: Reading, terminal: Terminal | None) -> Iterator[Violation]:
        for problem in reading.problems:
            yield self._broken("offsets", f"{reading.label}: {problem}")
        whole_read = reading.end is not None and reading.end.status != "unknown"
        for index in range(self._plan.n):
            stored = self._reply.choices[index].text if index in self._reply.choices else ""
            text = reading.text(index)
            if reading.label in ("http", "late-http"):
                if reading.whole is None:
                    continue
                text = reading.whole[index] if index < len(reading.whole) else ""
            if not stored.startswith(text) or (whole_read and text != stored):
                yield self._broken("reader's text", f"{reading.label}: {_difference(text, stored)}")
        if reading.end is None:
            if not reading.left and self._call.gave_up is None:
                yield self._broken("reader without an end", reading.label)
            return
        if terminal is None:
            return
        if reading.end.status != terminal.status.value:
            told = f"{reading.end.status} {reading.end.error}"
            yield self._broken(
                "reader's end", f"{reading.label}: {told}, stored {terminal.status.value}"
            )
        used = reading.end.completion_tokens
        if used is not None and used != self._reply.usage.completion_tokens:
            yield self._broken("reader's usage", f"{reading.label}: {used} tokens")


def _substance(outcome: OutcomeRecord) -> str:
    choices = [(c.index, c.text, c.finish_reason) for c in outcome.choices if c.text]
    return repr((outcome.status, outcome.usage.completion_tokens, choices))


def _difference(text: str, wanted: str) -> str:
    """Where two texts part, without the text itself being of interest."""
    at = next((i for i, (a, b) in enumerate(zip(text, wanted, strict=False)) if a != b), None)
    if at is None:
        return f"{len(text)} of {len(wanted)} characters"
    return f"{len(text)} of {len(wanted)} characters, other from {at}: {text[at : at + 20]!r}"
