"""Reads requests from a trace: one JSON object a line (docs/SIMULATOR.md has the fields)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kv.layout import CHUNK_TOKENS

from .load_spec import LoadError, first_fault
from .requests import SimRequest


class TraceLine(BaseModel):
    """One request of a trace.

    Attributes:
        at_ms: when it came, in milliseconds from any origin.
        tier / tenant: whose it is; the tier is one of the configuration.
        prompt_tokens / output_tokens: lengths of prompt and reply.
        max_tokens: reply length that was asked for at most; None = ``output_tokens``.
        conversation: requests of equal conversations share their prompts' beginning, as far as the shorter
            prompt goes; None = it shares nothing but ``prefix``.
        prefix / prefix_tokens: name and length of a beginning that it shares with others of that name.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    at_ms: float = Field(ge=0, allow_inf_nan=False)
    tier: str
    tenant: str
    prompt_tokens: int = Field(ge=1)
    output_tokens: int = Field(ge=1)
    max_tokens: int | None = Field(default=None, ge=1)
    conversation: str | None = None
    prefix: str | None = None
    prefix_tokens: int = Field(default=0, ge=0)


def read_trace(lines: Iterable[str], tiers: Iterable[str], kv_tokens: int) -> list[SimRequest]:
    """The requests of a trace in order of arrival; the first arrives at 0.

    Args:
        tiers: names that may occur.
        kv_tokens: room of a worker, which each request must fit into.

    Raises:
        LoadError: names the line.
    """
    known = set(tiers)
    requests = [_request(number, line, known, kv_tokens) for number, line in _numbered(lines)]
    if not requests:
        raise LoadError("trace: there is no request in it")
    requests.sort(key=lambda request: request[0].at_ms)
    start_ms = requests[0][0].at_ms
    return [
        SimRequest(
            at_ms=line.at_ms - start_ms,
            request_id=f"r{number}",
            tier=line.tier,
            tenant=line.tenant,
            prompt_tokens=line.prompt_tokens,
            output_tokens=line.output_tokens,
            max_tokens=max(line.max_tokens or 0, line.output_tokens),
            chunks=_chunks(line, number),
            conversation_id=line.conversation,
        )
        for line, number in requests
    ]


def _numbered(lines: Iterable[str]) -> Iterator[tuple[int, str]]:
    return ((number, line) for number, line in enumerate(lines, 1) if line.strip())


def _request(number: int, line: str, tiers: set[str], kv_tokens: int) -> tuple[TraceLine, int]:
    try:
        request = TraceLine.model_validate_json(line)
    except ValidationError as error:
        raise LoadError(f"trace: line {number}: {first_fault(error)}") from None
    if request.tier not in tiers:
        raise LoadError(f"trace: line {number}: tier: there is no tier {request.tier}")
    if request.prompt_tokens + request.output_tokens > kv_tokens:
        raise LoadError(
            f"trace: line {number}: prompt and reply do not fit a worker of {kv_tokens} tokens"
        )
    return request, number


def _chunks(line: TraceLine, number: int) -> tuple[str, ...]:
    """Names of its full chunks: the shared prefix's, then its conversation's (or its own)."""
    if line.conversation is None and line.prefix is None:
        return ()
    shared = (
        min(line.prefix_tokens, line.prompt_tokens) // CHUNK_TOKENS if line.prefix is not None else 0
    )
    total = (line.prompt_tokens + line.output_tokens) // CHUNK_TOKENS
    own = f"conversation:{line.conversation}" if line.conversation is not None else f"request:{number}"
    return tuple(f"prefix:{line.prefix}.{i}" if i < shared else f"{own}.{i}" for i in range(total))
