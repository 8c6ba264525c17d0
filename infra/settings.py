"""Typed settings: one file for the whole deployment, read once when a process starts.

The file is TOML (or JSON, which ``headrace up`` writes for the roles it starts). Every unknown key is an
error that names it. Without a file, :func:`development` gives a loopback-only configuration.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from contracts.tiers import QueueClass
from contracts.topics import POOL_NAME, Topics

#: Keys of the development configuration; it binds to loopback only.
DEV_PAID_KEY = "sk-headrace-dev"
DEV_FREE_KEY = "sk-headrace-free"

#: Model path that selects the simulated engine's built-in tokenizer instead of a model folder.
BUILTIN_SIM = "builtin:sim"

#: Longest grace time of a request without readers; no grace time at all is longer still.
MAX_LEAVE_GRACE_SECONDS = 3_600


class SettingsError(Exception):
    """The configuration cannot be used; the message names the key and is meant for people."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class KafkaSettings(_Section):
    """Connection and topics.

    Attributes:
        bootstrap: ``host:port`` of a broker.
        worker_slots: the most workers of a pool.
        worker_partitions: how many partitions of its pool's dispatch topic each of them reads.
        fetch_max_wait_ms: how long a broker holds an empty fetch. Apache Kafka answers at once when a
            record arrives, so long is right there; the embedded broker does not, so ``headrace up``
            sets it low.
        doorbells: a folder on this machine through which producers wake consumers, for a broker that does not
            (:mod:`infra.doorbell`); ``headrace up`` makes one for the embedded broker. Absent: none.
        request_timeout_ms: deadline of one request to a broker.
        stall_seconds: a role whose consumer has stood still so long, away from the end of its log and with
            room for more, ends and is started anew.
        idempotent: idempotent producer; None asks the broker whether it can.
    """

    bootstrap: str = "127.0.0.1:9092"
    topic_prefix: str = Field(default="headrace", pattern=r"^[a-z0-9][a-z0-9._-]{0,40}$")
    partitions: int = Field(default=8, ge=1, le=1024)
    worker_slots: int = Field(default=64, ge=1, le=4096)
    worker_partitions: int = Field(default=1, ge=1, le=64)
    replication_factor: int = Field(default=1, ge=1)
    fetch_max_wait_ms: int = Field(default=500, ge=1)
    doorbells: Path | None = None
    request_timeout_ms: int = Field(default=10_000, ge=100)
    session_timeout_ms: int = Field(default=10_000, ge=1_000)
    stall_seconds: float = Field(default=30.0, gt=0)
    idempotent: bool | None = None

    @property
    def topics(self) -> Topics:
        """Topic names of this deployment."""
        return Topics(self.topic_prefix, self.partitions, self.worker_slots, self.worker_partitions)


class RedisSettings(_Section):
    """Where token streams live.

    Attributes:
        timeout_seconds: deadline of one command.
        max_connections: bound of the connection pool of one process.
        allow_eviction: start although this Redis drops keys when its memory is full
            (``maxmemory-policy`` other than ``noeviction``), and running replies with them.
    """

    url: str = "redis://127.0.0.1:6379/0"
    timeout_seconds: float = Field(default=5.0, gt=0)
    max_connections: int = Field(default=64, ge=4)
    allow_eviction: bool = False


class StreamSettings(_Section):
    """Lifetimes of token streams.

    Attributes:
        lease_ms: a worker that has not renewed a request's lease for so long counts as dead.
        open_ttl_seconds: lifetime of a stream nobody renews or seals; sliding.
        retention_seconds: how long a sealed stream can still be resumed.
        memory_seconds: how long an expired stream is still known (410) rather than unknown (404).
    """

    lease_ms: int = Field(default=1_500, ge=200)
    open_ttl_seconds: int = Field(default=3_600, ge=10)
    retention_seconds: int = Field(default=3_600, ge=1)
    memory_seconds: int = Field(default=86_400, ge=1)


class HttpSettings(_Section):
    """The gateway.

    Attributes:
        max_body_bytes: one limit for HTTP bodies and websocket frames.
        keepalive_seconds: an SSE comment after so long without an event.
    """

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    public_ws_url: str | None = None
    max_body_bytes: int = Field(default=1024 * 1024, ge=1024)
    keepalive_seconds: float = Field(default=10.0, gt=0)


