"""An event loop whose clock jumps to the next timer: timing is exact, and waiting costs nothing."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _JumpingSelector(selectors.DefaultSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise RuntimeError("everything waits for ever")
            self.now += timeout
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run_in_virtual_time(work: Coroutine[Any, Any, T]) -> T:
    """Run to the end; an exception in a timer's callback fails as one in ``work`` does."""
    errors: list[BaseException] = []
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.get_loop().set_exception_handler(
            lambda _, c: errors.append(c.get("exception") or Exception(c))
        )
        result = runner.run(work)
    if errors:
        raise errors[0]
    return result
