"""The simulated worker: what it computes in jumps is what a step-by-step engine does."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.simulation.prefix_cache import ChunkStore, PrefixCache
from stages.simulation.requests import SimRequest
from stages.simulation.tier_link import TierLink
from stages.simulation.worker_model import SimWorker, WorkerModel

#: Odd times, so that no arrival falls on a step's end.
MODEL = WorkerModel(
    max_seqs=3, kv_tokens=160, step_ms=10.0137, decode_ms=0.7013, prefill_ms=0.1517, batched_tokens=24
)


def request(
    name: str, at_ms: float, prompt: int, output: int, chunks: tuple[str, ...] = ()
) -> SimRequest:
    return SimRequest(at_ms, name, "paid", "t", prompt, output, output, chunks)


def serve(
    worker: SimWorker, requests: Sequence[SimRequest], aborts: Sequence[tuple[float, str]] = ()
) -> dict[str, tuple[float, float]]:
    """First-token and end time of each request; checks the worker's bounds at every change."""
    first: dict[str, float] = {}
    ends: dict[str, tuple[float, float]] = {}
    todo = [(r.at_ms, "join", r) for r in requests] + [(at, "abort", name) for at, name in aborts]
    todo.sort(key=lambda entry: entry[0])
    clock = 0.0
    while todo or worker.next_ms is not None:
        if todo and (worker.next_ms is None or todo[0][0] <= worker.next_ms):
            at_ms, _, what = todo.pop(0)
            if isinstance(what, SimRequest):
                worker.join(what, 0, at_ms)
            else:
                worker.abort(what, at_ms)
            continue
        assert worker.next_ms is not None
        assert worker.next_ms >= clock
        clock = worker.next_ms
        changes = worker.step_ends()
        for run in changes.started:
            first.setdefault(run.request.request_id, clock)
        for run in changes.finished:
            name = run.request.request_id
            assert name not in ends
            assert run.emitted == run.request.output_tokens
            ends[name] = first[name], clock
        for run in changes.aborted:
            ends[run.request.request_id] = first.get(run.request.request_id, -1.0), clock
        assert worker.batch <= worker.model.max_seqs
        assert 0 <= worker.kv_used <= worker.model.kv_tokens
    return ends


def step_by_step(model: WorkerModel, requests: Sequence[SimRequest]) -> dict[str, tuple[float, float]]:
    """The same engine, one step after the other."""
    coming = sorted(requests, key=lambda r: r.at_ms)
    waiting: list[SimRequest] = []
    batch: list[str] = []
    by_name = {r.request_id: r for r in requests}
    out = dict.fromkeys(by_name, 0)
    left: dict[str, int] = {}
    first: dict[str, float] = {}
    ends: dict[str, tuple[float, float]] = {}
    now = 0.0

    def kv() -> int:
        return sum(by_name[n].prompt_tokens + out[n] for n in batch)

    while coming or waiting or batch:
        if not waiting and not batch:
            now = max(now, coming[0].at_ms)
        while coming and coming[0].at_ms <= now:
            waiting.append(coming.pop(0))
        while waiting and len(batch) < model.max_seqs:
            name = waiting[0].request_id
            context = waiting[0].prompt_tokens + out[name]
            if kv() + context + 1 + len(batch) > model.kv_tokens:
                break
            waiting.pop(0)
            batch.append(name)
            left[name] = context
        while len(batch) > 1 and kv() + len(batch) > model.kv_tokens:
            waiting.insert(0, by_name[batch.pop()])
        decoding = [n for n in batch if left[n] == 0]
        budget = max(1, model.batched_tokens - len(decoding))
        prefilled = 0
        for name in batch:
            taken = min(left[name], budget - prefilled)
            left[name] -= taken
            prefilled += taken
        now += model.step_ms + model.decode_ms * len(decoding) + model.prefill_ms * prefilled
        for name in list(batch):
            if left[name] == 0:
                out[name] += 1
                first.setdefault(name, now)
                if out[name] == by_name[name].output_tokens:
                    ends[name] = first[name], now
                    batch.remove(name)
    return ends