class EdgeSettings(_Section):
    """The websocket edge.

    Attributes:
        max_streams_per_socket: streams one socket may read at once.
        max_sockets: sockets per edge process.
        auth_timeout_seconds: time to authenticate after connecting.
        frames_per_second: client frames a socket may send, on average.
        buffer_entries: entries the hub holds per reader before that reader catches up from Redis.
        send_timeout_seconds: a socket that takes nothing for so long is closed.
    """

    host: str = "127.0.0.1"
    port: int = Field(default=8001, ge=0, le=65535)
    allowed_origins: list[str] | None = None
    max_streams_per_socket: int = Field(default=64, ge=1)
    max_sockets: int = Field(default=10_000, ge=1)
    auth_timeout_seconds: float = Field(default=10.0, gt=0)
    frames_per_second: float = Field(default=50.0, gt=0)
    buffer_entries: int = Field(default=512, ge=8)
    send_timeout_seconds: float = Field(default=30.0, gt=0)


class ModerationSettings(_Section):
    """The moderation stage.

    Attributes:
        threshold: classifier score in (0, 1] from which a message is refused; 1 refuses none by score.
        blocked_patterns: regular expressions (case-insensitive) that refuse a message.
        deadline_seconds: a check that takes longer counts as failed.
        when_unavailable: what a failed check means: refuse (``closed``) or let through (``open``).
    """

    threshold: float = Field(default=0.9, gt=0, le=1)
    blocked_patterns: list[str] = Field(default_factory=list)
    deadline_seconds: float = Field(default=2.0, gt=0)
    when_unavailable: Literal["closed", "open"] = "closed"


class SchedulerSettings(_Section):
    """The scheduler.

    Attributes:
        window_per_class: requests held in memory per class; the rest waits in Kafka.
        ageing_seconds: waiting so long lifts a request by one class.
        max_attempts: dispatches after which a request is given up as failed.
        worker_timeout_ms: a worker without a heartbeat for so long takes no more work.
        queue_limit: waiting requests per class from which new ones are refused (``queue_full``).
        orphan_seconds: an open request that neither a scheduler nor a worker has had in hand for so long
            is ended by the reaper. Must be longer than a scheduler's partitions need to find another one
            (``kafka.session_timeout_ms`` and a rebalance).
        policy: ``fair``, or one of the baselines it is compared with: ``strict`` (class, then arrival) and
            ``fcfs`` (arrival). What the settings from here on mean: docs/SCHEDULING.md.
        class_weights: share of each class in the served tokens of a pool while all of them wait; a class
            that is absent has 1.
        reserved_slots: fraction of a pool's slots that lower classes may not take, by class; absent = none.
        tenant_weights: share of a tenant among those of its class; absent = 1.
        prefill_tokens_per_worker: prompt tokens (not cached ones) that a worker is given before they are
            prefilled; a longer prompt goes alone.
        max_overtakes: requests that may pass one that is next but does not fit, or whose prefix is not
            cached; after them a worker is kept for it.
        locality_quantum: tokens that a tenant may be ahead of the others for the sake of cached prefixes;
            0 = none.
        prefill_tokens_per_second: prompt tokens that a worker prefills; for expected times only.
        preempt_after_ms: an interactive request that has waited so long for a slot makes a batch reply
            give up its own.
        max_preemptions: how often one reply gives up its slot; 0 = never.
    """

    window_per_class: int = Field(default=5_000, ge=1)
    ageing_seconds: float = Field(default=10.0, gt=0)
    max_attempts: int = Field(default=3, ge=1)
    worker_timeout_ms: int = Field(default=2_000, ge=200)
    queue_limit: int = Field(default=5_000, ge=1)
    orphan_seconds: float = Field(default=20.0, gt=0)
    policy: Literal["fair", "strict", "fcfs"] = "fair"
    class_weights: dict[QueueClass, Annotated[float, Field(gt=0)]] = Field(
        default_factory=lambda: {
            QueueClass.INTERACTIVE: 8.0,
            QueueClass.STANDARD: 4.0,
            QueueClass.BATCH: 1.0,
        }
    )
    reserved_slots: dict[QueueClass, Annotated[float, Field(ge=0, lt=1)]] = Field(
        default_factory=lambda: {QueueClass.INTERACTIVE: 0.05}
    )
    tenant_weights: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    prefill_tokens_per_worker: int = Field(default=6_144, ge=1)
    max_overtakes: int = Field(default=16, ge=0)
    locality_quantum: int = Field(default=4_096, ge=0)
    prefill_tokens_per_second: int = Field(default=8_000, ge=1)
    preempt_after_ms: int = Field(default=250, ge=0)
    max_preemptions: int = Field(default=3, ge=0)


