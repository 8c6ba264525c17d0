"""``python -m streaming_edge``: the websocket edge as a process. Wiring only."""

from __future__ import annotations

import sys

from infra import role
from infra.settings import Settings
from producers.wiring import make_door, make_intake

from .role import EdgeRole


def main(argv: list[str] | None = None) -> int:
    """Run the edge until it is told to stop; returns the exit code."""
    options = role.role_arguments("Headrace websocket edge").parse_args(argv)

    def make(settings: Settings) -> role.Role:
        return EdgeRole(settings, make_door, make_intake)

    return role.main("edge", options, make)


if __name__ == "__main__":
    sys.exit(main())
