"""The watchdog that tells a consumer which has stopped from one that has nothing to do (G8)."""

from __future__ import annotations

from aiokafka import TopicPartition as Partition

from infra.kafka_watch import StallWatch

A, B = Partition("t", 0), Partition("t", 1)


def test_a_position_that_stands_still_before_the_end_is_a_stall() -> None:
    watch = StallWatch(5)
    assert watch.stalled(0, {A: 3, B: 7}, {A: 4, B: 7}) is None
    assert watch.stalled(4.9, {A: 3, B: 7}, {A: 9, B: 7}) is None
    assert watch.stalled(5, {A: 3, B: 7}, {A: 9, B: 7}) == A


def test_a_position_beyond_the_end_is_none() -> None:
    """The embedded broker states ends that are too low."""
    watch = StallWatch(5)
    watch.stalled(0, {A: 8}, {A: 3})
    assert watch.stalled(6, {A: 8}, {A: 3}) is None


def test_an_unknown_position_is_one_too() -> None:
    watch = StallWatch(5)
    watch.stalled(0, {A: None}, {A: 1})
    assert watch.stalled(6, {A: None}, {A: 1}) == A


def test_a_position_that_moves_or_has_reached_the_end_is_none() -> None:
    watch = StallWatch(5)
    for now in range(0, 60, 4):
        assert watch.stalled(now, {A: now, B: 8}, {A: 100, B: 8}) is None


def test_a_partition_held_back_meanwhile_starts_anew() -> None:
    watch = StallWatch(5)
    watch.stalled(0, {A: 3}, {A: 4})
    watch.stalled(3, {}, {})
    assert watch.stalled(6, {A: 3}, {A: 4}) is None
    assert watch.stalled(11, {A: 3}, {A: 4}) == A


def test_an_unknown_end_is_not_judged() -> None:
    watch = StallWatch(5)
    watch.stalled(0, {A: 3}, {})
    assert watch.stalled(60, {A: 3}, {}) is None
