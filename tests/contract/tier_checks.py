"""What an engine with a KV tier must do, whatever becomes of its Redis: on real vLLM and a real Redis.

Run by ``engine_checks`` in the engine environment. Replies are greedy and in float32, so that "the same text"
can be asked for. Prompts are of random tokens; every check has its own.
"""

from __future__ import annotations

import asyncio
import random
import struct
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

from redis.asyncio import Redis

from contracts.records import Sampling
from infra.embedded import LOOPBACK, redis_answers
from kv.codec import HEADER_BYTES
from kv.layout import Chain
from tests.tcp_proxy import TcpProxy
from workers.engine_vllm import VllmEngine
from workers.protocols import EngineRequest

BLOCK = 32
CHUNK = 64
PROMPT = 2 * CHUNK + BLOCK + 8
REPLY = 6
GET = b"*2\r\n$3\r\nGET\r\n"


class Server:
    """The Redis of the tier, to be killed and started again."""

    def __init__(self, argv: Sequence[str], port: int) -> None:
        self._argv = argv
        self.port = port
        self._process: subprocess.Popen[bytes] | None = None
        self.client = Redis(port=port)

    async def start(self) -> None:
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
        self._process = await asyncio.to_thread(subprocess.Popen, self._argv, **quiet)
        async with asyncio.timeout(10):
            while not redis_answers(LOOPBACK, self.port):
                await asyncio.sleep(0.02)

    async def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait(10)
        await self.client.connection_pool.disconnect()


@dataclass
class Answer:
    token_ids: list[int]
    cached_tokens: int
    first_at: float
    last_at: float


