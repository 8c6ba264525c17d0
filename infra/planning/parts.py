"""What the inputs of a plan are built from: strict parts, and numbers as people write them."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

_SUFFIXES = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_WRITTEN = re.compile(r"(\d+(?:\.\d+)?)([KMBT])", re.ASCII)


class PlanError(Exception):
    """A plan cannot be made from what was given; the message names the option and is meant for people."""


class Part(BaseModel):
    """A group of inputs: unknown keys are errors, numbers are finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())


def _counted(value: Any) -> Any:
    """``400B`` as 4e11; anything else as it is."""
    written = _WRITTEN.fullmatch(value.strip().upper()) if isinstance(value, str) else None
    return float(written[1]) * _SUFFIXES[written[2]] if written else value


#: A count that may be written with K, M, B or T behind it.
Count = Annotated[float, BeforeValidator(_counted), Field(ge=1, le=1e15)]