class SimSettings(_Section):
    """The simulated engine.

    Attributes:
        ttft_ms: prefill time of a request.
        tpot_ms: time of one step.
        slowdown_per_request: fraction by which each running request beyond the first lengthens a step.
        script: JSON file with scripted replies and faults (see docs/SIM_ENGINE.md), or None.
    """

    ttft_ms: float = Field(default=20.0, ge=0)
    tpot_ms: float = Field(default=10.0, ge=0)
    slowdown_per_request: float = Field(default=0.0, ge=0)
    script: str | None = None


class VllmSettings(_Section):
    """vLLM.

    Attributes:
        dtype: ``float32`` makes a continued greedy reply identical to an uninterrupted one.
        kv_cache_gib: KV cache space on the CPU; ignored on GPUs.
        enforce_eager: skip compilation (quick start, slower tokens).
        max_batched_tokens: tokens per engine step (chunked prefill); at least ``worker.max_seqs`` are taken.
            ``scheduler.prefill_tokens_per_worker`` should be a few times as many: docs/SCHEDULING.md.
        gpu_memory_utilization: share of a GPU vLLM may take.
        block_tokens: tokens of a KV block; None = vLLM's choice (16 on GPUs, 128 on the CPU).
    """

    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "bfloat16"
    kv_cache_gib: int = Field(default=1, ge=1)
    enforce_eager: bool = True
    max_batched_tokens: int = Field(default=2_048, ge=64)
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    block_tokens: int | None = Field(default=None, ge=1, le=256)


class WorkerSettings(_Section):
    """Workers.

    Attributes:
        engine: which engine the workers run.
        max_seqs: replies a worker generates at once (choices count singly).
        heartbeat_ms: interval of capacity reports, and of what schedulers tell the workers.
        hang_seconds: a reply without a token for so long loses its lease (after the first token).
        prefill_seconds: the same for the first token.
        drain_seconds: time running replies get to finish after SIGTERM.
    """

    engine: Literal["vllm", "sim"] = "vllm"
    max_seqs: int = Field(default=64, ge=1)
    heartbeat_ms: int = Field(default=500, ge=50)
    hang_seconds: float = Field(default=30.0, gt=0)
    prefill_seconds: float = Field(default=120.0, gt=0)
    drain_seconds: float = Field(default=20.0, ge=0)
    sim: SimSettings = SimSettings()
    vllm: VllmSettings = VllmSettings()

    @property
    def scheduler_ttl_ms(self) -> int:
        """A scheduler that has told the workers nothing for so long counts as gone."""
        return 3 * self.heartbeat_ms


class KvSettings(_Section):
    """The KV tier: KV-cache blocks in Redis (docs/KV_CACHE.md).

    Attributes:
        enabled: whether vLLM workers use it.
        redis_url: a Redis of its own, with a ``maxmemory`` and an LRU or LFU policy; None = ``headrace up``
            runs one.
        cluster: ``redis_url`` is a node of a Redis cluster.
        ttl_seconds: a chunk that nobody has used for so long goes.
        chunk_tokens: tokens of a chunk, a multiple of the engine's block. Only with 256 do schedulers learn
            which prefixes the tier holds.
        encoding: ``raw``, or ``fp8``: half the bytes of a 16-bit cache, and not quite the same replies.
        connections: loads at once, each on a connection of its own.
        lookup_ms: a lookup that takes longer is a miss.
        load_seconds: a request's load that takes longer has failed, and the rest is computed.
        save_seconds: deadline of saving one chunk.
        save_queue_mib: what waits to be saved; more is not saved.
        memory_mib: ``maxmemory`` of the Redis that ``headrace up`` runs.
        offload_gib: host memory for blocks, GPUs only: more than 0 = vLLM's own offloading, with Redis below
            it, in the place of our connector.
        shared_prompts: system prompts by name whose blocks are shared between tenants.
    """

    enabled: bool = False
    redis_url: str | None = None
    cluster: bool = False
    ttl_seconds: int = Field(default=3_600, ge=1)
    chunk_tokens: int = Field(default=256, ge=16, le=8_192)
    encoding: Literal["raw", "fp8"] = "raw"
    connections: int = Field(default=2, ge=1, le=64)
    lookup_ms: int = Field(default=50, ge=1)
    load_seconds: float = Field(default=2.0, gt=0)
    save_seconds: float = Field(default=2.0, gt=0)
    save_queue_mib: int = Field(default=256, ge=1)
    memory_mib: int = Field(default=512, ge=16)
    offload_gib: float = Field(default=0.0, ge=0)
    shared_prompts: dict[str, str] = Field(default_factory=dict)


