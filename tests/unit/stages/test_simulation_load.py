"""Loads and traces: what they say is what comes, and what is wrong with one is named."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from stages.simulation.load import LoadMaker, make_requests, requests_per_second_at_full, tenant_weights
from stages.simulation.load_spec import LoadError, LoadSpec, TierLoad, parse_load, parse_toml
from stages.simulation.presets import PRESETS
from stages.simulation.trace import read_trace

TIER = {"queue_class": "interactive", "share": 1, "prompt": {"median": 100}, "reply": {"median": 50}}
SHORT = """
seconds = 1000
per_second = 20.0
[tiers.paid]
queue_class = "interactive"
share = 3
prompt = { median = 100, sigma = 0.5, most = 1000 }
reply = { median = 50, most = 200 }
[tiers.free]
queue_class = "standard"
share = 1
prompt = { median = 100 , most = 1000}
reply = { median = 50, most = 200 }
"""


@pytest.mark.parametrize("name", list(PRESETS))
def test_every_preset_is_a_load_and_equal_seeds_give_equal_requests(name: str) -> None:
    spec = parse_load(f"{name},seconds=20")
    first = list(itertools.islice(make_requests(spec, 7), 300))
    assert first == list(itertools.islice(make_requests(spec, 7), 300))
    assert first != list(itertools.islice(make_requests(spec, 8), 300))


def test_requests_come_in_order_within_the_window_at_the_rate_and_in_the_shares_asked_for() -> None:
    requests = list(make_requests(parse_toml(SHORT), 1))
    times = [r.at_ms for r in requests]
    assert times == sorted(times)
    assert times[0] >= 0
    assert times[-1] < 1_000_000
    assert len(requests) == pytest.approx(20_000, rel=0.03)
    tiers = Counter(r.tier for r in requests)
    assert tiers["paid"] / len(requests) == pytest.approx(0.75, abs=0.02)
    assert len({r.request_id for r in requests}) == len(requests)
    assert all(r.prompt_tokens <= 1_000 and r.output_tokens <= r.max_tokens == 200 for r in requests)


def test_a_day_is_quiet_at_its_start_and_busy_in_its_middle() -> None:
    spec = parse_toml(
        SHORT.replace("seconds = 1000", "seconds = 86400\nday = 0.8", 1).replace("20.0", "0.5")
    )
    hours = Counter(int(r.at_ms // 3_600_000) for r in make_requests(spec, 1))
    assert hours[0] < 0.3 * 1_800
    assert hours[12] > 1.6 * 1_800


def test_turns_of_a_conversation_begin_with_what_was_said_before() -> None:
    spec = parse_load("overload,seconds=300,conversations.turns=4,conversations.system_tokens=512")
    talks: dict[str, list[tuple[str, ...]]] = {}
    for request in make_requests(spec, 1):
        assert request.conversation_id is not None
        assert len(request.prefix_hashes) == request.prompt_tokens // 256
        talks.setdefault(request.conversation_id, []).append(request.prefix_hashes)
        assert request.chunks[:2] == (f"{request.tenant}.0", f"{request.tenant}.1")
    assert any(len(turns) > 2 for turns in talks.values())
    for turns in talks.values():
        for before, after in itertools.pairwise(turns):
            assert after[: len(before)] == before
    assert len({turns[0][2:] for turns in talks.values() if len(turns[0]) > 2}) > 1


def test_weights_add_up_and_the_flooding_tenant_has_its_share() -> None:
    tier = TierLoad.model_validate({**TIER, "tenants": 5, "zipf": 1, "flood_share": 0.6})
    weights = tenant_weights(tier)
    assert sum(weights) == pytest.approx(1)
    assert weights[0] == pytest.approx(0.6)
    assert weights[1] == pytest.approx(weights[3] * 2)


def test_work_per_request_at_full_load_is_its_part_of_the_steps_and_its_prefill() -> None:
    spec = LoadSpec.model_validate(
        {
            "seconds": 10,
            "load": 1,
            "tiers": {
                "t": {
                    **TIER,
                    "prompt": {"median": 100, "most": 100},
                    "reply": {"median": 50, "most": 50},
                }
            },
            "workers": {"max_seqs": 10, "step_ms": 10, "decode_ms": 1, "prefill_ms": 0.5},
        }
    )
    work = LoadMaker(spec, 0).mean_conversation()
    assert (work.turns, work.prompt_tokens, work.output_tokens) == (1, 100, 50)
    assert requests_per_second_at_full(spec.workers, work) == pytest.approx(1000 / (50 * 2 + 50))


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("rush", "rush"),
        ("", "nothing"),
        ("overload,tiers.paid.shar=1", "tiers.paid.shar"),
        ("overload,load=fast", "load: load"),
        ("overload,load=0", "load: load"),
        ("overload,workers.count=0", "workers.count"),
        ("overload,seconds", "seconds: write key=value"),
        ("overload,tiers.paid.prompt.median=-1", "tiers.paid.prompt.median"),
        ("overload,tiers.paid.queue_class=vip", "tiers.paid.queue_class"),
        ("overload,workers.kv_tokens=5000", "more than workers.kv_tokens"),
    ],
)
def test_a_bad_load_is_one_line_that_names_the_key(text: str, key: str) -> None:
    with pytest.raises(LoadError) as caught:
        parse_load(text)
    assert key in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("seconds = ", "Invalid value"),
        ('preset = "rush"', "rush"),
        ('preset = "overload"\nhurry = 1', "hurry"),
        (SHORT.replace("per_second = 20.0", ""), "either load or per_second"),
        (
            SHORT.replace("per_second = 20.0", "per_second = 1.0\nload = 1.0"),
            "either load or per_second",
        ),
    ],
)
def test_a_bad_load_file_names_the_key(text: str, key: str) -> None:
    with pytest.raises(LoadError, match=key):
        parse_toml(text)


def test_a_file_can_change_a_preset_and_a_rate_replaces_its_load() -> None:
    spec = parse_toml('preset = "overload"\nper_second = 3.0\n[tiers.paid]\nshare = 9\n')
    assert (spec.load, spec.per_second) == (None, 3.0)
    assert spec.tiers["paid"].share == 9
    assert spec.tiers["paid"].reply.median == parse_load("overload").tiers["paid"].reply.median


def test_a_trace_is_read_in_order_from_its_first_request() -> None:
    lines = [
        '{"at_ms": 900, "tier": "free", "tenant": "b", "prompt_tokens": 600, "output_tokens": 9, '
        '"prefix": "house", "prefix_tokens": 256}',
        "",
        '{"at_ms": 500, "tier": "free", "tenant": "a", "prompt_tokens": 600, "output_tokens": 300, '
        '"max_tokens": 400, "conversation": "c1"}',
    ]
    first, second = read_trace(lines, ["free"], 10_000)
    assert (first.at_ms, first.tenant, first.max_tokens, first.conversation_id) == (0, "a", 400, "c1")
    assert len(first.prefix_hashes) == 2
    assert len(first.chunks) == 3
    assert (second.at_ms, second.max_tokens) == (400, 9)
    assert second.prefix_hashes[0] != second.prefix_hashes[1].replace(".1", ".0")


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("{", "line 2"),
        ('{"at_ms": 1}', "line 2: tier"),
        (
            '{"at_ms": 1, "tier": "vip", "tenant": "a", "prompt_tokens": 1, "output_tokens": 1}',
            "no tier vip",
        ),
        (
            '{"at_ms": 1, "tier": "free", "tenant": "a", "prompt_tokens": 1, "output_tokens": 1, "x": 1}',
            "line 2: x: is not a known key",
        ),
        (
            '{"at_ms": 1, "tier": "free", "tenant": "a", "prompt_tokens": 999, "output_tokens": 999}',
            "do not fit",
        ),
    ],
)
def test_a_bad_trace_names_the_line(line: str, what: str) -> None:
    with pytest.raises(LoadError, match=what):
        read_trace(["", line], ["free"], 1_000)


def test_an_empty_trace_is_refused() -> None:
    with pytest.raises(LoadError, match="no request"):
        read_trace(["", "  "], ["free"], 1_000)
