"""What workers tell: old events are read, and what newer workers add is no trouble for old schedulers."""

from __future__ import annotations

import json
import math

from contracts.worker_events import WorkerEvent

OLD = {"worker_id": "w", "slot": 3, "sent_ms": 5, "max_seqs": 8, "running": 2, "prefixes": ["p"]}


def test_an_event_of_a_worker_that_knows_of_no_tier_says_nothing_of_one() -> None:
    event = WorkerEvent.model_validate_json(json.dumps(OLD))
    assert (event.tier_prefixes, event.tier_prefixes_gone) == ([], [])
    assert (event.load_us_per_token, event.prefill_us_per_token) == (None, None)
    assert event.prefixes == ["p"]


def test_what_a_worker_tells_of_the_tier_arrives() -> None:
    event = WorkerEvent.model_validate(
        {
            **OLD,
            "tier_prefixes": ["a", "b"],
            "tier_prefixes_gone": ["c"],
            "load_us_per_token": 12.5,
            "prefill_us_per_token": 300.0,
        }
    )
    assert WorkerEvent.model_validate_json(event.model_dump_json()) == event


def test_a_field_of_a_newer_worker_is_passed_over() -> None:
    assert WorkerEvent.model_validate({**OLD, "not_yet": 1}) == WorkerEvent.model_validate(OLD)


def test_a_rate_that_is_no_number_arrives_as_not_measured() -> None:
    event = WorkerEvent.model_validate({**OLD, "load_us_per_token": math.nan})
    assert WorkerEvent.model_validate_json(event.model_dump_json()).load_us_per_token is None
