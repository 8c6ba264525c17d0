"""The prompt tokenizer of a Hugging Face model folder: its own chat template, its own ``tokenizer.json``."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
from collections.abc import Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

from contracts.records import Message
from infra.settings import SettingsError

from .errors import PromptRefused

#: Encoding costs about 0.7 us a character; more than this many characters go off the loop.
INLINE_CHARACTERS = 8_000


class HfTokenizer:
    """One model's chat template and tokenizer, loaded from local files only.

    What a message says can never become a control token. A template pastes contents between its control
    tokens, and the tokenizer cannot tell the two apart afterwards; so a content that spells an added token
    (``<|im_start|>``) gets an unguessable mark inside that spelling before rendering. The rendered text is
    then cut at the marks and its pieces are encoded one by one: no piece holds the spelling any more, and
    the model reads the same characters as ordinary text. Prompts without such spellings, all but a few,
    are encoded in one piece, exactly as ``apply_chat_template(tokenize=True)`` does it.
    """

    def __init__(self, folder: Path, executor: Executor) -> None:
        """Load; takes about a second the first time.

        Args:
            executor: where long prompts are encoded.

        Raises:
            SettingsError: the folder has no fast tokenizer or no chat template.
        """
        os.environ["HF_HUB_OFFLINE"] = "1"
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except (OSError, ValueError) as error:
            raise SettingsError(f"models: no tokenizer in {folder}: {error}") from None
        if not self._tokenizer.is_fast:
            raise SettingsError(f"models: {folder} has no tokenizer.json")
        if not self._tokenizer.chat_template:
            raise SettingsError(f"models: {folder} has no chat template")
        # The library's own object rather than the wrapper: it keeps no state between calls, so that
        # threads may share it.
        self._backend: Any = self._tokenizer.backend_tokenizer
        self._backend.no_padding()
        self._backend.no_truncation()
        self._executor = executor
        added = self._tokenizer.added_tokens_decoder.values()
        self._control = _spellings(str(token) for token in added)
        # Tokens that are looked for in the *normalized* text can hide in a text that spells them otherwise.
        self._normalizer = self._backend.normalizer if any(t.normalized for t in added) else None

    async def encode(self, messages: Sequence[Message]) -> list[int]:
        """See :class:`stages.protocols.PromptTokenizer`."""
        if sum(len(m.content) for m in messages) <= INLINE_CHARACTERS:
            return self.encode_now(messages)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, self.encode_now, messages)

    def encode_now(self, messages: Sequence[Message]) -> list[int]:
        """:meth:`encode` without a loop; safe in any thread."""
        mark = f"\ufdd0{secrets.token_hex(8)}\ufdd1"
        chat = [
            {
                # Chat templates know the role under its older name.
                "role": "system" if m.role == "developer" else m.role,
                "content": self._disarmed(m.content, mark),
            }
            for m in messages
        ]
        pieces = self._render(chat).split(mark)
        # The batch call, because it alone lets go of the interpreter's lock: a long prompt encoded with
        # encode() stops the event loop for a second even from another thread.
        encoded = self._backend.encode_batch_fast(pieces, add_special_tokens=False)
        return [token_id for piece in encoded for token_id in piece.ids]

    def _disarmed(self, content: str, mark: str) -> str:
        """``content`` with a mark inside each spelling of a control token."""
        if self._control is None:
            return content
        if self._normalizer is not None:
            normal = self._normalizer.normalize_str(content)
            if len(self._control.findall(normal)) > len(self._control.findall(content)):
                # Which characters spell it cannot be told, so none may stand next to another.
                return mark.join(content)
        # Until nothing is found: the rest of a marked spelling may hold another one.
        start = 0
        parts: list[str] = []
        while (found := self._control.search(content, start)) is not None:
            parts.append(content[start : found.start() + 1])
            start = found.start() + 1
        return mark.join([*parts, content[start:]])

    def _render(self, chat: list[dict[str, str]]) -> str:
        from jinja2.exceptions import TemplateError

        try:
            text: str = self._tokenizer.apply_chat_template(
                chat, tokenize=False, add_generation_prompt=True
            )
        except TemplateError as error:
            # Templates raise for orders of roles they were not made for.
            raise PromptRefused("the model's chat template does not take these messages") from error
        return text


def _spellings(tokens: Any) -> re.Pattern[str] | None:
    """A pattern that finds any of the tokens, the longest first; single characters need no guarding."""
    texts = sorted({t for t in tokens if len(t) > 1}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, texts))) if texts else None
