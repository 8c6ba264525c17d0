"""The KV tier as a secondary tier of vLLM's own offloading: GPU, host memory, Redis.

vLLM's ``OffloadingConnector`` moves blocks between GPU and host memory, and asks this tier for what the host
does not have. It does so in its scheduler's thread, and nothing here waits for Redis: lookups are answered in
a later step, and rows of the host's buffer are moved by threads. See ``docs/KV_CACHE.md``.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Collection, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import vllm
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from infra.settings import KvSettings

from .fingerprint import weights_fingerprint
from .host_rows import HostRows, Row
from .lanes import Lane
from .layout import Chunk, Namespace
from .lookups import Lookup, Lookups
from .store import ChunkStore
from .tally import Tally
from .tier import OFFLOAD_EVENTS, URL_VARIABLE, Tier

log = logging.getLogger(__name__)

#: A SHA-256 and the number of a group of layers.
_KEY_BYTES = 32 + 4
#: vLLM has room for what it loads, so loads are bounded by that.
_ALL_ROWS = 1 << 31


def offload_config(tier: Tier, host_gib: float) -> KVTransferConfig:
    """What vLLM is configured with to keep blocks in host memory and in ``tier``. For GPUs.

    Sets ``HEADRACE_KV_URL`` for the engine's processes, and takes ``PYTHONHASHSEED`` from them: with it,
    vLLM names equal blocks differently in processes that were given different ones.

    Args:
        host_gib: memory for blocks on the host, for all ranks together.
    """
    os.environ.pop("PYTHONHASHSEED", None)
    return KVTransferConfig(
        kv_connector="OffloadingConnector",
        kv_role="kv_both",
        kv_connector_extra_config={
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": int(host_gib * 2**30),
            "block_size": tier.settings.chunk_tokens,
            "offload_prompt_only": False,
            "secondary_tiers": [
                {
                    "type": RedisSecondaryTier.__name__,
                    "module_path": __name__,
                    **tier.hand_to_engine(),
                }
            ],
        },
    )


@dataclass
class _Questions:
    """What one request asks.

    Attributes:
        found: whether each chunk is there; None = not known yet.
        new: chunks to ask for at the end of the step.
        asked: questions without an answer.
    """

    found: dict[OffloadKey, bool | None] = field(default_factory=dict)
    new: list[OffloadKey] = field(default_factory=list)
    asked: list[tuple[Lookup, list[OffloadKey]]] = field(default_factory=list)


class RedisSecondaryTier(SecondaryTierManager):  # type: ignore[misc]
    """See the module and vLLM's base class; configured by :func:`offload_config`.

    All its methods are called by the scheduler's thread.
    """

    medium = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        tier: dict[str, Any],
        model: str,
        revision: str,
        backpressure_detector: Any = None,
    ) -> None:
        """A tier below the host's buffer ``primary_kv_view``.

        Args:
            tier: :class:`infra.settings.KvSettings` without the URL, which is in ``HEADRACE_KV_URL``.
            model / revision: whose blocks these are.
        """
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = Locality.REMOTE
        settings = KvSettings.model_validate(tier)
        namespace = _namespace(offloading_spec.config, self.block_size_bytes, model, revision)
        self._namespace = namespace.digest()
        self._tokens = namespace.chunk_tokens
        self._tally = Tally()
        self._questions: dict[str, _Questions] = {}
        self._asking: set[str] = set()
        self._refused: list[JobResult] = []
        self._loading: dict[int, str] = {}
        ttl_ms = settings.ttl_seconds * 1_000
        url = os.environ[URL_VARIABLE]
        self._redis = [
            ChunkStore(url, connections=connections, cluster=settings.cluster)
            for connections in (1, settings.connections, 1)
        ]
        lookups, loads, saves = self._redis
        self._lookups = Lookups(lookups, ttl_ms=ttl_ms, seconds=settings.lookup_ms / 1_000)
        self._rows = HostRows(
            primary_kv_view,
            self._namespace,
            tokens=self._tokens,
            loads=loads,
            saves=saves,
            ttl_ms=ttl_ms,
        )
        self._loads = Lane(
            "kv-offload-load",
            self._rows.load,
            threads=settings.connections,
            rows=_ALL_ROWS,
            seconds=settings.load_seconds,
            whole_jobs=True,
            tally=self._tally,
            failure="load_failed",
        )
        self._saves = Lane(
            "kv-offload-save",
            self._rows.save,
            threads=1,
            rows=max(1, settings.save_queue_mib * 1024 * 1024 // self.block_size_bytes),
            seconds=settings.save_seconds,
            whole_jobs=False,
            tally=self._tally,
            failure="save_dropped",
        )

    # -- lookups

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """See vLLM's base class."""
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """See vLLM's base class."""
        if not _is_strong(key):
            return LookupResult.MISS
        questions = self._questions.setdefault(req_context.req_id, _Questions())
        if key not in questions.found:
            questions.found[key] = None
            questions.new.append(key)
            self._asking.add(req_context.req_id)
        self._take_answers(questions)
        found = questions.found[key]
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def _take_answers(self, questions: _Questions) -> None:
        still_open = []
        for lookup, keys in questions.asked:
            if not lookup.over:
                still_open.append((lookup, keys))
                continue
            if lookup.present is None:
                self._tally.add(f"lookup_failed_{lookup.failure}")
            present = lookup.present or [False] * len(keys)
            questions.found.update(zip(keys, present, strict=True))
        questions.asked = still_open

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Asks, one round trip for each request, what the step wanted to know."""
        for req_id in context.preempted_req_ids:
            self._forget(req_id)
        for req_id in self._asking:
            questions = self._questions[req_id]
            questions.asked.append((self._ask(questions.new), questions.new))
            questions.new = []
        self._asking.clear()

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """See vLLM's base class."""
        self._ask([key for key in keys if _is_strong(key)])

    def on_request_finished(self, req_context: ReqContext) -> None:
        """What the request had from GPU or host has been used too, of which vLLM does not tell us."""
        self._forget(req_context.req_id)
        self.touch(req_context._offload_key_positions, req_context)

    def _ask(self, keys: list[OffloadKey]) -> Lookup:
        """Asking is touching."""
        return self._lookups.ask([self._chunk(key).key(self._namespace) for key in keys])

    def _forget(self, req_id: str) -> None:
        self._questions.pop(req_id, None)
        self._asking.discard(req_id)

    def _chunk(self, key: OffloadKey) -> Chunk:
        """Spread over a cluster by itself: a key does not say which prefix it is part of."""
        name = hashlib.blake2b(key, digest_size=16, person=b"headrace-offload").digest()
        return Chunk(name, name[:8].hex(), 0, self._tokens, full=True)

    # -- jobs

    def submit_store(self, job_metadata: TransferJob) -> None:
        """See vLLM's base class."""
        self._submit(self._saves, job_metadata)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """See vLLM's base class."""
        self._loading[job_metadata.job_id] = job_metadata.req_context.req_id
        self._submit(self._loads, job_metadata)

    def _submit(self, lane: Lane, job: TransferJob) -> None:
        if not all(map(_is_strong, job.keys)):
            self._tally.add("refused_weak_hash")
            self._loading.pop(job.job_id, None)
            self._refused.append(JobResult(job.job_id, success=False))
            return
        pairs = zip(job.keys, job.chunk_ids, strict=True)
        lane.submit(job.job_id, [Row(key, self._chunk(key), int(index)) for key, index in pairs])

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """See vLLM's base class."""
        results, self._refused = self._refused, []
        for ended in (*self._saves.take(), *self._loads.take()):
            questions = self._questions.get(self._loading.pop(ended.job_id, ""))
            if questions is not None:
                questions.found.update(dict.fromkeys(ended.lost, False))
            results.append(
                JobResult(
                    ended.job_id,
                    success=not ended.lost,
                    successful_keys=ended.moved or None,
                    transfer_time=ended.seconds,
                    transfer_bytes=ended.size,
                )
            )
        return results

    def drain_jobs(self) -> None:
        """Gives up what has not begun, and waits for the rest.

        Raises:
            TimeoutError: a chunk is still being moved, long after its deadline.
        """
        self._loads.drain()
        self._saves.drain()

    def shutdown(self) -> None:
        """See vLLM's base class.

        Raises:
            TimeoutError: see :meth:`drain_jobs`.
        """
        with ExitStack() as stack:
            for store in self._redis:
                stack.callback(store.close)
            stack.callback(self._lookups.close)
            stack.callback(self._rows.release)
            stack.callback(self._saves.close)
            stack.callback(self._loads.close)

    # -- metrics

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """See vLLM's base class."""
        documentation = "What the Redis tier did not do, by what and why."
        return {OFFLOAD_EVENTS: OffloadingCounterMetadata(documentation, labelnames=("event",))}

    def get_stats(self) -> OffloadingConnectorStats | None:
        """See vLLM's base class."""
        counts = self._tally.take().get("counts")
        if not counts:
            return None
        stats = OffloadingConnectorStats()
        for name, amount in counts.items():
            stats.increase_counter(OFFLOAD_EVENTS, amount, (name,))
        return stats


