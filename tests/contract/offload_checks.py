"""What vLLM's offloading has of the KV tier below it: the tier itself on a real buffer and a real Redis, and
vLLM's own manager of tiers around it. The GPU is played by whoever writes into the buffer.

Run in the engine environment, which has no pytest, by ``test_offload_contract``:
``python -m tests.contract.offload_checks REDIS_ARGV REDIS_PORT``.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import random
import struct
import tempfile
import threading
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kv.codec import HEADER_BYTES
from kv.tier import OFFLOAD_EVENTS
from tests.contract.engine_checks import results_of
from tests.contract.tier_checks import Server, configured
from tests.tcp_proxy import TcpProxy, tcp_proxy

BLOCK = 16
BLOCKS = 4
ROW = 64 * 1024
ROWS = 48
TTL_SECONDS = 600
#: What waits to be saved, at most.
QUEUED = 16
SECONDS = 30


@dataclass
class Bench:
    """A Redis behind a proxy, and a folder for the weights."""

    server: Server
    proxy: TcpProxy
    model: Path
    _made: int = 0

    def keys(self, count: int) -> list[bytes]:
        """Keys of chunks nobody has."""
        self._made += 1
        return [random.Random(f"{self._made}/{i}").randbytes(32) + bytes(4) for i in range(count)]

    def config(self, revision: str = "1", **settings: Any) -> Any:
        from infra.settings import KvSettings
        from kv.secondary_tier_vllm import offload_config
        from kv.tier import Tier

        usual = {
            "redis_url": self.proxy.url,
            "chunk_tokens": BLOCK * BLOCKS,
            "ttl_seconds": TTL_SECONDS,
            "lookup_ms": 1_000 * SECONDS,
            "load_seconds": SECONDS,
            "save_seconds": SECONDS,
            "save_queue_mib": QUEUED * ROW // 2**20,
        }
        tier = Tier(KvSettings(**usual | settings), "redis://127.0.0.1:1/0", "checked", revision)
        return offload_config(tier, ROWS * ROW / 2**30)

    def spec(self, revision: str = "1", **settings: Any) -> Any:
        """VLLM's specification of tiers, as its connector would make it."""
        from vllm.v1.kv_offload import config as c
        from vllm.v1.kv_offload.factory import OffloadingSpecFactory

        return OffloadingSpecFactory.create_spec(
            c.OffloadingConfig(
                groups=(c.OffloadingGroupConfig(BLOCK, ("layer.0", "layer.1"), 0),),
                worker_kv_bytes_per_block=ROW // BLOCKS,
                enable_kv_cache_events=False,
                extra_config=self.config(revision, **settings).kv_connector_extra_config,
                engine_id=uuid.uuid4().hex,
                model=c.OffloadingModelConfig(str(self.model), "bfloat16"),
                cache=c.OffloadingCacheConfig(BLOCK, BLOCKS),
                parallel=c.OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, False),
                kv_cache_layout="LBHNC",
            )
        )

    @asynccontextmanager
    async def held(self) -> AsyncIterator[asyncio.Event]:
        """Redis hears nothing of what is sent while the block lasts; the event tells that something was."""
        go, sent = asyncio.Event(), asyncio.Event()

        async def hold(data: bytes) -> None:
            sent.set()
            await go.wait()

        self.proxy.before = hold
        try:
            yield sent
        finally:
            self.proxy.before = None
            go.set()


