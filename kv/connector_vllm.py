"""The KV tier as a connector of vLLM: longest prefix looked up, loaded beside the batch, saved behind it.

vLLM makes one of these in its scheduler and one in each of its workers. The scheduler's half knows which
chunks a request needs and which it fills (:mod:`kv.plan`); the workers' halves move bytes. Both live on
what vLLM tells them between two steps, and neither waits for Redis. See ``docs/KV_CACHE.md``.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from infra.settings import KvSettings

from .codec import Header
from .encodings import ENCODINGS
from .fingerprint import weights_fingerprint
from .layout import Chain, Chunk, Namespace
from .loader import Loaded, Loader
from .lookups import Lookup, Lookups
from .paged_cache import PagedCache
from .plan import Load, RequestPlan, Save
from .rates import BreakEven
from .saver import Saver
from .store import ChunkStore
from .tally import Tally, added
from .tier import SHARED_TOKENS, URL_VARIABLE, Tier

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

log = logging.getLogger(__name__)

#: An engine that has nothing to compute waits so long for a lookup or load before it looks again.
_IDLE_SECONDS = 0.002
#: A step with fewer tokens says little about prefill.
_PREFILL_STEP_TOKENS = 64


def transfer_config(tier: Tier) -> KVTransferConfig:
    """What vLLM is configured with to use ``tier``. Sets ``HEADRACE_KV_URL`` for the engine's processes."""
    return KVTransferConfig(
        kv_connector=HeadraceConnector.__name__,
        kv_connector_module_path=__name__,
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config=tier.hand_to_engine(),
    )


@dataclass
class TierMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """One step's work for the workers.

    Attributes:
        loads: by request.
        saves: chunks that this step completes.
        ended: finished requests whose blocks are kept until their last saves are copied.
        computes: whether the step has a forward pass.
    """

    loads: list[tuple[str, list[Load]]] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    computes: bool = True