def _is_strong(key: OffloadKey) -> bool:
    """Whether nobody can make a prompt that has another one's key: tenants share the store.

    The other algorithms that vLLM has (xxhash) are told by their length.
    """
    return len(key) == _KEY_BYTES


def _namespace(config: Any, row_bytes: int, model: str, revision: str) -> Namespace:
    """A row has the blocks of all ranks and layers, in a form that is vLLM's own affair."""
    parallel = config.parallel
    layout = {
        "vllm": vllm.__version__,
        "order": config.kv_cache_layout,
        "canonical": config.canonical_layout,
        "replicated": config.replicated_layout,
        "row_bytes": row_bytes,
        "hash_tokens": config.cache.tokens_per_hash,
        "groups": [
            [group.group_id, group.tokens_per_block, group.layer_names] for group in config.groups
        ],
        "workers": [parallel.world_size, parallel.pcp_size, parallel.dcp_size],
    }
    block_tokens = config.groups[0].tokens_per_block
    return Namespace(
        model=model,
        revision=revision,
        weights=weights_fingerprint(Path(config.model.name)),
        dtype=config.model.dtype,
        layout=f"offload {json.dumps(layout, sort_keys=True)}",
        block_tokens=block_tokens,
        chunk_tokens=block_tokens * config.cache.blocks_per_chunk,
        tensor_parallel=parallel.tp_size,
        pipeline_parallel=parallel.pp_size,
    )
