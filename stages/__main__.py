"""``python -m stages moderation|scheduler|history``: wiring only."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable

from infra.role import Role, role_arguments
from infra.role import main as run_role
from infra.settings import Settings

from .history_faust import HistoryRole
from .moderation_faust import ModerationRole
from .scheduler_kafka import SchedulerRole

_ROLES: dict[str, Callable[[Settings, Namespace], Role]] = {
    "moderation": lambda settings, _: ModerationRole(settings),
    "scheduler": lambda settings, _: SchedulerRole(settings),
    "history": lambda settings, options: HistoryRole(settings, rebuild=options.rebuild),
}


def main(argv: list[str] | None = None) -> int:
    """Run one stage until it is told to stop; returns the process's exit code."""
    parser = role_arguments("Run one stage of the pipeline.")
    parser.prog = "python -m stages"
    parser.add_argument("role", choices=sorted(_ROLES))
    parser.add_argument(
        "--rebuild",
        action="store_true",
        help="history: store all outcomes of the topic again before starting",
    )
    options = parser.parse_args(argv)
    make = _ROLES[options.role]
    return run_role(options.role, options, lambda settings: make(settings, options))


if __name__ == "__main__":
    sys.exit(main())
