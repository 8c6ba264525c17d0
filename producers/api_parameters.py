"""Query parameters and headers that routes read, as the OpenAPI document shows them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

from contracts.stream_ids import OFFSET_PATTERN


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter that is read from the request itself, not by the framework.

    Attributes:
        schema: its JSON schema.
        style: how an object is written into the query.
    """

    name: str
    place: Literal["query", "header"]
    description: str
    schema: dict[str, Any]
    style: Literal["form", "deepObject"] | None = None

    def as_openapi(self) -> dict[str, Any]:
        """The parameter object; it may always be left out."""
        return {
            "name": self.name,
            "in": self.place,
            "required": False,
            "description": self.description,
            "schema": self.schema,
            **({"style": self.style, "explode": True} if self.style is not None else {}),
        }


IDEMPOTENCY_KEY: Final = Parameter(
    "Idempotency-Key",
    "header",
    "Makes a repeated call safe: a call with the same key and body gets the first one's reply.",
    {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[!-~]+$"},
)
STREAM: Final = Parameter(
    "stream", "query", "Read the reply as server-sent events.", {"type": "boolean", "default": False}
)
INCLUDE_USAGE: Final = Parameter(
    "include_usage", "query", "End the stream with a usage chunk.", {"type": "boolean", "default": False}
)
_OFFSET: Final = {"type": "string", "pattern": f"^{OFFSET_PATTERN}$"}
AFTER: Final = Parameter("after", "query", "Go on after this offset; 0-0 is the beginning.", _OFFSET)
LAST_EVENT_ID: Final = Parameter("Last-Event-ID", "header", "The same as 'after'.", _OFFSET)