@dataclass
class TierBench:
    """An engine whose tier is reached through a proxy."""

    engine: VllmEngine
    server: Server
    proxy: TcpProxy
    _requests: int = 0

    def prompt(self, length: int = PROMPT) -> list[int]:
        self._requests += 1
        return random.Random(self._requests).choices(range(1_000, 40_000), k=length)

    async def ask(
        self,
        prompt: Sequence[int],
        *,
        tenant: str = "a",
        emitted: Sequence[int] = (),
        shared: int = 0,
        tokens: int = REPLY,
    ) -> Answer:
        self._requests += 1
        sampling = Sampling(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        request = EngineRequest(
            f"t{self._requests}/1", prompt, tuple(emitted), sampling, 0, tenant, shared
        )
        answer = Answer([], 0, 0.0, 0.0)
        clock = asyncio.get_running_loop().time
        async with asyncio.timeout(60), aclosing(self.engine.generate(request)) as deltas:
            async for delta in deltas:
                answer.first_at = answer.first_at or clock()
                answer.last_at = clock()
                answer.token_ids += delta.token_ids
                answer.cached_tokens = delta.cached_tokens or answer.cached_tokens
        return answer

    async def forget(self) -> None:
        """Empty the engine's own prefix cache: from now on only the tier can have anything."""
        async with asyncio.timeout(10):
            while not await self.engine._llm.reset_prefix_cache():
                await asyncio.sleep(0.02)

    async def keys(self, expected: int) -> list[bytes]:
        """The keys of the tier, when there are so many."""
        async with asyncio.timeout(10):
            while len(found := await self.server.client.keys()) < expected:
                await asyncio.sleep(0.02)
        return sorted(found)

    async def stored(self, prompt: Sequence[int], tenant: str = "a") -> Answer:
        """The reply to a prompt that nobody has, whose chunks are all there is in the tier then."""
        await self.server.client.flushall()
        await self.forget()
        answer = await self.ask(prompt, tenant=tenant)
        assert answer.cached_tokens == 0
        await self.keys(len(prompt) // CHUNK + 1)
        await self.forget()
        return answer

    def count(self, name: str) -> float:
        return self.engine.tier_reports.counts.get(name, 0)

    async def counted(self, name: str, before: float) -> None:
        """Until a count has grown; reports come with the engine's steps."""
        async with asyncio.timeout(20):
            while self.count(name) <= before:
                await self.ask(self.prompt(10), tokens=2)


def whole_blocks(tokens: int) -> int:
    return tokens // BLOCK * BLOCK


async def check_a_prefix_in_the_tier_is_loaded_and_the_text_is_the_same(bench: TierBench) -> None:
    prompt = bench.prompt()
    computed, loaded = await bench.stored(prompt), bench.count("loaded_bytes")
    again = await bench.ask(prompt)
    assert again.token_ids == computed.token_ids
    assert again.cached_tokens == whole_blocks(PROMPT)
    await bench.counted("loaded_bytes", loaded)


async def check_a_longer_prompt_loads_what_it_shares(bench: TierBench) -> None:
    prompt = bench.prompt()
    await bench.stored(prompt)
    longer = [*prompt[: CHUNK + 10], *bench.prompt(80)]
    alone = await bench.ask(longer, tenant="elsewhere")
    await bench.forget()
    found = await bench.ask(longer)
    assert (found.token_ids, found.cached_tokens) == (alone.token_ids, CHUNK)


async def check_the_next_turn_finds_the_reply_too(bench: TierBench) -> None:
    prompt = bench.prompt(CHUNK - 20)
    await bench.server.client.flushall()
    first = await bench.ask(prompt, tokens=40)
    await bench.keys(2)
    await bench.forget()
    turn = [*prompt, *first.token_ids, *bench.prompt(30)]
    assert (await bench.ask(turn)).cached_tokens == CHUNK


async def check_a_continuation_loads_the_prompt(bench: TierBench) -> None:
    prompt = bench.prompt()
    whole = await bench.stored(prompt)
    rest = await bench.ask(prompt, emitted=whole.token_ids[:3])
    assert [*whole.token_ids[:3], *rest.token_ids] == whole.token_ids
    assert rest.cached_tokens == whole_blocks(PROMPT)


async def check_n1_n2_another_tenant_finds_nothing(bench: TierBench) -> None:
    prompt = bench.prompt()
    mine = await bench.stored(prompt)
    other = await bench.ask(prompt, tenant="b")
    assert (other.token_ids, other.cached_tokens) == (mine.token_ids, 0)
    await bench.forget()
    assert (await bench.ask(prompt)).cached_tokens == whole_blocks(PROMPT)


async def check_a_shareable_prompt_serves_another_tenant_up_to_its_end(bench: TierBench) -> None:
    prompt = bench.prompt()
    await bench.server.client.flushall()
    mine = await bench.ask(prompt, shared=CHUNK + 5)
    await bench.keys(3)
    await bench.forget()
    other = await bench.ask(prompt, tenant="b", shared=CHUNK + 5)
    assert (other.token_ids, other.cached_tokens) == (mine.token_ids, CHUNK)
    await bench.forget()
    undeclared = await bench.ask(prompt, tenant="c")
    assert undeclared.cached_tokens == 0


async def check_a_preempted_reply_goes_on_with_the_same_text(bench: TierBench) -> None:
    prompt = bench.prompt()
    whole = await bench.ask(prompt, tenant="elsewhere", tokens=40)
    await bench.stored(prompt)
    asking = asyncio.create_task(bench.ask(prompt, tokens=40))
    for _ in range(3):
        await asyncio.sleep(0.2)
        await bench.engine._llm.reset_prefix_cache(reset_running_requests=True)
    assert (await asking).token_ids == whole.token_ids


async def check_h8_a_dead_redis_costs_nothing_but_time(bench: TierBench) -> None:
    prompt = bench.prompt()
    computed = await bench.stored(prompt)
    await bench.server.kill()
    for _ in range(2):
        answer = await bench.ask(prompt)
        assert (answer.token_ids, answer.cached_tokens) == (computed.token_ids, 0)
        await bench.forget()
    await bench.server.start()
    async with asyncio.timeout(30):
        while not (await bench.ask(prompt)).cached_tokens:
            await asyncio.sleep(0.3)
            await bench.forget()


async def check_a_slow_redis_is_not_waited_for(bench: TierBench) -> None:
    prompt = bench.prompt()
    computed, failures = await bench.stored(prompt), bench.count("lookup_failed_timeout")
    bench.proxy.delay_seconds = 0.5
    try:
        answer = await bench.ask(prompt)
    finally:
        bench.proxy.delay_seconds = 0.0
    assert (answer.token_ids, answer.cached_tokens) == (computed.token_ids, 0)
    await bench.counted("lookup_failed_timeout", failures)


async def check_an_aborted_load_gives_its_blocks_back(bench: TierBench) -> None:
    prompt = bench.prompt()
    computed = await bench.stored(prompt)
    bench.proxy.delay_seconds = 0.06
    asking = asyncio.create_task(bench.ask(prompt))
    await asyncio.sleep(0.2)
    asking.cancel()
    await asyncio.wait([asking])
    bench.proxy.delay_seconds = 0.0
    await bench.forget()  # which fails as long as blocks are in use
    assert (await bench.ask(prompt)).token_ids == computed.token_ids


async def check_a_chunk_that_is_evicted_before_it_is_read_is_computed(bench: TierBench) -> None:
    prompt = bench.prompt()
    computed = await bench.stored(prompt)
    failures = bench.count("load_failed_evicted")

    async def evict(data: bytes) -> None:
        if data.startswith(GET):
            await bench.server.client.flushall()

    bench.proxy.before = evict
    try:
        answer = await bench.ask(prompt)
    finally:
        bench.proxy.before = None
    assert answer.token_ids == computed.token_ids
    await bench.counted("load_failed_evicted", failures)
    await bench.keys(PROMPT // CHUNK + 1)  # computed, it is saved again


async def check_a_full_redis_that_evicts_nothing_refuses_and_all_goes_on(bench: TierBench) -> None:
    await bench.server.client.flushall()
    prompt, refused = bench.prompt(), bench.count("save_dropped_full")
    async with configured(bench.server.client, {"maxmemory": "1", "maxmemory-policy": "noeviction"}):
        first = await bench.ask(prompt)
        await bench.counted("save_dropped_full", refused)
        await bench.forget()
        again = await bench.ask(prompt)
    assert (again.token_ids, again.cached_tokens) == (first.token_ids, 0)
    await until_saving_works(bench)


async def check_a_redis_that_evicts_all_the_time_only_costs_hits(bench: TierBench) -> None:
    """Room for about one chunk: what is saved drives out what was."""
    await bench.server.client.flushall()
    prompt = bench.prompt()
    async with configured(bench.server.client, {"maxmemory": "6mb"}):
        answers = []
        for _ in range(3):
            answers.append(await bench.ask(prompt))
            await bench.forget()
    assert answers[0].token_ids == answers[1].token_ids == answers[2].token_ids


async def check_a_corrupted_value_is_not_used(bench: TierBench) -> None:
    await _spoiled(bench, "checksum", lambda value: value[:-1] + bytes([value[-1] ^ 1]))


async def check_a_value_of_another_version_is_not_used(bench: TierBench) -> None:
    await _spoiled(bench, "version", lambda value: value[:4] + struct.pack("<H", 99) + value[6:])


async def check_a_value_of_another_shape_is_not_used(bench: TierBench) -> None:
    dims = 52  #: where the header has the block's shape
    await _spoiled(bench, "shape", lambda v: v[:dims] + struct.pack("<I", 4) + v[dims + 4 :])


async def check_a_cut_value_is_not_used(bench: TierBench) -> None:
    await _spoiled(bench, "length", lambda value: value[: HEADER_BYTES + 1_000])


async def check_what_is_no_value_of_ours_is_not_used(bench: TierBench) -> None:
    await _spoiled(bench, "truncated", lambda _: b"")


async def _spoiled(bench: TierBench, reason: str, spoil: Callable[[bytes], bytes]) -> None:
    """Spoil the second chunk: the first one is loaded, the rest computed, and saved again."""
    prompt = bench.prompt()
    computed = await bench.stored(prompt)
    failures = bench.count(f"load_failed_{reason}")
    name = Chain("a", block_tokens=BLOCK, chunk_tokens=CHUNK).full(prompt, 1).name.hex()
    (second,) = [key for key in await bench.keys(3) if key.endswith(name.encode())]
    value = await bench.server.client.get(second)
    await bench.server.client.set(second, spoil(value))
    answer = await bench.ask(prompt)
    assert answer.token_ids == computed.token_ids
    await bench.counted(f"load_failed_{reason}", failures)
    async with asyncio.timeout(10):
        while not _same(await bench.server.client.get(second), value):
            await asyncio.sleep(0.05)


def _same(one: bytes | None, other: bytes) -> bool:
    """Computed anew in other steps, the blocks may differ in their last bits."""
    return one is not None and len(one) == len(other) and one[:44] == other[:44]


async def check_a_load_does_not_hold_up_other_requests(bench: TierBench) -> None:
    prompt = bench.prompt()
    computed = await bench.stored(prompt)
    bench.proxy.delay_seconds = 0.04
    asked = asyncio.Event()

    async def slow_down(data: bytes) -> None:
        if data.startswith(GET):
            asked.set()
            bench.proxy.delay_seconds = 0.7

    bench.proxy.before = slow_down
    try:
        asking = asyncio.create_task(bench.ask(prompt))
        await asyncio.wait_for(asked.wait(), 10)
        other = await bench.ask(bench.prompt(8), tokens=4)
        loaded = await asking
    finally:
        bench.proxy.before, bench.proxy.delay_seconds = None, 0.0
    assert (loaded.token_ids, loaded.cached_tokens) == (computed.token_ids, whole_blocks(PROMPT))
    assert other.last_at < loaded.first_at


async def check_what_is_slower_to_load_is_computed(bench: TierBench) -> None:
    """Of the last two checks, as what was measured stays in the engine for a while."""
    prompt = bench.prompt()
    computed = await bench.stored(prompt)
    instead = bench.count("computed_instead_tokens")

    async def slow_down(data: bytes) -> None:
        bench.proxy.delay_seconds = 1.2 if data.startswith(GET) else 0.0

    bench.proxy.before = slow_down
    try:
        async with asyncio.timeout(60):
            while bench.count("computed_instead_tokens") <= instead:
                assert (await bench.ask(prompt)).token_ids == computed.token_ids
                await bench.forget()
    finally:
        bench.proxy.before, bench.proxy.delay_seconds = None, 0.0


@asynccontextmanager
async def configured(client: Redis, options: dict[str, str]) -> AsyncIterator[None]:
    before = {name: (await client.config_get(name))[name] for name in options}
    for name, value in options.items():
        await client.config_set(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            await client.config_set(name, value)


async def until_saving_works(bench: TierBench) -> None:
    """Saving pauses after failures, and longer after more of them."""
    async with asyncio.timeout(30):
        while not await bench.server.client.keys():
            await bench.ask(bench.prompt(CHUNK + 10), tokens=2)
            await asyncio.sleep(0.3)


Check = Callable[[TierBench], Awaitable[None]]
#: In this order.
CHECKS: dict[str, Check] = {n: f for n, f in list(globals().items()) if n.startswith("check_")}