@dataclass
class TierNews(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Loads that have ended in the workers."""

    loaded: list[Loaded]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """See vLLM's base class."""
        assert isinstance(other, TierNews)
        return TierNews([*self.loaded, *other.loaded])


class TierStats(KVConnectorStats):  # type: ignore[misc]
    """A :class:`kv.tally.Tally`'s report, in vLLM's clothes."""

    data: dict[str, Any]

    def reset(self) -> None:
        """See vLLM's base class."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """See vLLM's base class."""
        return TierStats(data=added(self.data, other.data))

    def reduce(self) -> dict[str, int | float]:
        """See vLLM's base class."""
        return dict(self.data.get("counts", {}))

    def is_empty(self) -> bool:
        """See vLLM's base class."""
        return not self.data


class HeadraceConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """See the module and vLLM's base class; configured by :func:`transfer_config`.

    Its ``kv_connector_extra_config`` has:

    * ``tier``: :class:`infra.settings.KvSettings` without the URL, which is in ``HEADRACE_KV_URL``;
    * ``model`` and ``revision``: whose blocks these are.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = self._kv_transfer_config.kv_connector_extra_config
        settings = KvSettings.model_validate(extra["tier"])
        url = os.environ[URL_VARIABLE]
        block = vllm_config.cache_config.block_size
        if len(kv_cache_config.kv_cache_groups) != 1:
            raise ValueError("the KV tier serves models with one kind of attention only")
        if settings.chunk_tokens % block:
            raise ValueError(
                f"kv.chunk_tokens ({settings.chunk_tokens}) is no multiple of the engine's block ({block})"
            )
        namespace = _namespace(vllm_config, kv_cache_config, settings, extra["model"], extra["revision"])
        self._scheduler: _SchedulerSide | None = None
        self._worker: _WorkerSide | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = _SchedulerSide(settings, url, namespace, kv_cache_config)
        else:
            self._worker = _WorkerSide(settings, url, namespace, vllm_config)

    # -- the scheduler's half

    def on_new_request(self, request: Request) -> None:
        """See vLLM's base class."""
        self._at_scheduler.arrived(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """See vLLM's base class."""
        tokens = self._at_scheduler.hit(request, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        """See vLLM's base class."""
        if num_external_tokens:
            (block_ids,) = blocks.get_block_ids()
            self._at_scheduler.load(request, num_external_tokens, block_ids)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """See vLLM's base class."""
        return self._at_scheduler.step(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """See vLLM's base class."""
        news = connector_output.kv_connector_worker_meta
        self._at_scheduler.stepped(news.loaded if isinstance(news, TierNews) else ())

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See vLLM's base class."""
        return self._at_scheduler.finished(request, block_ids), None

    # -- the workers' half

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """See vLLM's base class."""
        self._at_worker.register(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """See vLLM's base class."""
        self._at_worker.load(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a request is not computed before its load has ended."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: chunks are saved when all their layers are computed."""

    def wait_for_save(self) -> None:
        """Copies the blocks to save out; they are sent later."""
        self._at_worker.save(self._get_connector_metadata())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """See vLLM's base class."""
        return self._at_worker.finished(self._get_connector_metadata(), finished_req_ids)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """See vLLM's base class."""
        return self._at_worker.failed_blocks()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """See vLLM's base class."""
        loaded = self._at_worker.loaded()
        return TierNews(loaded) if loaded else None

    # -- both

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """See vLLM's base class."""
        side = self._scheduler or self._at_worker
        data = side.tally.take()
        return TierStats(data=data) if data else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        """See vLLM's base class."""
        return TierStats(data=data or {})

    @property
    def requires_kv_delivery(self) -> bool:
        """A chunk that is not saved is a miss later, nothing worse."""
        return False

    def shutdown(self) -> None:
        """See vLLM's base class."""
        for side in (self._scheduler, self._worker):
            if side is not None:
                side.close()

    @property
    def _at_scheduler(self) -> _SchedulerSide:
        assert self._scheduler is not None
        return self._scheduler

    @property
    def _at_worker(self) -> _WorkerSide:
        assert self._worker is not None
        return self._worker


@dataclass
class _Tracked:
    """A request of the engine.

    Attributes:
        lookup: None once its answer was taken.
        may_load: until it was loaded, or tried.
        loading: bytes on their way.
    """

    request: Request
    plan: RequestPlan
    lookup: Lookup | None
    may_load: bool = True
    loading: int = 0


class _SchedulerSide:
    """Decides what is loaded and what is saved."""

    def __init__(
        self, settings: KvSettings, url: str, namespace: Namespace, kv_cache_config: Any
    ) -> None:
        self.tally = Tally()
        self._settings = settings
        self._block = namespace.block_tokens
        ranks = namespace.tensor_parallel * namespace.pipeline_parallel
        self._namespaces = [_of_rank(namespace, rank).digest() for rank in range(ranks)]
        (group,) = kv_cache_config.kv_cache_groups
        self._token_bytes = len(group.layer_names) * group.kv_cache_spec.page_size_bytes // self._block
        self._store = ChunkStore(url, connections=1, cluster=settings.cluster)
        self._lookups = Lookups(
            self._store, ttl_ms=settings.ttl_seconds * 1_000, seconds=settings.lookup_ms / 1_000
        )
        self._even = BreakEven()
        self._requests: dict[str, _Tracked] = {}
        self._to_load: list[tuple[str, list[Load]]] = []
        self._ended: list[tuple[str, list[Save]]] = []
        self._steps: deque[tuple[float, int]] = deque()
        self._last_step = 0.0
        self._loading = 0

    def arrived(self, request: Request) -> None:
        if not request.cache_salt or request.mm_features or request.lora_request is not None:
            return
        extra = (request.sampling_params and request.sampling_params.extra_args) or {}
        chain = Chain(
            request.cache_salt,
            block_tokens=self._block,
            chunk_tokens=self._settings.chunk_tokens,
            shared_tokens=extra.get(SHARED_TOKENS, 0),
        )
        plan = RequestPlan(
            chain,
            request.num_prompt_tokens,
            block_tokens=self._block,
            chunk_tokens=self._settings.chunk_tokens,
        )
        self._requests[request.request_id] = _Tracked(request, plan, self._ask(request, plan))

    def _ask(self, request: Request, plan: RequestPlan) -> Lookup:
        chunks = plan.candidates(request.all_token_ids)
        return self._lookups.ask([chunk.key(rank) for chunk in chunks for rank in self._namespaces])

    def hit(self, request: Request, local: int) -> int | None:
        """Tokens to load beyond the ``local`` ones; None = not known yet."""
        tracked = self._requests.get(request.request_id)
        if tracked is None or not tracked.may_load:
            return 0
        if tracked.lookup is not None:
            if local + self._block > request.num_tokens:
                return 0  # nothing is left to find; the answer still says what need not be saved
            if not tracked.lookup.over:
                return None
            self._take_answer(tracked)
        tokens = tracked.plan.hit_tokens - local
        if tokens <= 0:
            return 0
        if not self._even.worth_loading(tokens, tokens * self._token_bytes, self._loading):
            self.tally.add("computed_instead_tokens", tokens)
            tracked.may_load = False
            return 0
        return tokens

    def _take_answer(self, tracked: _Tracked) -> None:
        lookup = tracked.lookup
        assert lookup is not None
        tracked.lookup = None
        self.tally.add("lookups")
        if lookup.present is None:
            self.tally.add(f"lookup_failed_{lookup.failure}")
            tracked.may_load = False
            return
        self.tally.add("lookup_seconds", lookup.seconds)
        ranks = len(self._namespaces)
        present = [all(lookup.present[i : i + ranks]) for i in range(0, len(lookup.present), ranks)]
        self.tally.held(chunk.name for chunk in tracked.plan.answered(present))
        self.tally.held((chunk.name for chunk in tracked.plan.missing), yes=False)
        self.tally.add("looked_up_tokens", tracked.request.num_tokens)
        self.tally.add("hit_tokens", tracked.plan.hit_tokens)

    def load(self, request: Request, tokens: int, block_ids: list[int]) -> None:
        """Room was made for what :meth:`hit` said."""
        tracked = self._requests[request.request_id]
        tracked.may_load = False
        loads = tracked.plan.loads(tracked.plan.hit_tokens - tokens, block_ids)
        self._to_load.append((request.request_id, loads))
        tracked.loading = tokens * self._token_bytes
        self._loading += tracked.loading

    def step(self, output: SchedulerOutput) -> TierMetadata:
        meta = TierMetadata(computes=output.total_num_scheduled_tokens > 0)
        for request_id in output.preempted_req_ids or ():
            self._start_again(request_id)
        meta.loads, self._to_load = self._to_load, []
        for request_id, scheduled in output.num_scheduled_tokens.items():
            self._save(request_id, scheduled, output, meta)
        for request_id, saves in self._ended:
            meta.ended.append(request_id)
            meta.saves += saves
        self._ended = []
        if meta.computes:
            self._steps.append((time.monotonic(), output.total_num_scheduled_tokens))
        else:
            self._wait_for_lookups()
        return meta

    def _start_again(self, request_id: str) -> None:
        """A preempted request has lost its blocks."""
        tracked = self._requests.get(request_id)
        if tracked is not None:
            tracked.lookup = self._ask(tracked.request, tracked.plan)
            tracked.may_load = True

    def _save(
        self, request_id: str, scheduled: int, output: SchedulerOutput, meta: TierMetadata
    ) -> None:
        tracked = self._requests.get(request_id)
        if tracked is None:
            return
        if tracked.lookup is not None and tracked.lookup.over:
            self._take_answer(tracked)
        computed = tracked.request.num_computed_tokens + scheduled
        if tracked.plan.complete(computed):
            return
        state = output.kv_connector_block_state
        blocks = state.get_block_ids(request_id) if state is not None else None
        if blocks is not None:
            meta.saves += tracked.plan.saves(tracked.request.all_token_ids, computed, blocks[0])

    def _wait_for_lookups(self) -> None:
        open_ones = [t.lookup for t in self._requests.values() if t.lookup is not None and t.may_load]
        if open_ones and not any(lookup.over for lookup in open_ones):
            self._lookups.wait(open_ones, _IDLE_SECONDS)

    def stepped(self, loaded: Iterable[Loaded]) -> None:
        """A step has run, and these loads have ended meanwhile."""
        now = time.monotonic()
        if self._steps:
            began, tokens = self._steps.popleft()
            if tokens >= _PREFILL_STEP_TOKENS:
                self._even.prefill.measured(now - max(began, self._last_step), tokens)
            self._last_step = now
        for load in loaded:
            if load.size:
                self._even.loaded(load.seconds, load.size)
            tracked = self._requests.get(load.request_id)
            if tracked is None:
                continue
            self._loading -= tracked.loading
            tracked.loading = 0
            if load.lost is not None:
                tracked.plan.lost(load.lost)
                if load.lost.full:
                    self.tally.held([load.lost.name], yes=False)
        self._say_rates()

    def _say_rates(self) -> None:
        load, prefill = self._even.load.per_unit, self._even.prefill.per_unit
        self.tally.rates(
            None if load is None else load * self._token_bytes * 1e6,
            None if prefill is None else prefill * 1e6,
        )

    def finished(self, request: Request, block_ids: list[int]) -> bool:
        """Whether its blocks must be kept for one step more."""
        tracked = self._requests.pop(request.request_id, None)
        if tracked is None:
            return False
        self._loading -= tracked.loading
        if request.status.name == "FINISHED_ABORTED" or tracked.loading:
            return False
        computed = min(request.num_computed_tokens, len(block_ids) * self._block)
        saves = tracked.plan.last_saves(request.all_token_ids, computed, block_ids)
        if saves:
            self._ended.append((request.request_id, saves))
        return bool(saves)

    def close(self) -> None:
        self._lookups.close()
        self._store.close()


class _WorkerSide:
    """Moves bytes between the tier and this rank's blocks."""

    def __init__(self, settings: KvSettings, url: str, namespace: Namespace, vllm_config: Any) -> None:
        self.tally = Tally()
        self._settings = settings
        self._url = url
        self._namespace = _of_rank(namespace, vllm_config.parallel_config.rank)
        self._digest = self._namespace.digest()
        self._cache: PagedCache | None = None
        self._loader: Loader | None = None
        self._saver: Saver | None = None
        self._stores: list[ChunkStore] = []
        self._sent: set[str] = set()
        self._failed: set[int] = set()
        self._loaded: list[Loaded] = []

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        settings = self._settings
        self._cache = PagedCache(kv_caches, ENCODINGS[settings.encoding])
        loads = ChunkStore(self._url, connections=settings.connections, cluster=settings.cluster)
        saves = ChunkStore(self._url, connections=1, cluster=settings.cluster)
        self._stores = [loads, saves]
        self._loader = Loader(
            loads,
            self._cache,
            self._header,
            self._digest,
            threads=settings.connections,
            chunk_blocks=settings.chunk_tokens // self._namespace.block_tokens,
            seconds=settings.load_seconds,
            tally=self.tally,
        )
        self._saver = Saver(
            saves,
            self._header,
            self._digest,
            queue_bytes=settings.save_queue_mib * 1024 * 1024,
            ttl_ms=settings.ttl_seconds * 1_000,
            seconds=settings.save_seconds,
            tally=self.tally,
        )

    def _header(self, chunk: Chunk) -> Header:
        assert self._cache is not None
        tokens = chunk.end - chunk.start
        blocks = tokens // self._namespace.block_tokens
        return Header(
            chunk.name,
            self._digest,
            tokens,
            self._cache.layers,
            blocks,
            self._cache.block_shape,
            self._cache.dtype,
            self._namespace.encoding,
            self._cache.size(blocks),
        )

    def load(self, meta: TierMetadata) -> None:
        assert self._loader is not None
        for request_id, loads in meta.loads:
            self._loader.submit(request_id, loads)

    def save(self, meta: TierMetadata) -> None:
        assert self._cache is not None
        assert self._saver is not None
        for save in meta.saves:
            size = self._cache.size(len(save.block_ids))
            if self._saver.wants(save.chunk, size):
                self._saver.save(save.chunk, self._cache.gather(save.block_ids))
        self._sent.update(meta.ended)

    def finished(
        self, meta: TierMetadata, finished: set[str]
    ) -> tuple[set[str] | None, set[str] | None]:
        assert self._loader is not None
        for request_id in finished:
            self._loader.cancel(request_id)
        ended = self._loader.take(0.0 if meta.computes else _IDLE_SECONDS)
        for load in ended:
            self._failed |= load.failed_blocks
            self.tally.add("loaded_bytes", load.size)
            self.tally.add("load_seconds", load.seconds)
        self._loaded += ended
        sent, self._sent = self._sent, set()
        return sent or None, {load.request_id for load in ended} or None

    def failed_blocks(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed

    def loaded(self) -> list[Loaded]:
        loaded, self._loaded = self._loaded, []
        return loaded

    def close(self) -> None:
        for part in (self._loader, self._saver, *self._stores):
            if part is not None:
                part.close()


def _namespace(
    vllm_config: Any, kv_cache_config: Any, settings: KvSettings, model: str, revision: str
) -> Namespace:
    parallel = vllm_config.parallel_config
    (group,) = kv_cache_config.kv_cache_groups
    return Namespace(
        model=model,
        revision=revision,
        weights=weights_fingerprint(Path(vllm_config.model_config.model)),
        dtype=str(group.kv_cache_spec.dtype).removeprefix("torch."),
        layout=str(kv_cache_config.kv_cache_layout),
        block_tokens=vllm_config.cache_config.block_size,
        chunk_tokens=settings.chunk_tokens,
        tensor_parallel=parallel.tensor_parallel_size,
        pipeline_parallel=parallel.pipeline_parallel_size,
        encoding=settings.encoding,
    )


def _of_rank(namespace: Namespace, rank: int) -> Namespace:
    return replace(namespace, rank=rank)
