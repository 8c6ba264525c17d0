"""What can go wrong in a worker."""

from __future__ import annotations


class WorkerError(Exception):
    """Base of this folder's errors."""


class RequestFailed(WorkerError):
    """The engine cannot do this request. Tell the client; do not retry.

    Attributes:
        reason: short, without user content.
        client_fault: True when the request itself is at fault (400 rather than 500).
    """

    def __init__(self, reason: str, *, client_fault: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.client_fault = client_fault


class EngineDead(WorkerError):
    """The engine is gone. The worker stops taking work and exits; others continue its replies."""


class IntakeStuck(WorkerError):
    """Records wait, and none come. The worker exits and is started anew; others continue its replies."""
