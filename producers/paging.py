"""The query parameters of lists: where a page begins, how long it is, which end comes first. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from contracts.errors import ApiError, ErrorCode

from .api_parameters import Parameter
from .refusals import invalid

Order = Literal["asc", "desc"]

AFTER_ID: Final = Parameter("after", "query", "Begin after the object with this id.", {"type": "string"})


def order_parameter(default: Order = "desc") -> Parameter:
    """Which end of the list comes first."""
    schema = {"type": "string", "enum": ["asc", "desc"], "default": default}
    return Parameter("order", "query", "Which comes first: the oldest or the newest.", schema)


def is_ascending(query: Mapping[str, str], default: Order = "desc") -> bool:
    """Whether the oldest come first.

    Raises:
        ApiError: 400.
    """
    order = query.get("order", default)
    if order not in ("asc", "desc"):
        raise invalid("order", "must be asc or desc.")
    return order == "asc"


def limit_parameter(most: int, default: int) -> Parameter:
    """How many objects a page has."""
    schema = {"type": "integer", "minimum": 1, "maximum": most, "default": default}
    return Parameter("limit", "query", "Objects of a page.", schema)


def page_limit(query: Mapping[str, str], most: int, default: int) -> int:
    """The ``limit`` of a list.

    Raises:
        ApiError: 400.
    """
    raw = query.get("limit")
    if raw is None:
        return default
    if not (raw.isascii() and raw.isdecimal() and len(raw) <= 6 and 1 <= int(raw) <= most):
        raise invalid("limit", f"must be a number from 1 to {most}.")
    return int(raw)


def list_object(objects: Sequence[Mapping[str, object]], has_more: bool) -> dict[str, Any]:
    """A page in the API's shape; its ends are named by the ``id`` of what stands there."""
    return {
        "object": "list",
        "data": list(objects),
        "first_id": objects[0]["id"] if objects else None,
        "last_id": objects[-1]["id"] if objects else None,
        "has_more": has_more,
    }


def cut_page(
    objects: Sequence[Mapping[str, object]], after: str | None, limit: int, *, ascending: bool
) -> dict[str, Any]:
    """A page of a list that is here as a whole, the oldest first.

    Raises:
        ApiError: ``not_found``: ``after`` names nothing of it.
    """
    ordered = list(objects) if ascending else list(reversed(objects))
    if after is not None:
        at = next((i for i, one in enumerate(ordered) if one["id"] == after), None)
        if at is None:
            raise ApiError(
                ErrorCode.NOT_FOUND, "There is nothing with this id in the list.", param="after"
            )
        ordered = ordered[at + 1 :]
    return list_object(ordered[:limit], len(ordered) > limit)
