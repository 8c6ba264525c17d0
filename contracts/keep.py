"""What a request asks to be kept of it; it travels with its records to where outcomes are stored."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

#: What a stored reply is to the API.
ReplyKind = Literal["chat.completion", "response"]


class Keep(BaseModel):
    """Present where a request said ``store: true``; everything in it was validated at acceptance.

    Attributes:
        kind: which API asked.
        metadata: what the caller attached.
        params: the request's own parameters as its object echoes them.
        previous_response_id: the response it continues.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    kind: ReplyKind
    metadata: dict[str, str] = Field(default_factory=dict)
    params: dict[str, Any] = Field(default_factory=dict)
    previous_response_id: str | None = None