class Host:
    """A buffer on the host, and the tier below it."""

    def __init__(self, bench: Bench, **spec: Any) -> None:
        import numpy as np
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

        self.memory = mmap.mmap(-1, ROWS * ROW)
        self.bytes = np.frombuffer(self.memory, np.int8).reshape(ROWS, ROW)
        self.view = memoryview(self.bytes)
        made = bench.spec(**spec)
        (config,) = made.secondary_tier_configs
        self.tier = SecondaryTierFactory.create_secondary_tier(config, self.view, made)
        self.results: dict[int, Any] = {}
        self.events: dict[str, float] = {}
        self._jobs = 0

    def fill(self, rows: Iterable[int]) -> None:
        import numpy as np

        for row in rows:
            self.bytes[row] = np.random.default_rng(row).integers(-128, 128, ROW, np.int8)

    def submit(self, load: bool, keys: Sequence[bytes], rows: Sequence[int], request: str = "r") -> int:
        import numpy as np
        from vllm.v1.kv_offload.tiering.base import TransferJob

        self._jobs += 1
        job = TransferJob(self._jobs, keys, np.array(rows, np.int32), load, context(request))
        (self.tier.submit_load if load else self.tier.submit_store)(job)
        return self._jobs

    def take(self) -> None:
        for result in self.tier.get_finished_jobs():
            assert result.job_id not in self.results, "reported twice"
            self.results[result.job_id] = result

    async def ended(self, *jobs: int) -> list[Any]:
        async with asyncio.timeout(SECONDS):
            while not self.results.keys() >= set(jobs):
                await asyncio.sleep(0.002)
                self.take()
        return [self.results[job] for job in jobs]

    async def stored(self, keys: Sequence[bytes]) -> None:
        self.fill(range(len(keys)))
        (result,) = await self.ended(self.submit(False, keys, range(len(keys))))
        assert result.success

    def look(self, keys: Sequence[bytes], request: str = "r") -> list[str]:
        """What is answered in one step."""
        answers = [self.tier.lookup(key, context(request)).name for key in keys]
        self.tier.on_schedule_end(step())
        return answers

    async def found(self, keys: Sequence[bytes], request: str = "r") -> list[bool]:
        """What is answered in the end."""
        async with asyncio.timeout(SECONDS):
            while "RETRY" in (answers := self.look(keys, request)):
                await asyncio.sleep(0.002)
        return [answer == "HIT" for answer in answers]

    def count(self, event: str) -> float:

        stats = self.tier.get_stats()
        for (name,), amount in (stats.data["data"][OFFLOAD_EVENTS] if stats is not None else {}).items():
            self.events[name] = self.events.get(name, 0) + amount
        return self.events.get(event, 0)

    async def close(self) -> None:
        await asyncio.to_thread(self.tier.shutdown)


@asynccontextmanager
async def host(bench: Bench, **spec: Any) -> AsyncIterator[Host]:
    made = Host(bench, **spec)
    try:
        yield made
    finally:
        await made.close()


def context(request: str) -> Any:
    from vllm.v1.kv_offload.base import ReqContext

    return ReqContext(request)


def step(preempted: Sequence[str] = ()) -> Any:
    from vllm.v1.kv_offload.base import ScheduleEndContext

    return ScheduleEndContext((), preempted)


# -- the tier


async def check_what_one_host_stored_another_loads_byte_for_byte(bench: Bench) -> None:
    keys = bench.keys(3)
    async with host(bench) as one, host(bench) as other:
        await one.stored(keys)
        assert await other.found([*keys, *bench.keys(1)]) == [True, True, True, False]
        (result,) = await other.ended(other.submit(True, keys, [7, 5, 6]))
        assert (result.success, result.transfer_bytes) == (True, 3 * ROW)
        assert (other.bytes[[7, 5, 6]] == one.bytes[:3]).all()
        assert not other.bytes[8:].any()


async def check_a_redis_that_hangs_is_not_waited_for(bench: Bench) -> None:
    (key,) = bench.keys(1)
    async with host(bench) as other, host(bench, lookup_ms=100, load_seconds=0.5) as one:
        await other.stored([key])
        async with bench.held() as sent:
            assert one.look([key]) == ["RETRY"]
            await asyncio.wait_for(sent.wait(), SECONDS)
            assert await one.found([key]) == [False]
            (result,) = await one.ended(one.submit(True, [key] * 6, range(6)))
            assert not result.success
        assert one.count("lookup_failed_timeout") == 1
        assert one.count("load_failed_timeout") == 6  # also those that no thread was free for


