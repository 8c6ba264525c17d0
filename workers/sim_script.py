"""Scripted replies and faults of the simulated engine (docs/SIM_ENGINE.md)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from contracts.sim_tokens import sim_token_ids

from .errors import WorkerError
from .sim_text import EOS, FIRST_PIECE


class ScriptError(WorkerError):
    """The script cannot be used; the message is meant for people."""


class _Bytes(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    hex: str


class ScriptedReply(BaseModel):
    """One scripted reply.

    Attributes:
        match: the reply is for prompts that hold this text; without it, for every prompt.
        pieces: the first tokens, one each: text, or ``{"hex": …}`` for bytes.
        utf8: the first tokens as the UTF-8 bytes of this text, one token per byte (after ``pieces``).
        then: after those: end of sequence, or the usual words up to the token budget.
        eos_at / raise_at / hang_at / dead_at: at this token of each choice (0 = the first) the choice
            ends; the request fails; nothing more comes; the engine dies.
        client_fault: the failure of ``raise_at`` is the client's.
        attempt: the four faults happen on this attempt only; None = on every one.
        ttft_ms / tpot_ms: instead of the engine's (``tpot_ms`` only lengthens).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    match: str | None = Field(default=None, min_length=1)
    pieces: list[str | _Bytes] = Field(default_factory=list)
    utf8: str = ""
    then: Literal["eos", "words"] = "words"
    eos_at: int | None = Field(default=None, ge=0)
    raise_at: int | None = Field(default=None, ge=0)
    hang_at: int | None = Field(default=None, ge=0)
    dead_at: int | None = Field(default=None, ge=0)
    client_fault: bool = False
    attempt: int | None = Field(default=None, ge=1)
    ttft_ms: float | None = Field(default=None, ge=0)
    tpot_ms: float | None = Field(default=None, ge=0)

    @model_validator(mode="after")
    def _hex(self) -> ScriptedReply:
        for piece in self.pieces:
            if isinstance(piece, _Bytes):
                bytes.fromhex(piece.hex)
        return self


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    replies: list[ScriptedReply]


@dataclass(frozen=True, slots=True)
class Plan:
    """A scripted reply, ready to run: its token ids, EOS included."""

    reply: ScriptedReply
    marker: tuple[int, ...]
    token_ids: tuple[int, ...]

    def faults_on(self, attempt: int) -> bool:
        """Whether the scripted faults happen on this attempt."""
        return self.reply.attempt in (None, attempt)


@dataclass(frozen=True)
class Script:
    """All scripted replies, and the table of pieces that output token ids refer to."""

    plans: tuple[Plan, ...] = ()
    pieces: list[bytes] = field(default_factory=list)

    def match(self, prompt_token_ids: Sequence[int]) -> Plan | None:
        """The plan whose text stands last in the prompt; else the first one for every prompt."""
        best: tuple[int, Plan] | None = None
        for plan in self.plans:
            at = _last_position(prompt_token_ids, plan.marker) if plan.marker else -1
            if (at >= 0 or not plan.marker) and (best is None or at > best[0]):
                best = at, plan
        return best[1] if best else None


def _last_position(ids: Sequence[int], marker: tuple[int, ...]) -> int:
    size = len(marker)
    for at in range(len(ids) - size, -1, -1):
        if ids[at] == marker[0] and tuple(ids[at : at + size]) == marker:
            return at
    return -1


def parse_script(text: str) -> Script:
    """Read a script.

    Raises:
        ScriptError: it is no script; says where.
    """
    try:
        replies = _File.model_validate(json.loads(text)).replies
    except ValidationError as error:
        first = error.errors()[0]
        raise ScriptError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    except ValueError as error:
        raise ScriptError(f"not JSON: {error}") from None
    table: dict[bytes, int] = {}
    plans = []
    for reply in replies:
        ids = []
        for piece in reply.pieces:
            raw = piece.encode() if isinstance(piece, str) else bytes.fromhex(piece.hex)
            ids.append(FIRST_PIECE + table.setdefault(raw, len(table)))
        ids += reply.utf8.encode()
        if reply.then == "eos":
            ids.append(EOS)
        plans.append(Plan(reply, tuple(sim_token_ids(reply.match or "")), tuple(ids)))
    return Script(tuple(plans), list(table))


def load_script(path: str | None) -> Script:
    """Read a script file; no file is no script.

    Raises:
        ScriptError: it cannot be read or is no script.
    """
    if path is None:
        return Script()
    try:
        return parse_script(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ScriptError(f"{path}: {error}") from None
    except ScriptError as error:
        raise ScriptError(f"{path}: {error}") from None