class ModelSettings(_Section):
    """One served model.

    Attributes:
        path: Hugging Face folder, or ``builtin:sim``.
        pool: worker group that serves it.
        aliases: other names a client may use.
        context_length: prompt and reply together, tokens.
        default_max_tokens: reply length where the client sets none.
        tiers: tiers that may use it; None = all.
        fallback: the model that standard tiers get instead when this one's pool is overloaded
            (docs/OVERLOAD.md); None = none.
        revision: shown to clients and part of KV-cache keys.
    """

    path: str
    pool: str = "default"
    aliases: list[str] = Field(default_factory=list)
    context_length: int = Field(default=2_048, ge=16)
    default_max_tokens: int = Field(default=512, ge=1)
    tiers: list[str] | None = None
    fallback: str | None = None
    revision: str = "1"

    @field_validator("pool")
    @classmethod
    def _pool_name(cls, value: str) -> str:
        if not POOL_NAME.fullmatch(value):
            raise ValueError("a pool name is 1 to 48 of a-z 0-9 _ -, not starting with _ or -")
        return value

    def serves(self, tier: str) -> bool:
        """Whether a tier may use it."""
        return self.tiers is None or tier in self.tiers


class LimitSettings(_Section):
    """Limits (docs/LIMITS.md); None = no limit of this kind.

    Attributes:
        requests_per_minute: in any 60 seconds.
        tokens_per_minute: prompt and output tokens, in any 60 seconds.
        concurrent: requests that have not ended.
        requests_per_day: by UTC days.
        tokens_per_day: by UTC days.
        enqueued_tokens: prompt and output tokens of the requests that have not ended: for batches, instead of
            limits per minute.
    """

    requests_per_minute: int | None = Field(default=None, ge=1)
    tokens_per_minute: int | None = Field(default=None, ge=1)
    concurrent: int | None = Field(default=None, ge=1)
    requests_per_day: int | None = Field(default=None, ge=1)
    tokens_per_day: int | None = Field(default=None, ge=1)
    enqueued_tokens: int | None = Field(default=None, ge=1)

    @property
    def any(self) -> bool:
        """Whether there is a limit at all."""
        return any(limit is not None for limit in self.model_dump().values())


class LimitStoreSettings(_Section):
    """Where limits are counted.

    Attributes:
        redis_url: a Redis of their own; None = the one of the token streams.
        timeout_seconds: a decision that takes longer is none: limits cannot be counted.
    """

    redis_url: str | None = None
    timeout_seconds: float = Field(default=3.0, gt=0)


class TenantSettings(_Section):
    """One tenant. Those who are not listed have no limits as tenants.

    Attributes:
        limits: of all its keys together.
    """

    limits: LimitSettings = LimitSettings()


class TierSettings(_Section):
    """One tier of users.

    Attributes:
        queue_class: the line its requests wait in.
        max_wait_seconds: a request that has not started after so long is ended as expired.
        leave_grace_seconds: a request without a reader for so long is ended as cancelled; 0 = at once,
            None (in TOML: ``"never"``) = it goes on without readers.
        ttft_target_seconds: time to first token its users should get; the overload ladder compares their
            waiting with it. A batch tier's says nothing.
        limits: of each of its keys.
        tier_limits: of all its users together.
        when_limits_unavailable: while limits cannot be counted, refuse (``closed``) or go on (``open``) ...
        open_requests_per_minute: ... with at most so many requests a minute for each key and process.
        queue_limit: waiting requests of its class from which its new ones are refused (``queue_full``);
            None = ``scheduler.queue_limit``.
    """

    queue_class: QueueClass
    max_wait_seconds: float = Field(default=120.0, gt=0)
    leave_grace_seconds: float | None = Field(default=30.0, ge=0, le=MAX_LEAVE_GRACE_SECONDS)
    ttft_target_seconds: float = Field(default=10.0, gt=0)
    limits: LimitSettings = LimitSettings()
    tier_limits: LimitSettings = LimitSettings()
    when_limits_unavailable: Literal["closed", "open"] = "closed"
    open_requests_per_minute: int = Field(default=60, ge=1)
    queue_limit: int | None = Field(default=None, ge=1)

    @field_validator("leave_grace_seconds", mode="before")
    @classmethod
    def _never(cls, value: object) -> object:
        return None if value == "never" else value