async def check_a_preempted_request_asks_anew(bench: Bench) -> None:
    (key,) = bench.keys(1)
    async with host(bench) as one:
        assert await one.found([key]) == [False]
        await one.stored([key])
        assert one.look([key]) == ["MISS"]
        one.tier.on_schedule_end(step(["r"]))
        assert await one.found([key]) == [True]
        one.tier.on_request_finished(context("r"))
        assert not one.tier._questions


async def check_h8_a_dead_redis_fails_jobs_and_is_left_alone_until_it_is_back(bench: Bench) -> None:
    keys = bench.keys(3)
    async with host(bench) as one:
        await one.stored(keys)
        await bench.server.kill()
        try:
            jobs = [one.submit(False, bench.keys(9), range(9)), one.submit(True, keys, range(3))]
            assert [result.success for result in await one.ended(*jobs)] == [False, False]
            assert one.count("save_dropped_down") > 0
            assert await one.found(keys, "other") == [False] * 3
        finally:
            await bench.server.start()
        async with asyncio.timeout(SECONDS):
            while not (await one.ended(one.submit(False, keys, range(3))))[0].success:
                await asyncio.sleep(0.05)


async def check_stores_are_dropped_under_pressure_and_counted(bench: Bench) -> None:
    async with host(bench) as one:
        async with bench.held() as sent:
            first = one.submit(False, bench.keys(1), [0])
            await asyncio.wait_for(sent.wait(), SECONDS)
            jobs = [one.submit(False, bench.keys(10), range(10)) for _ in range(3)]
            assert one.count("save_dropped_busy") == 30 - QUEUED
            one.take()
            assert one.results.keys() == {jobs[2]}  # of which nothing was kept
        results = await one.ended(first, *jobs)
        assert [result.success for result in results] == [True, True, False, False]
        assert [result.transfer_bytes for result in results] == [ROW, 10 * ROW, 6 * ROW, 0]


async def check_a_full_redis_refuses_and_what_is_there_still_loads(bench: Bench) -> None:
    keys = bench.keys(2)
    async with host(bench) as one:
        await one.stored(keys)
        async with configured(bench.server.client, {"maxmemory-policy": "noeviction", "maxmemory": "1"}):
            (stored,) = await one.ended(one.submit(False, bench.keys(3), range(3)))
            (loaded,) = await one.ended(one.submit(True, keys, [5, 6]))
        assert (stored.success, loaded.success) == (False, True)
        assert one.count("save_dropped_full") > 1


async def check_a_job_that_is_lost_in_part_says_which_part(bench: Bench) -> None:
    keys = bench.keys(3)
    async with host(bench) as one, host(bench) as other:
        await one.stored(keys)
        assert await other.found(keys) == [True] * 3
        await bench.server.client.delete(redis_key(one, keys[1]))
        (result,) = await other.ended(other.submit(True, keys, [0, 1, 2]))
        assert not result.success
        assert set(result.successful_keys) == {keys[0], keys[2]}
        assert not other.bytes[1].any()
        assert other.count("load_failed_evicted") == 1
        assert await other.found(keys) == [True, False, True]  # or it would be loaded for ever


async def check_a_spoiled_value_is_not_used_and_deleted(bench: Bench) -> None:
    dims = 52  #: where the header has the row's length
    spoils: dict[str, Callable[[bytes], bytes]] = {
        "checksum": lambda v: v[:-1] + bytes([v[-1] ^ 1]),
        "version": lambda v: v[:4] + struct.pack("<H", 99) + v[6:],
        "shape": lambda v: v[:dims] + struct.pack("<I", 4) + v[dims + 4 :],
        "length": lambda v: v + b"\0",
        "truncated": lambda _: b"",
        "format": lambda v: b"X" * len(v),
    }
    client = bench.server.client
    keys = bench.keys(len(spoils))
    async with host(bench) as one:
        await one.stored(keys)
        for key, spoil in zip(keys, spoils.values(), strict=True):
            name = redis_key(one, key)
            await client.set(name, spoil(await client.get(name)))
        assert await one.found(keys) == [True] * len(keys)
        one.bytes[:] = 7
        (result,) = await one.ended(one.submit(True, keys, range(len(keys))))
        assert (result.success, result.successful_keys) == (False, None)
        assert (one.bytes == 7).all()
        assert [one.count(f"load_failed_{reason}") for reason in spoils] == [1] * len(spoils)
        assert await client.exists(*(redis_key(one, key) for key in keys)) == 0
        await one.stored(keys)


