"""``python -m producers``: the gateway."""

from __future__ import annotations

import functools
import sys

from infra.listeners import add_listen_option, inherited_listener
from infra.role import main as run_role
from infra.role import role_arguments
from infra.settings import Settings

from .role import GatewayRole


def main(argv: list[str] | None = None) -> int:
    """Run the gateway; returns the exit code."""
    parser = role_arguments("The HTTP gateway: the OpenAI API over the pipeline.")
    parser.add_argument("--host", help="address to serve on (default: http.host)")
    parser.add_argument("--port", type=int, help="port to serve on (default: http.port; 0: any)")
    add_listen_option(parser)
    options = parser.parse_args(argv)
    inherited = functools.cache(lambda: inherited_listener(options.listen_fd))

    def make(settings: Settings) -> GatewayRole:
        return GatewayRole(settings, options.host, options.port, inherited())

    return run_role("gateway", options, make)


if __name__ == "__main__":
    sys.exit(main())
