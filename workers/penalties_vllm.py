"""Presence and frequency penalties of a continued reply, inside vLLM's engine process.

vLLM counts the tokens it has generated itself as output; a reply that goes on after the tokens of another
attempt gets those as part of its prompt, where these penalties do not see them. This processor splits that
prompt again and applies vLLM's own arithmetic to all of the output. Import it only where vLLM is installed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor
from vllm.v1.sample.ops.penalties import apply_all_penalties

#: How vLLM is told to load this class.
PROCESSOR = f"{__name__}:ContinuedPenalties"
#: Key in ``SamplingParams.extra_args``: (emitted tokens at the prompt's end, presence, frequency,
#: repetition penalty). vLLM's own three penalties must then be neutral.
EXTRA = "headrace_continued"

_RowProcessor = Callable[[list[int], list[int], torch.Tensor], torch.Tensor]


class ContinuedPenalties(AdapterLogitsProcessor):  # type: ignore[misc]
    """All penalties of requests that carry :data:`EXTRA`; others cost nothing here.

    It runs where vLLM's model runner V1 applies its own penalties: after bias and minimum length, before
    temperature. The order matters, the repetition penalty multiplies.
    """

    def is_argmax_invariant(self) -> bool:
        """Penalties change which token is the likeliest."""
        return False

    def new_req_logits_processor(self, params: Any) -> _RowProcessor | None:
        """The processor of one request, or None if it needs none."""
        found = (params.extra_args or {}).get(EXTRA)
        if found is None:
            return None
        emitted, presence, frequency, repetition = found
        presences, frequencies, repetitions = (
            torch.tensor([value], dtype=torch.float32) for value in (presence, frequency, repetition)
        )

        def process(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
            split = len(prompt) - emitted
            device = logits.device
            apply_all_penalties(
                logits.unsqueeze(0),  # a view: it works in place
                torch.tensor([prompt[:split]], dtype=torch.int64, device=device),
                presences.to(device),
                frequencies.to(device),
                repetitions.to(device),
                [[*prompt[split:], *output]],
            )
            return logits

        return process