async def check_what_was_used_lives_on(bench: Bench) -> None:
    client = bench.server.client
    (key,) = bench.keys(1)
    async with host(bench) as one:
        await one.stored([key])
        name = redis_key(one, key)

        async def used(use: Callable[[], Awaitable[Any] | None]) -> None:
            await client.pexpire(name, 60_000)
            if (using := use()) is not None:
                await using
            async with asyncio.timeout(SECONDS):
                while await client.pttl(name) <= 60_000:
                    await asyncio.sleep(0.002)
            assert await client.pttl(name) <= TTL_SECONDS * 1_000

        await used(lambda: one.found([key]))
        await used(lambda: one.tier.touch([key], context("r")))
        finished = context("r")
        finished.set_offload_key_position(key, BLOCK * BLOCKS)
        await used(lambda: one.tier.on_request_finished(finished))
        (again,) = await one.ended(one.submit(False, [key], [0]))
        assert (again.success, again.transfer_bytes) == (True, 0)
        await used(lambda: one.ended(one.submit(False, [key], [0])))


async def check_another_revision_and_the_connector_find_nothing(bench: Bench) -> None:
    from kv.layout import Namespace

    keys = bench.keys(2)
    async with host(bench) as one, host(bench, revision="2") as other:
        await one.stored(keys)
        assert await other.found(keys) == [False, False]
        namespace = one.tier._namespace
        weights = fingerprint(bench)
        connectors = Namespace("checked", "1", weights, "bfloat16", "LBHNC", BLOCK, BLOCK * BLOCKS)
        assert connectors.digest() != namespace
        (bench.model / "config.json").write_text(json.dumps(keys[0].hex()))
        async with host(bench) as changed:
            assert await changed.found(keys) == [False, False]


async def check_draining_ends_every_job_once_and_leaves_nothing_moving(bench: Bench) -> None:
    keys = bench.keys(8)
    async with host(bench) as one:
        await one.stored(keys)
        async with bench.held() as sent:
            jobs = [one.submit(True, keys, range(8)), one.submit(False, bench.keys(5), range(5))]
            jobs += [one.submit(True, keys[:2], [20, 21])]
            await asyncio.wait_for(sent.wait(), SECONDS)
            draining = asyncio.create_task(asyncio.to_thread(one.tier.drain_jobs))
            await asyncio.sleep(0.05)
            assert not draining.done()
        await draining
        one.take()
        assert one.results.keys() >= set(jobs)
        assert one.count("load_failed_cancelled") >= 8
        one.bytes[:] = 3
        await asyncio.sleep(0.05)
        assert (one.bytes == 3).all()
        (after,) = await one.ended(one.submit(True, keys, range(8)))
        assert after.success


async def check_a_shutdown_in_the_middle_of_it_reports_all_and_lets_go(bench: Bench) -> None:
    one = Host(bench)
    await one.stored(bench.keys(2))
    async with bench.held() as sent:
        jobs = [one.submit(False, bench.keys(6), range(6)), one.submit(True, bench.keys(3), range(3))]
        await asyncio.wait_for(sent.wait(), SECONDS)
        closing = asyncio.create_task(one.close())
        await asyncio.sleep(0.02)
    await closing
    one.take()
    assert one.results.keys() >= set(jobs)
    late = one.submit(False, bench.keys(1), [0])
    one.take()
    assert not one.results[late].success
    one.view.release()
    del one.bytes
    one.memory.close()  # which fails as long as anybody has a part of it
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith("kv-offload")]


async def check_weak_hashes_are_refused(bench: Bench) -> None:
    weak = bytes(20)
    async with host(bench) as one:
        assert one.look([weak]) == ["MISS"]
        (result,) = await one.ended(one.submit(False, [*bench.keys(1), weak], [0, 1]))
        assert not result.success
        assert one.count("refused_weak_hash") == 1


