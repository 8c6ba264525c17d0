"""``python -m producers.batch``: the batch runner."""

from __future__ import annotations

import sys

from infra.role import main as run_role
from infra.role import role_arguments

from .role import BatchRunnerRole


def main(argv: list[str] | None = None) -> int:
    """Run the batch runner; returns the exit code."""
    options = role_arguments("Runs the lines of batches (docs/BATCH.md).").parse_args(argv)
    return run_role("batch-runner", options, BatchRunnerRole)


if __name__ == "__main__":
    sys.exit(main())
