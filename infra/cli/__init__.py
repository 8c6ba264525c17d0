"""The ``headrace`` command."""

from __future__ import annotations

from .root import main

__all__ = ["main"]
