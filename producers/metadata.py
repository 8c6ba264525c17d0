"""The ``metadata`` of the OpenAI API: up to 16 short strings that a caller attaches to what it makes."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from .chat_messages import is_unicode


def _metadata(raw: object) -> object:
    if raw is not None and not (
        isinstance(raw, dict)
        and len(raw) <= 16
        and all(isinstance(k, str) and len(k) <= 64 and is_unicode(k) for k in raw)
        and all(isinstance(v, str) and len(v) <= 512 and is_unicode(v) for v in raw.values())
    ):
        raise ValueError("must be an object of at most 16 strings of 512 characters, keys of 64.")
    return raw


_Object = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=16),
]
#: The type of a field of a validated body.
Metadata = Annotated[
    dict[str, str] | None, BeforeValidator(_metadata, json_schema_input_type=_Object | None)
]
