"""``python -m streaming_edge``: the websocket edge as a process. Wiring only."""

from __future__ import annotations

import functools
import sys

from infra import role
from infra.listeners import add_listen_option, inherited_listener
from infra.settings import Settings
from producers.wiring import make_door, make_intake

from .role import EdgeRole


def main(argv: list[str] | None = None) -> int:
    """Run the edge until it is told to stop; returns the exit code."""
    parser = role.role_arguments("Headrace websocket edge")
    add_listen_option(parser)
    options = parser.parse_args(argv)
    inherited = functools.cache(lambda: inherited_listener(options.listen_fd))

    def make(settings: Settings) -> role.Role:
        return EdgeRole(settings, make_door, make_intake, inherited())

    return role.main("edge", options, make)


if __name__ == "__main__":
    sys.exit(main())