class KeySettings(_Section):
    """One API key.

    Attributes:
        id: public name of the key, for logs and usage.
        sha256: hex digest of the key; the key itself is stored nowhere.
        limits: in the place of its tier's; None = its tier's.
    """

    id: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    tenant: str = Field(pattern=r"^[A-Za-z0-9_.@:-]{1,64}$")
    tier: str
    limits: LimitSettings | None = None


class OverloadSettings(_Section):
    """The overload ladder (docs/OVERLOAD.md): what is degraded while requests wait longer than they should.

    Queue delays are compared with each tier's ``ttft_target_seconds``, per pool.

    Attributes:
        enabled: whether anything is degraded at all.
        percentile: of the waiting times of a tier's requests, the one that is its queue delay.
        window_seconds: how long a dispatched request counts.
        raise_ratio: one step up once a tier waits so many times its target ...
        raise_seconds: ... for so long without a break.
        lower_ratio: one step down once every tier that counts waits at most so many times its target ...
        lower_seconds: ... for so long without a break.
        wait_factor: longer waits: by what target and longest wait of standard tiers grow.
        shrink_factor: shorter replies: the part of its output tokens that a reply keeps.
        shrink_floor: shorter replies: replies of at most so many tokens are left alone, and none is made
            shorter than that.
        retry_after_seconds: when a refused client may come again.
    """

    enabled: bool = True
    percentile: float = Field(default=0.9, gt=0, le=1)
    window_seconds: float = Field(default=10.0, gt=0)
    raise_ratio: float = Field(default=1.0, gt=0)
    raise_seconds: float = Field(default=5.0, ge=0)
    lower_ratio: float = Field(default=0.5, ge=0)
    lower_seconds: float = Field(default=15.0, ge=0)
    wait_factor: float = Field(default=3.0, ge=1)
    shrink_factor: float = Field(default=0.5, gt=0, le=1)
    shrink_floor: int = Field(default=128, ge=1)
    retry_after_seconds: int = Field(default=15, ge=1)

    @field_validator("lower_ratio")
    @classmethod
    def _below(cls, value: float, info: ValidationInfo) -> float:
        # Else a delay between the two would be too long and short enough at once.
        if value >= info.data.get("raise_ratio", value + 1):
            raise ValueError("must be less than raise_ratio")
        return value


class HistorySettings(_Section):
    """Conversations.

    Attributes:
        retention_seconds: a conversation nobody adds to is forgotten after so long.
        max_turns: turns of one conversation that are kept and used as context.
        tenant_conversations: conversations that a tenant makes and keeps; the oldest make room.
    """

    retention_seconds: int = Field(default=30 * 86_400, ge=60)
    max_turns: int = Field(default=200, ge=1)
    tenant_conversations: int = Field(default=5_000, ge=1)


class StoredSettings(_Section):
    """What ``store: true`` keeps.

    Attributes:
        retention_seconds: lifetime of a reply after its end.
        tenant_replies: replies of a tenant that are kept, of each kind; the oldest make room.
    """

    retention_seconds: int = Field(default=30 * 86_400, ge=60)
    tenant_replies: int = Field(default=5_000, ge=1)


class FileSettings(_Section):
    """Files (docs/BATCH.md).

    Attributes:
        url: where their content is: a folder, or a URL that fsspec knows (``s3://bucket/folder``); None = the
            folder ``files`` in the data folder.
        max_bytes: largest upload.
        tenant_bytes: largest sum of a tenant's files at which it may still upload.
        tenant_files: most files of a tenant at which it may still upload.
        retention_seconds: lifetime of a file whose call asks for none.
        idle_seconds: an upload of which nothing comes for so long is refused.
    """

    url: str | None = None
    max_bytes: int = Field(default=200_000_000, ge=1024)
    tenant_bytes: int = Field(default=10 * 1024**3, ge=1024)
    tenant_files: int = Field(default=2_000, ge=1)
    retention_seconds: int = Field(default=30 * 86_400, ge=1, le=30 * 86_400)
    idle_seconds: float = Field(default=30.0, gt=0)


