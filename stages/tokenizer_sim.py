"""The prompt tokenizer of the simulated model (path ``builtin:sim``)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor

from contracts.records import Message
from contracts.sim_tokens import sim_token_ids

#: Encoding costs about 0.4 us a character; more than this many characters go off the loop.
INLINE_CHARACTERS = 8_000


class SimTokenizer:
    """Renders ``role: content`` lines and cuts them with :func:`contracts.sim_tokens.sim_token_ids`.

    The simulated model has no control tokens, so there is nothing a message could smuggle in.
    """

    def __init__(self, executor: Executor) -> None:
        """``executor`` is where long prompts are encoded."""
        self._executor = executor

    async def encode(self, messages: Sequence[Message]) -> list[int]:
        """See :class:`stages.protocols.PromptTokenizer`."""
        text = "\n".join([*(f"{m.role}: {m.content}" for m in messages), "assistant:"])
        if len(text) <= INLINE_CHARACTERS:
            return sim_token_ids(text)
        return await asyncio.get_running_loop().run_in_executor(self._executor, sim_token_ids, text)