@given(
    st.lists(
        st.tuples(st.integers(0, 2_000), st.integers(1, 90), st.integers(1, 60)), min_size=1, max_size=12
    )
)
@settings(max_examples=150, deadline=None)
def test_jumps_give_the_times_of_a_step_by_step_engine(load: list[tuple[int, int, int]]) -> None:
    requests = [request(f"r{i}", float(at), p, o) for i, (at, p, o) in enumerate(load)]
    jumped = serve(SimWorker(MODEL, 0, "w"), requests)
    stepped = step_by_step(MODEL, requests)
    assert jumped.keys() == stepped.keys()
    for name, times in stepped.items():
        assert jumped[name] == pytest.approx(times, abs=1e-6)


def test_one_request_alone_takes_its_prefill_and_its_steps() -> None:
    model = WorkerModel(step_ms=10, decode_ms=2, prefill_ms=0.5, batched_tokens=100)
    ends = serve(SimWorker(model, 0, "w"), [request("r", 7.0, 250, 11)])
    # 100 + 100 + 50 prompt tokens in three steps; the third gives the first token, ten more follow.
    first = 7 + 3 * 10 + 250 * 0.5
    assert ends["r"] == pytest.approx((first, first + 10 * (10 + 2)))


def test_a_cached_prefix_is_not_computed_again() -> None:
    model = WorkerModel(step_ms=10, decode_ms=0, prefill_ms=1, batched_tokens=10_000)
    worker = SimWorker(model, 0, "w")
    chunks = ("a", "b")
    cold = serve(worker, [request("cold", 0.0, 600, 1, chunks)])
    warm = serve(worker, [request("warm", 10_000.0, 600, 1, chunks)])
    assert cold["cold"][0] == pytest.approx(10 + 600)
    assert warm["warm"][0] - 10_000 == pytest.approx(10 + 600 - 512)


PLAIN = WorkerModel(step_ms=10, decode_ms=0, prefill_ms=1, batched_tokens=10_000)


def linked(store: ChunkStore, model: WorkerModel = PLAIN, load_ms: float = 0.25) -> SimWorker:
    return SimWorker(model, 0, "w", TierLink(store, load_ms))


def test_a_worker_loads_from_the_tier_what_another_one_computed() -> None:
    store, chunks = ChunkStore(10_000), ("a", "b")
    cold = serve(linked(store), [request("cold", 0.0, 600, 1, chunks)])
    fresh = linked(store)
    warm = serve(fresh, [request("warm", 10_000.0, 600, 1, chunks)])
    assert cold["cold"][0] == pytest.approx(10 + 600)
    assert warm["warm"][0] - 10_000 == pytest.approx(512 * 0.25 + 10 + 600 - 512)
    again = serve(fresh, [request("held", 20_000.0, 600, 1, chunks)])
    assert again["held"][0] - 20_000 == pytest.approx(10 + 600 - 512)


def test_others_do_not_wait_for_a_load_and_loads_come_one_after_the_other() -> None:
    store, chunks = ChunkStore(10_000), ("a", "b")
    store.add(chunks)
    worker = linked(store)
    ends = serve(
        worker,
        [
            request("l1", 0.0, 600, 1, chunks),
            request("l2", 1.0, 600, 1, chunks),
            request("computed", 2.0, 40, 1),
        ],
    )
    assert ends["computed"][0] == pytest.approx(2 + 10 + 40)
    # The first load is there at 128 ms, the second one is behind it.
    assert ends["l1"][0] == pytest.approx(128 + 10 + 88)
    assert ends["l2"][0] == pytest.approx(max(256, 226) + 10 + 88)


