"""What a request takes from the tier and gives to it, against a simple model of an engine."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from kv.layout import Chain, Chunk
from kv.plan import Load, RequestPlan, Save

TENANT = "t"


@dataclass
class Engine:
    """One request in an engine: what is computed, and what the plan has found, lost and saved.

    Attributes:
        kept: names of full chunks that the plan knows to be in the tier.
        tails: the same of shorter runs, and where they end.
        final: all tokens that there will be.
    """

    chance: random.Random
    block: int
    chunk: int
    prompt: int
    final: list[int]
    shared: int
    plan: RequestPlan = field(init=False)
    block_ids: list[int] = field(init=False)
    kept: set[bytes] = field(default_factory=set)
    tails: dict[bytes, int] = field(default_factory=dict)
    known: int = 0
    computed: int = 0

    def __post_init__(self) -> None:
        blocks = len(self.final) // self.block + 1
        self.block_ids = self.chance.sample(range(1_000), blocks)
        self.plan = RequestPlan(
            self.chain(), self.prompt, block_tokens=self.block, chunk_tokens=self.chunk
        )
        self.known = self.prompt

    def chain(self) -> Chain:
        return Chain(TENANT, block_tokens=self.block, chunk_tokens=self.chunk, shared_tokens=self.shared)

    @property
    def tokens(self) -> list[int]:
        return self.final[: self.known]

    def full(self, index: int) -> Chunk:
        return self.chain().full(self.final, index)

    def blocks_of(self, start: int, end: int) -> tuple[int, ...]:
        return tuple(self.block_ids[start // self.block : end // self.block])

    def look_up(self, there: set[bytes] | None = None) -> None:
        """Ask for all candidates; ``there`` is what the tier has, drawn if None."""
        asked = self.plan.candidates(self.tokens)
        self.check_candidates(asked)
        if there is None:
            likely = self.chance.choice([0.0, 0.5, 0.9, 1.0])
            present = [self.chance.random() < likely for _ in asked]
        else:
            present = [chunk.name in there for chunk in asked]
        full = self.plan.answered(present)
        found = {chunk.name for chunk, yes in zip(asked, present, strict=True) if yes}

        hit = 0
        while hit + self.chunk <= self.known and self.full(hit // self.chunk).name in found:
            hit += self.chunk
        assert full == [self.full(index) for index in range(hit // self.chunk)]
        self.kept = {chunk.name for chunk in full}
        missing = range(hit // self.chunk, self.known // self.chunk)
        assert self.plan.missing == [self.full(index) for index in missing]
        tails = [c for c in asked if not c.full and c.name in found and c.start == hit]
        if tails:
            longest = max(tails, key=lambda chunk: chunk.end)
            # Whatever is shorter is of no use any more.
            self.tails |= {c.name: c.end for c in asked if c.start == hit and c.end <= longest.end}
            hit = longest.end
        assert self.plan.hit_tokens == hit

    def check_candidates(self, asked: list[Chunk]) -> None:
        full = self.known // self.chunk
        assert asked[:full] == [self.full(index) for index in range(full)]
        assert len({chunk.name for chunk in asked}) == len(asked)
        for chunk in asked[full:]:
            assert not chunk.full
            assert chunk.start % self.chunk == 0
            assert (chunk.end - chunk.start) % self.block == 0
            assert 0 < chunk.end - chunk.start < self.chunk
            assert chunk.end <= self.known
            assert chunk == self.chain().tail(self.final, chunk.start // self.chunk, chunk.end)

    def load(self, local: int) -> None:
        """Load what was found beyond ``local`` tokens, of which some may be lost on the way."""
        self.computed = local
        hit = self.plan.hit_tokens
        if hit <= local or self.chance.random() < 0.2:
            return
        loads = self.plan.loads(local, self.block_ids)
        self.check_loads(loads, local, hit)
        self.computed = hit
        lost = self.chance.choice([None, *loads])
        if lost is not None:
            self.plan.lost(lost.chunk)
            self.computed = max(local, lost.chunk.start)
            index = lost.chunk.start // self.chunk
            self.kept = {self.full(i).name for i in range(min(index, len(self.kept)))}
            if max(self.tails.values(), default=0) > lost.chunk.start:
                self.tails = {}

    def check_loads(self, loads: list[Load], local: int, hit: int) -> None:
        at = local
        for load in loads:
            start = load.chunk.start + load.skip_blocks * self.block
            assert start == at
            assert load.block_ids == self.blocks_of(start, load.chunk.end)
            assert load.block_ids
            at = load.chunk.end
        assert at == hit

    def step(self) -> None:
        """Compute some of what is known; when all of it is, there is a new token."""
        self.computed = min(self.computed, self.known - 1)
        self.computed += self.chance.randint(1, self.known - self.computed)
        nothing = self.plan.complete(self.computed)
        saves = self.plan.saves(self.tokens, self.computed, self.block_ids)
        assert not (nothing and saves)
        self.check_saves(saves, [self.prompt] if self.computed >= self.prompt else [])
        assert self.plan.complete(self.computed)
        if self.computed == self.known:
            self.known = min(self.known + 1, len(self.final))

    def end(self) -> None:
        saves = self.plan.last_saves(self.tokens, self.computed, self.block_ids)
        self.check_saves(saves, [self.prompt, self.computed])

    def check_saves(self, saves: list[Save], ends: list[int]) -> None:
        """Only what is computed and not there, and all of that; runs end where ``ends`` say."""
        for save in saves:
            chunk = save.chunk
            assert chunk.end <= self.computed
            assert save.block_ids == self.blocks_of(chunk.start, chunk.end)
            assert chunk.name not in self.kept | self.tails.keys()
            index = chunk.start // self.chunk
            if chunk.full:
                assert chunk == self.full(index)
                self.kept.add(chunk.name)
            else:
                assert chunk.end in [end // self.block * self.block for end in ends]
                assert chunk == self.chain().tail(self.final, index, chunk.end)
                self.tails[chunk.name] = chunk.end
        full = {self.full(index).name for index in range(self.computed // self.chunk)}
        assert full <= self.kept
        for end in ends:
            self.check_tail(end // self.block * self.block)

    def check_tail(self, end: int) -> None:
        """The run of whole blocks that ends there can be found."""
        index = end // self.chunk
        if end % self.chunk and end <= self.computed:
            tail = self.chain().tail(self.final, index, end)
            assert tail.name in self.tails


@st.composite
def engines(draw: st.DrawFn) -> Engine:
    block = draw(st.integers(1, 4))
    chunk = block * draw(st.integers(1, 4))
    prompt = draw(st.integers(1, 12 * chunk))
    reply = draw(st.integers(0, 3 * chunk))
    shared = draw(st.integers(0, prompt))
    chance = draw(st.randoms(use_true_random=True))
    return Engine(chance, block, chunk, prompt, list(range(prompt + reply)), shared)


def test_runs_are_looked_for_after_each_of_the_last_full_chunks() -> None:
    chain = Chain(TENANT, block_tokens=2, chunk_tokens=6)
    plan = RequestPlan(chain, 65, block_tokens=2, chunk_tokens=6)
    runs = [(chunk.start, chunk.end) for chunk in plan.candidates(range(65)) if not chunk.full]
    starts = range(18, 60, 6)
    assert runs == [*((at, at + more) for at in starts for more in (2, 4)), (60, 62), (60, 64)]


@settings(deadline=None)
@given(engines())
def test_loads_cover_what_was_found_and_saves_all_the_rest_once(engine: Engine) -> None:
    engine.look_up()
    engine.load(engine.chance.randint(0, engine.prompt // engine.block) * engine.block)
    while engine.computed < len(engine.final):
        engine.step()
    engine.end()


@settings(deadline=None)
@given(engines(), st.floats(0, 1), st.sets(st.integers(0, 15)))
def test_a_preempted_request_loads_what_it_has_saved_and_saves_what_is_gone(
    engine: Engine, until: float, evicted: set[int]
) -> None:
    engine.look_up(set())
    while engine.computed < until * len(engine.final):
        engine.step()
    there = engine.kept | engine.tails.keys()
    there -= {engine.full(i).name for i in evicted if (i + 1) * engine.chunk <= engine.known}
    engine.look_up(there)
    engine.load(0)
    while engine.computed < len(engine.final):
        engine.step()
    engine.end()