class BatchSettings(_Section):
    """Batches (docs/BATCH.md).

    Attributes:
        max_lines: requests of one batch.
        max_line_bytes: bytes of one line.
        tenant_batches: most batches of a tenant, ended ones that are still kept included.
        retention_seconds: how long a batch is kept after its completion window.
        in_flight: lines that one runner has in the pipeline at once.
        unmoderated: of these, at most so many that moderation has not seen yet: what a chat waits for there.
        entrance_share: part of the time in which each of these places is in use.
        at_once: batches that one runner has in hand.
        lease_seconds: a runner that has not renewed its hold on a batch for so long counts as dead.
        flush_seconds: how long results gather before they go to the storage.
    """

    max_lines: int = Field(default=50_000, ge=1)
    max_line_bytes: int = Field(default=1024 * 1024, ge=1024)
    tenant_batches: int = Field(default=2_000, ge=1)
    retention_seconds: int = Field(default=30 * 86_400, ge=60)
    in_flight: int = Field(default=32, ge=1)
    unmoderated: int = Field(default=2, ge=1)
    entrance_share: float = Field(default=0.25, gt=0, le=1)
    at_once: int = Field(default=16, ge=1)
    lease_seconds: float = Field(default=5.0, gt=0)
    flush_seconds: float = Field(default=1.0, gt=0)


class Settings(_Section):
    """Everything; see each section."""

    kafka: KafkaSettings = KafkaSettings()
    redis: RedisSettings = RedisSettings()
    kv: KvSettings = KvSettings()
    streams: StreamSettings = StreamSettings()
    http: HttpSettings = HttpSettings()
    edge: EdgeSettings = EdgeSettings()
    moderation: ModerationSettings = ModerationSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    worker: WorkerSettings = WorkerSettings()
    history: HistorySettings = HistorySettings()
    overload: OverloadSettings = OverloadSettings()
    stored: StoredSettings = StoredSettings()
    files: FileSettings = FileSettings()
    batch: BatchSettings = BatchSettings()
    limits: LimitStoreSettings = LimitStoreSettings()
    models: dict[str, ModelSettings]
    tiers: dict[str, TierSettings]
    tenants: dict[str, TenantSettings] = Field(default_factory=dict)
    keys: list[KeySettings] = Field(default_factory=list)
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    drain_seconds: float = Field(default=10.0, ge=0)

    @model_validator(mode="after")
    def _consistent(self) -> Settings:
        names: dict[str, str] = {}
        for name, model in self.models.items():
            for known in (name, *model.aliases):
                if not known or len(known) > 128:
                    raise ValueError(f"models.{name}: a name has 1 to 128 characters")
                if names.setdefault(known, name) != name:
                    raise ValueError(f"models.{name}: the name {known} is taken by {names[known]}")
            for tier in model.tiers or ():
                if tier not in self.tiers:
                    raise ValueError(f"models.{name}.tiers: there is no tier {tier}")
        self._check_pools()
        self._check_fallbacks()
        digests = set()
        for key in self.keys:
            if key.tier not in self.tiers:
                raise ValueError(f"keys.{key.id}.tier: there is no tier {key.tier}")
            if key.sha256 in digests:
                raise ValueError(f"keys.{key.id}.sha256: this key is listed twice")
            digests.add(key.sha256)
        return self

    def _check_pools(self) -> None:
        """A worker has one engine with one model: what shares a pool shares its weights."""
        first: dict[str, tuple[str, ModelSettings]] = {}
        for name, model in self.models.items():
            other, known = first.setdefault(model.pool, (name, model))
            for key in ("path", "revision"):
                if getattr(known, key) != getattr(model, key):
                    raise ValueError(
                        f"models.{name}.pool: the pool {model.pool} serves models.{other} "
                        f"with another {key}"
                    )

    def _check_fallbacks(self) -> None:
        for name, model in self.models.items():
            if model.fallback is None:
                continue
            other = self.models.get(model.fallback)
            if other is None:
                raise ValueError(f"models.{name}.fallback: there is no model {model.fallback}")
            chain = [name]
            while (following := self.models[chain[-1]].fallback) in self.models:
                if following in chain:
                    raise ValueError(
                        f"models.{name}.fallback: {' -> '.join([*chain, following])} is a cycle"
                    )
                chain.append(following)
            for tier in self.tiers:
                if model.serves(tier) and not other.serves(tier):
                    raise ValueError(
                        f"models.{name}.fallback: tier {tier} may use {name} and not {model.fallback}"
                    )

    def queue_limit(self, tier: TierSettings) -> int:
        """Waiting requests of its class from which new ones of a tier are refused."""
        return self.scheduler.queue_limit if tier.queue_limit is None else tier.queue_limit

    def line_tier(self, tier: str) -> str | None:
        """The tier that lines of a batch count as: its creator's, if that is one for batches, else the first.

        None where there is no tier of class ``batch``.
        """
        batch = [name for name, t in self.tiers.items() if t.queue_class is QueueClass.BATCH]
        return tier if tier in batch else next(iter(batch), None)

    @property
    def limits_redis(self) -> RedisSettings:
        """How to reach the Redis that counts limits."""
        url = self.limits.redis_url
        return self.redis if url is None else self.redis.model_copy(update={"url": url})

    @property
    def has_limits(self) -> bool:
        """Whether anybody has a limit of any kind."""
        every = [
            *(limits for tier in self.tiers.values() for limits in (tier.limits, tier.tier_limits)),
            *(tenant.limits for tenant in self.tenants.values()),
            *(key.limits for key in self.keys if key.limits is not None),
        ]
        return any(limits.any for limits in every)

    @property
    def pools(self) -> list[str]:
        """Names of the worker pools."""
        return sorted({m.pool for m in self.models.values()})

    def resolve_model(self, name: str) -> tuple[str, ModelSettings] | None:
        """Canonical name and settings of the model a client calls ``name``; None if there is none."""
        if name in self.models:
            return name, self.models[name]
        return next(((n, m) for n, m in self.models.items() if name in m.aliases), None)


