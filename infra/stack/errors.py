"""What keeps a local stack from running."""

from __future__ import annotations


class StackError(Exception):
    """The stack cannot start or go on; the message is one line for people.

    Attributes:
        exit_code: what ``headrace up`` ends with.
    """

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code
