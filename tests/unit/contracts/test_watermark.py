from hypothesis import given
from hypothesis import strategies as st

from contracts.watermark import Watermark


def test_g4_a_slow_first_record_holds_the_position_back() -> None:
    mark = Watermark()
    for offset in range(1, 6):
        mark.take(offset)
    for offset in (2, 3, 5):
        mark.done(offset)
    assert mark.position == 1
    mark.done(1)
    assert mark.position == 4
    mark.done(4)
    assert mark.position == 6


@given(st.data())
def test_g4_the_position_never_passes_an_unfinished_record(data: st.DataObject) -> None:
    offsets = sorted(data.draw(st.sets(st.integers(0, 60), min_size=1)))
    order = data.draw(st.permutations(offsets))
    cut = data.draw(st.integers(0, len(order)))
    mark = Watermark()
    for offset in offsets:
        mark.take(offset)
    for offset in order[:cut]:
        mark.done(offset)
    unfinished = set(order[cut:])
    assert mark.position == (min(unfinished) if unfinished else offsets[-1] + 1)
    assert mark.in_flight >= len(unfinished)


def test_a_record_seen_again_is_not_taken_twice() -> None:
    mark = Watermark()
    mark.take(7)
    mark.done(7)
    mark.take(7)
    assert mark.position == 8
    assert mark.in_flight == 0


def test_a_position_is_due_once() -> None:
    mark = Watermark()
    assert mark.commit_due() is None
    mark.take(0)
    mark.done(0)
    assert mark.commit_due() == 1
    mark.committed(1)
    assert mark.commit_due() is None


def test_a_finished_mark_for_a_record_never_taken_changes_nothing() -> None:
    mark = Watermark()
    mark.take(3)
    mark.done(9)
    assert mark.position == 3
    mark.done(3)
    assert mark.position == 4
