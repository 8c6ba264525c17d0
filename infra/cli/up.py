"""``headrace up``."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from rich.console import Console

from ..stack.configure import UpOptions
from ..stack.display import make_display
from ..stack.up import up
from .ask import ask_stack


def run_up(raw: dict[str, Any]) -> int:
    """Run a stack until it is stopped; returns the exit code."""
    logging.basicConfig(level="CRITICAL")  # what people need to know is on the display
    options = UpOptions(**{**raw, "data_dir": raw["data_dir"].resolve()})
    display = make_display(Console(), live=options.ask is None)
    try:
        return asyncio.run(up(options, display, ask_stack))
    finally:
        display.close()