# -- vLLM's names of blocks


async def check_n1_n2_a_tenant_is_part_of_every_block_and_processes_agree(bench: Bench) -> None:
    os.environ["PYTHONHASHSEED"] = "17"
    bench.config()
    prompt = list(range(5 * BLOCK))
    mine, again, other, nobody = [block_keys(prompt, salt) for salt in ("a", "a", "b", None)]
    assert mine == again
    assert len(mine) == 5
    assert len({*mine, *other, *nobody}) == 15
    assert mine[0].hex() == FIRST_BLOCK_OF_A  # made in another process, long ago
    async with host(bench) as one:
        await one.stored(mine)
        assert await one.found(mine, "a") == [True] * 5
        assert await one.found(other, "b") == [False] * 5


FIRST_BLOCK_OF_A = "3a829f0539d3fc466ecb0a98675d6c3525ac5e6e55c514c11493ed5395a6c86900000000"


def block_keys(prompt: list[int], salt: str | None) -> list[bytes]:
    """As vLLM's engine makes them with the hash it has by default."""
    from vllm.config import CacheConfig
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.kv_offload.base import make_offload_key
    from vllm.v1.request import Request

    algorithm = get_hash_fn_by_name(CacheConfig.prefix_caching_hash_algo)
    init_none_hash(algorithm)
    hasher = get_request_block_hasher(BLOCK, algorithm)
    sampling = SamplingParams(max_tokens=1)
    request = Request("r", prompt, sampling, None, cache_salt=salt, block_hasher=hasher)
    return [make_offload_key(block, 0) for block in request.block_hashes]


# -- vLLM's manager of tiers


@dataclass
class Worker:
    """VLLM's manager with host memory and the tier, as a worker's scheduler has it."""

    bench: Bench
    manager: Any = field(init=False)

    def __post_init__(self) -> None:
        self.manager = self.bench.spec().get_manager()

    def rows(self) -> Any:
        import numpy as np

        return np.asarray(self.manager.primary_tier.get_kv_memoryview())

    def request(self, name: str) -> Any:
        made = context(name)
        self.manager.on_new_request(made)
        return made

    async def computed(self, keys: Sequence[bytes], name: str = "first") -> None:
        """The GPU has computed these chunks; chunk ``i`` is full of ``i + 1``."""
        request = self.request(name)
        output = self.manager.prepare_store(keys, request)
        for key, row in zip(output.keys_to_store, output.store_spec.chunk_ids, strict=True):
            self.rows()[row] = keys.index(key) + 1
        self.manager.complete_store(keys, request)
        self.manager.on_request_finished(request)
        await self.idle()

    async def idle(self) -> None:
        async with asyncio.timeout(SECONDS):
            while self.manager.has_pending_work():
                self.manager.on_schedule_end(step())
                await asyncio.sleep(0.002)

    async def answers(self, keys: Sequence[bytes], request: Any) -> tuple[list[str], set[str]]:
        """What is answered in the end, and what there was on the way."""
        seen: set[str] = set()
        async with asyncio.timeout(SECONDS):
            while True:
                answers = [self.manager.lookup(key, request).name for key in keys]
                self.manager.on_schedule_end(step())
                if set(answers) <= {"HIT", "MISS"}:
                    return answers, seen
                seen |= set(answers)
                await asyncio.sleep(0.002)

    def loaded(self, keys: Sequence[bytes], request: Any) -> list[set[int]]:
        """The bytes that the GPU gets."""
        spec = self.manager.prepare_load(keys, request)
        found = [set(self.rows()[row].tolist()) for row in spec.chunk_ids]
        self.manager.complete_load(keys, request)
        return found

    async def close(self) -> None:
        await asyncio.to_thread(self.manager.shutdown)


@asynccontextmanager
async def worker(bench: Bench) -> AsyncIterator[Worker]:
    made = Worker(bench)
    try:
        yield made
    finally:
        await made.close()