def test_a_load_that_is_there_within_a_step_is_prefilled_in_the_next() -> None:
    store, chunks = ChunkStore(10_000), ("a", "b")
    store.add(chunks)
    ends = serve(
        linked(store),
        [request("decodes", 0.0, 10, 1_000), request("loads", 25.0, 600, 1, chunks)],
    )
    # Steps end at 20, 30, 40, ...: the load begins at 30 and is there at 158.
    assert ends["loads"][0] == pytest.approx(160 + 10 + 88)


def test_a_worker_tells_what_it_found_saved_and_missed_in_the_tier_once() -> None:
    store = ChunkStore(10_000)
    store.add(("a",))
    worker = linked(store)
    assert worker.tier is not None
    worker.join(request("r", 0.0, 600, 1, ("a", "b")), 0, 0.0)
    worker.step_ends()
    assert worker.tier.news() == (["a"], ["b"])
    while worker.next_ms is not None:
        worker.step_ends()
    assert worker.tier.news() == (["a", "b"], [])
    assert worker.tier.news() == ([], [])


def test_the_reply_is_in_the_tier_too_and_a_successor_finds_it() -> None:
    first = linked(ChunkStore(10_000))
    chunks = ("a", "b")
    serve(first, [request("r", 0.0, 300, 212, chunks)])
    second = first.restarted()
    assert second.worker_id != first.worker_id
    ends = serve(second, [request("next", 10_000.0, 600, 1, chunks)])
    assert ends["next"][0] - 10_000 == pytest.approx(512 * 0.25 + 10 + 600 - 512)


@given(
    st.lists(
        st.tuples(st.integers(0, 2_000), st.integers(1, 90), st.integers(1, 60)), min_size=1, max_size=8
    ),
    st.lists(st.tuples(st.integers(0, 3_000), st.integers(0, 7)), max_size=6),
    st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_aborts_lose_nothing_and_leave_no_room_taken(
    load: list[tuple[int, int, int]], aborts: list[tuple[int, int]], with_tier: bool
) -> None:
    worker = SimWorker(MODEL, 0, "w")
    requests = [request(f"r{i}", float(at), p, o) for i, (at, p, o) in enumerate(load)]
    if with_tier:
        # Prompts of some chunks, so that there is something to load; loads are slow enough to be aborted.
        store = ChunkStore(10_000)
        store.add("abcd")
        worker = linked(store, MODEL.model_copy(update={"kv_tokens": 2_000, "prefix_tokens": 0}), 0.1)
        requests = [
            r._replace(prompt_tokens=10 * r.prompt_tokens, chunks=tuple("abcd")) for r in requests
        ]
    ends = serve(worker, requests, [(at + 0.5, f"r{i}") for at, i in aborts])
    assert ends.keys() == {r.request_id for r in requests}
    assert worker.kv_used == 0
    assert worker.batch == 0
    assert not worker.runs


def test_progress_between_changes_counts_the_steps_that_are_over() -> None:
    model = WorkerModel(step_ms=10, decode_ms=0, prefill_ms=0)
    worker = SimWorker(model, 0, "w")
    worker.join(request("r", 0.0, 5, 100), 0, 0.0)
    worker.step_ends()
    assert worker.next_ms == 10
    worker.step_ends()
    assert [n for _, n in worker.progress(10.0)] == [1]
    assert [n for _, n in worker.progress(54.9)] == [5]


@given(st.lists(st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=6, unique=True), max_size=30))
def test_what_the_cache_reports_adds_up_to_what_it_holds(uses: list[list[str]]) -> None:
    cache = PrefixCache(4 * 256)
    told: set[str] = set()
    for number, chunks in enumerate(uses):
        cache.add(chunks)
        assert len(cache) <= 4
        if number % 3 == 0:
            gained, lost = cache.changes()
            told = (told | set(gained)) - set(lost)
            assert len(told) == len(cache)
            assert all(cache.cached_tokens((name,), 1_000) for name in told)


def test_the_end_of_a_prefix_goes_before_its_start() -> None:
    cache = PrefixCache(3 * 256)
    cache.add(["a", "b", "c"])
    cache.add(["x"])
    assert cache.cached_tokens(("a", "b", "c"), 1_000) == 512