def hash_key(api_key: str) -> str:
    """Digest under which an API key is stored.

    Keys are 256 random bits (``headrace keys create``), so a plain SHA-256 cannot be searched.
    """
    return hashlib.sha256(api_key.encode()).hexdigest()


def parse(raw: dict[str, Any]) -> Settings:
    """Validate a configuration.

    Raises:
        SettingsError: names the first key at fault.
    """
    try:
        return Settings.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        what = "is not a known key" if first["type"] == "extra_forbidden" else first["msg"]
        raise SettingsError(f"configuration: {where + ': ' if where else ''}{what}") from None


def load(path: Path | None) -> Settings:
    """Read a TOML or JSON configuration file; None gives the development configuration.

    Raises:
        SettingsError: the file cannot be read or used.
    """
    if path is None:
        return development()
    try:
        text = path.read_text(encoding="utf-8")
        return parse(json.loads(text) if path.suffix == ".json" else tomllib.loads(text))
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"configuration {path}: {error}") from None
    except (tomllib.TOMLDecodeError, json.JSONDecodeError) as error:
        raise SettingsError(f"configuration {path}: {error}") from None


def development(engine: Literal["vllm", "sim"] = "vllm", model_path: str = BUILTIN_SIM) -> Settings:
    """The configuration without a file: loopback, one model called ``default``, two known keys."""
    name = "headrace-sim" if model_path == BUILTIN_SIM else Path(model_path).name.lower()
    return parse(
        {
            "kv": {"enabled": engine == "vllm"},
            "worker": {"engine": engine, "max_seqs": 256 if engine == "sim" else 32},
            "models": {
                name: {
                    "path": model_path,
                    "aliases": ["default"],
                    "context_length": 8_192 if engine == "sim" else 2_048,
                }
            },
            "tiers": {
                "paid": {
                    "queue_class": "interactive",
                    "max_wait_seconds": 60,
                    "when_limits_unavailable": "open",
                },
                "free": {"queue_class": "standard", "max_wait_seconds": 120},
                "batch": {
                    "queue_class": "batch",
                    "max_wait_seconds": 86_400,
                    "leave_grace_seconds": None,
                },
            },
            "keys": [
                {
                    "id": "dev",
                    "sha256": hash_key(DEV_PAID_KEY),
                    "tenant": "dev",
                    "tier": "paid",
                },
                {
                    "id": "free",
                    "sha256": hash_key(DEV_FREE_KEY),
                    "tenant": "dev-free",
                    "tier": "free",
                },
            ],
        }
    )