async def check_a_chunk_goes_from_one_vllm_through_redis_to_another(bench: Bench) -> None:
    keys = bench.keys(4)
    async with worker(bench) as one, worker(bench) as other:
        await one.computed(keys)
        request = other.request("second")
        answers, seen = await other.answers(keys, request)
        assert (answers, seen) == (["HIT"] * 4, {"RETRY", "HIT_PENDING"})
        assert other.loaded(keys, request) == [{1}, {2}, {3}, {4}]
        assert other.manager.get_load_source(keys[0], request).name == "DISK"
        other.manager.on_request_finished(request)
        stats = other.manager.get_stats().data["data"]
        assert list(stats["vllm:kv_offload_tiering_read_bytes"].values()) == [4 * ROW]


async def check_what_is_lost_on_the_way_is_a_miss_and_gives_its_room_back(bench: Bench) -> None:
    keys = bench.keys(3)
    async with worker(bench) as one, worker(bench) as other:
        await one.computed(keys)
        spoiled = redis_key(one, keys[2])
        await bench.server.client.setrange(spoiled, HEADER_BYTES + 9, b"x")
        request = other.request("second")
        answers, _ = await other.answers(keys, request)
        assert answers == ["HIT", "HIT", "MISS"]
        assert other.loaded(keys[:2], request) == [{1}, {2}]
        other.manager.on_request_finished(request)
        assert other.manager.primary_tier._num_write_pending_chunks == 0
        await other.computed(keys, "third")  # and what it computes is stored again
        assert await bench.server.client.exists(spoiled) == 1


async def check_more_than_the_host_can_hold_is_still_in_redis(bench: Bench) -> None:
    keys = bench.keys(ROWS + 8)
    async with worker(bench) as one:
        for start in range(0, len(keys), 8):
            await one.computed(keys[start : start + 8], f"r{start}")
        request = one.request("again")
        answers, seen = await one.answers(keys[:8], request)
        assert (answers, "HIT_PENDING" in seen) == (["HIT"] * 8, True)
        assert one.loaded(keys[:8], request) == [{i + 1} for i in range(8)]
        one.manager.on_request_finished(request)


async def check_a_reset_in_the_middle_of_transfers_leaves_a_working_manager(bench: Bench) -> None:
    keys = bench.keys(4)
    async with worker(bench) as one, worker(bench) as other:
        await one.computed(keys)
        request = other.request("second")
        async with asyncio.timeout(SECONDS):
            while {other.manager.lookup(key, request).name for key in keys} != {"HIT_PENDING"}:
                other.manager.on_schedule_end(step())
                await asyncio.sleep(0.002)
        async with bench.held():
            other.manager.on_schedule_end(step())
            resetting = asyncio.create_task(asyncio.to_thread(other.manager.reset_cache))
            await asyncio.sleep(0.02)
        await resetting
        other.manager.on_request_finished(request)
        answers, _ = await other.answers(keys, other.request("third"))
        assert answers == ["HIT"] * 4


async def check_the_url_is_not_in_vllms_configuration(bench: Bench) -> None:
    config = bench.config()
    assert bench.proxy.url not in repr(config)
    assert os.environ["HEADRACE_KV_URL"] == bench.proxy.url
    spec = bench.spec()
    assert OFFLOAD_EVENTS in type(spec).build_metric_definitions(config.kv_connector_extra_config)


def fingerprint(bench: Bench) -> str:
    from kv.fingerprint import weights_fingerprint

    return weights_fingerprint(bench.model)


def redis_key(owner: Any, key: bytes) -> str:
    tier = owner.tier if isinstance(owner, Host) else owner.manager.secondary_tiers[0]
    name: str = tier._chunk(key).key(tier._namespace)
    return name


Check = Callable[[Bench], Awaitable[None]]
CHECKS: dict[str, Check] = {n: f for n, f in list(globals().items()) if n.startswith("check_")}


async def run(redis_argv: list[str], redis_port: int) -> dict[str, str | None]:
    server = Server(redis_argv, redis_port)
    await server.start()
    try:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text("{}")
            async with tcp_proxy(redis_port) as proxy:
                return await results_of(CHECKS, Bench(server, proxy, Path(folder)))
    finally:
        await server.kill()
