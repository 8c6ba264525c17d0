"""Structured logging: one JSON object a line on standard error, configured once per process.

Callers pass facts in ``extra``; prompt text, reply text and keys are never among them.
"""

from __future__ import annotations

import logging
import sys

from pythonjsonlogger.json import JsonFormatter


def configure_logging(role: str, level: str) -> None:
    """Send all records of this process to standard error as JSON."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        JsonFormatter(
            "%(asctime)s %(levelname)s %(name)s %(message)s",
            rename_fields={"asctime": "time", "levelname": "level", "name": "logger"},
            static_fields={"role": role},
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for noisy in ("aiokafka", "faust", "mode", "uvicorn.access", "websockets.server", "httpx"):
        logging.getLogger(noisy).setLevel("WARNING")
