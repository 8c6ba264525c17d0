"""What a worker says of the prefixes in its cache."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kv.layout import CHUNK_TOKENS
from workers.prefix_memory import PrefixMemory, PrefixNews

EVERYTHING = 10_000


def memory(chunks: int) -> PrefixMemory:
    return PrefixMemory(chunks * CHUNK_TOKENS)


class Listener:
    """A scheduler that folds what it hears."""

    def __init__(self) -> None:
        self.believes: set[str] = set()

    def hear(self, news: PrefixNews) -> None:
        self.believes |= set(news.come)
        self.believes -= set(news.gone)


prompts = st.tuples(st.integers(0, 5), st.integers(0, 6)).map(
    lambda p: [f"{p[0]}/{i}" for i in range(p[1])]
)
steps = st.lists(st.one_of(prompts, st.just("tell"), st.just("fail"), st.just("refresh")), max_size=60)


@settings(deadline=None)
@given(steps, st.integers(0, 8), st.integers(1, 5))
def test_it_is_bounded_and_what_was_told_adds_up_to_what_is_held(
    steps: list[list[str] | str], chunks: int, limit: int
) -> None:
    held, listener = memory(chunks), Listener()
    for step in steps:
        match step:
            case "tell":
                news = held.take_news(limit)
                assert len(news.come) + len(news.gone) <= limit
                assert not set(news.come) & set(news.gone)
                listener.hear(news)
            case "fail":
                held.untold(held.take_news(limit))
            case "refresh":
                held.tell_all()
            case prompt:
                held.prefilled(prompt)  # type: ignore[arg-type]
        assert len(held) <= chunks
    listener.hear(held.take_news(EVERYTHING))
    assert len(listener.believes) == len(held)
    assert all(prefix in held for prefix in listener.believes)


def test_news_is_told_once() -> None:
    held = memory(4)
    held.prefilled(["a", "b"])
    assert held.take_news(EVERYTHING) == PrefixNews(["b", "a"], [])
    held.prefilled(["a", "b"])
    assert held.take_news(EVERYTHING) == PrefixNews([], [])


def test_an_event_that_may_have_arrived_is_taken_back_when_its_prefix_is_forgotten() -> None:
    held, listener = memory(1), Listener()
    held.prefilled(["a"])
    news = held.take_news(EVERYTHING)
    listener.hear(news)  # it arrived, but the worker was told otherwise
    held.untold(news)
    held.prefilled(["b"])
    listener.hear(held.take_news(EVERYTHING))
    assert listener.believes == {"b"}


def test_the_end_of_a_prompt_is_forgotten_before_its_start() -> None:
    held = memory(3)
    held.prefilled(["a", "b", "c"])
    held.prefilled(["x"])
    assert [p in held for p in ("a", "b", "c", "x")] == [True, True, False, True]


def test_a_prompt_longer_than_the_cache_is_known_by_its_start() -> None:
    held = memory(2)
    held.prefilled(["a", "b", "c"])
    assert [p in held for p in ("a", "b", "c")] == [True, True, False]


def test_who_comes_late_is_told_all_beginning_with_what_was_used_last() -> None:
    held, late = memory(4), Listener()
    for prefix in "abcd":
        held.prefilled([prefix])
    held.take_news(EVERYTHING)
    held.tell_all()
    first = held.take_news(2)
    assert first.come == ["d", "c"]
    late.hear(first)
    late.hear(held.take_news(2))
    assert late.believes == set("abcd")
