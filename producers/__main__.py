"""``python -m producers``: the gateway."""

from __future__ import annotations

import sys

from infra.role import main as run_role
from infra.role import role_arguments

from .role import GatewayRole


def main(argv: list[str] | None = None) -> int:
    """Run the gateway; returns the exit code."""
    parser = role_arguments("The HTTP gateway: the OpenAI API over the pipeline.")
    parser.add_argument("--host", help="address to serve on (default: http.host)")
    parser.add_argument("--port", type=int, help="port to serve on (default: http.port; 0: any)")
    options = parser.parse_args(argv)
    return run_role(
        "gateway", options, lambda settings: GatewayRole(settings, options.host, options.port)
    )


if __name__ == "__main__":
    sys.exit(main())
