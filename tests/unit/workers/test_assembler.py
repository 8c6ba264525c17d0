"""The assembler: what is out is final, whatever the grouping, and stop strings never leak."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.tiers import FinishReason
from workers.assembler import Assembler, Piece
from workers.sim_text import EOS, FIRST_PIECE, SimDetokenizer

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


class Run:
    """One choice, fed delta by delta, from ``pieces`` as a token table."""

    def __init__(
        self, pieces: Sequence[bytes], stop: Sequence[str] = (), min_tokens: int = 0, emitted: int = 0
    ):
        self.assembler = Assembler(
            SimDetokenizer(pieces), stop=stop, min_tokens=min_tokens, emitted_tokens=emitted
        )
        self.out: list[Piece] = []

    def push(self, ids: Sequence[int]) -> Run:
        self._note(self.assembler.push(ids))
        return self

    def finish(self, reason: FinishReason = LENGTH) -> Run:
        self._note(self.assembler.finish(reason))
        return self

    def _note(self, piece: Piece | None) -> None:
        if piece is not None:
            self.out.append(piece)

    @property
    def text(self) -> str:
        return "".join(p.text for p in self.out)

    @property
    def ids(self) -> list[int]:
        return [i for p in self.out for i in p.token_ids]


def run_words(words: Sequence[str | bytes], **options: object) -> Run:
    """Each word a token and a delta of its own; then the end by length."""
    pieces = [w.encode() if isinstance(w, str) else w for w in words]
    run = Run(pieces, **options)  # type: ignore[arg-type]
    for i in range(len(pieces)):
        run.push([FIRST_PIECE + i])
    return run.finish()


def first_stop(text: str, stops: Sequence[str]) -> int | None:
    found = [(at + len(s), at) for s in stops if (at := text.find(s)) >= 0]
    return min(found)[1] if found else None


def test_bytes_of_characters_one_per_token_come_out_as_whole_characters_A1() -> None:
    text = "👩‍💻 你好 ďábel 🇨🇿"
    run = Run([])
    for byte in text.encode():
        run.push([byte])
    run.finish()
    assert run.text == text
    assert len(run.out) == len(text)
    assert "".join(map(chr, run.ids)).encode("latin-1").decode() == text


def test_half_a_character_at_the_end_is_dropped_and_counted_A2() -> None:
    run = Run([]).push(list("👋".encode())[:3]).finish()
    assert run.out == []
    assert run.assembler.generated == 3
    assert run.assembler.finish_reason is LENGTH


def test_text_before_half_a_character_in_the_same_token_is_kept_A2() -> None:
    assert run_words([b"ab\xf0\x9f"]).text == "ab"


def test_bytes_that_are_no_utf8_become_replacement_characters_A4() -> None:
    assert run_words([b"\xe4", " ok", b"\x80", "!"]).text == "\ufffd ok\ufffd!"


def test_letters_of_a_possible_stop_string_are_held_and_flushed_without_empty_deltas_A7() -> None:
    run = run_words(["#", "#", "a", "#"], stop=["###"])
    assert [p.text for p in run.out] == ["##a", "#"]


def test_held_text_is_flushed_and_the_stop_string_never_leaks_A8() -> None:
    run = run_words(["He", "llo <to", "ol", "EN", "D", "rest"], stop=["END"])
    assert run.text == "Hello <tool"
    assert run.assembler.finish_reason is STOP


def test_a_stop_string_cuts_inside_a_token() -> None:
    run = run_words(["one tw", "o three four"], stop=["o th"])
    assert run.text == "one tw"
    run = run_words(["one", " two three"], stop=["three"])
    assert run.text == "one two "
    assert run.ids == [FIRST_PIECE, FIRST_PIECE + 1]


def test_tokens_after_a_stop_string_are_neither_out_nor_counted() -> None:
    run = Run([b"a", b"END", b"b"], ["END"]).push([FIRST_PIECE, FIRST_PIECE + 1, FIRST_PIECE + 2])
    assert (run.text, run.assembler.generated) == ("a", 2)
    assert run.finish().text == "a"
    assert run.assembler.finish_reason is STOP


def test_stop_strings_are_not_looked_for_before_min_tokens() -> None:
    assert run_words(["x", "x", "x", "x"], stop=["x"], min_tokens=2).text == "xx"
    assert run_words(["a", "b", "c"], stop=["ab"], min_tokens=1).text == "abc"


def test_end_of_sequence_is_counted_and_has_no_text_B5() -> None:
    run = Run([b"hi"]).push([FIRST_PIECE, EOS]).finish(STOP)
    assert (run.text, run.assembler.generated) == ("hi", 2)
    empty = Run([]).push([EOS]).finish(STOP)
    assert (empty.out, empty.assembler.generated, empty.assembler.finish_reason) == ([], 1, STOP)


def test_logprobs_stay_with_their_tokens() -> None:
    run = Run([b"a", b"E", b"x"], ["END"])
    assembler = run.assembler
    first = assembler.push([FIRST_PIECE], [{"token": "a"}])
    assert first is not None
    assert first.logprobs == [{"token": "a"}]
    assert assembler.push([FIRST_PIECE + 1], [{"token": "E"}]) is None
    piece = assembler.push([FIRST_PIECE + 2], [{"token": "x"}])
    assert piece is not None
    assert piece.logprobs == [{"token": "E"}, {"token": "x"}]


tokens = st.lists(
    st.one_of(
        st.text("aбE👋ND#", min_size=1, max_size=4).map(str.encode),
        st.binary(min_size=1, max_size=3),
    ),
    max_size=24,
)
stops = st.lists(st.text("aбEND#", min_size=1, max_size=4), max_size=3)
valid_tokens = st.tuples(st.text("aбE👋ND#", max_size=40), st.lists(st.integers(1, 5), max_size=60)).map(
    lambda pair: _cut_bytes(*pair)
)


def _cut_bytes(text: str, sizes: list[int]) -> list[bytes]:
    """The text's bytes as tokens of these sizes: characters are cut anywhere."""
    raw, out = text.encode(), []
    for size in [*sizes, len(raw)]:
        if raw:
            out.append(raw[: size or 1])
            raw = raw[size:]
    return out


def grouped(draw: st.DrawFn, count: int) -> list[list[int]]:
    groups: list[list[int]] = [[]]
    for i in range(count):
        if groups[-1] and draw(st.booleans()):
            groups.append([])
        groups[-1].append(FIRST_PIECE + i)
    return groups


@settings(max_examples=300)
@given(st.data(), st.one_of(tokens, valid_tokens), stops, st.integers(0, 4))
def test_text_equals_the_one_shot_decode_cut_at_the_first_stop_string(
    data: st.DataObject, pieces: list[bytes], stop: list[str], min_tokens: int
) -> None:
    """A1 A2 A4 A8: however tokens are grouped, and cut by rule at an incomplete last character."""
    run = Run(pieces, stop, min_tokens)
    draw = data.draw
    for group in grouped(draw, len(pieces)):
        run.push(group)
    run.finish()
    per_token = SimDetokenizer(pieces)
    texts = [per_token.push(FIRST_PIECE + i) for i in range(len(pieces))]
    head, tail = "".join(texts[:min_tokens]), "".join(texts[min_tokens:]) + per_token.finish()
    if len(pieces) <= min_tokens:
        head, tail = head + tail, ""
    cut = first_stop(tail, stop)
    assert run.text == head + (tail if cut is None else tail[:cut])
    assert run.assembler.finish_reason is (LENGTH if cut is None else STOP)
    assert all(p.text and p.token_ids for p in run.out)
    whole = b"".join(pieces).decode("utf-8", "replace")
    assert whole.startswith(run.text)


@settings(max_examples=300)
@given(valid_tokens, stops)
def test_nothing_out_is_the_beginning_of_a_stop_string_that_completes_later(
    pieces: list[bytes], stop: list[str]
) -> None:
    run = Run(pieces, stop)
    plain, decoded = SimDetokenizer(pieces), ""
    for i in range(len(pieces)):
        run.push([FIRST_PIECE + i])
        decoded += plain.push(FIRST_PIECE + i)
        if run.assembler.finish_reason is None:
            begun = [k for s in stop for k in range(1, len(s)) if decoded.endswith(s[:k])]
            assert len(run.text) <= len(decoded) - max(begun, default=0)
    run.finish()
    assert not any(s in run.text for s in stop)


@settings(max_examples=300)
@given(st.one_of(tokens, valid_tokens), stops, st.integers(0, 3), st.integers(0, 30))
def test_a_takeover_after_any_cut_joins_exactly_I1(
    pieces: list[bytes], stop: list[str], min_tokens: int, cut: int
) -> None:
    """I1: stop string half emitted, half a character emitted; only what is out is carried over."""
    whole = Run(pieces, stop, min_tokens)
    for i in range(len(pieces)):
        whole.push([FIRST_PIECE + i])
    whole.finish()

    first = Run(pieces, stop, min_tokens)
    for i in range(min(cut, len(pieces))):
        if first.assembler.finish_reason is None:
            first.push([FIRST_PIECE + i])
    out = len(first.ids)
    if first.assembler.finish_reason is not None:
        assert first.text == whole.text
        return
    second = Run(pieces, stop, min_tokens, emitted=out)
    for i in range(out, len(pieces)):
        second.push([FIRST_PIECE + i])
    second.finish()
    assert first.text + second.text == whole.text
    assert second.assembler.generated == whole.assembler.generated
    assert second.assembler.finish_reason is whole.assembler.finish_reason


_WORDS = [b"a", b"b", b"ab", b"<", b"<e", b"en", b"n>", b">", "é".encode(), b"\xc3", b"\xa9"]
_STOPS: list[list[str]] = [[], ["<en>"], ["ab", "b<"], ["a"], ["é<", "<en>"]]
_REPLY = st.lists(st.sampled_from(range(len(_WORDS))), max_size=12)


def moments(words: Sequence[int], stop: Sequence[str], min_tokens: int) -> tuple[list[list[int]], str]:
    """The tokens that are out at each moment at which a worker may die, and the whole text."""
    run = Run(_WORDS, stop=stop, min_tokens=min_tokens)
    found = []
    for word in words:
        run.push([FIRST_PIECE + word])
        if run.assembler.ended:
            break
        found.append(run.ids)
    return found, run.finish().text


def continued(
    emitted: Sequence[int], words: Sequence[int], stop: Sequence[str], min_tokens: int
) -> tuple[str, Run]:
    """The text that was out, and a run that goes on after it with other words."""
    detokenizer = SimDetokenizer(_WORDS)
    texts = [detokenizer.push(t) for t in emitted]
    run = Run(_WORDS)
    run.assembler = Assembler(
        SimDetokenizer(_WORDS),
        stop=stop,
        min_tokens=min_tokens,
        emitted_tokens=len(emitted),
        emitted_text="".join(texts[min_tokens:]),
    )
    for word in words:
        run.push([FIRST_PIECE + word])
    return "".join(texts), run.finish()


@given(_REPLY, st.sampled_from(_STOPS), st.integers(0, 4))
@settings(max_examples=400, deadline=None)
def test_the_same_tokens_after_a_takeover_give_the_same_text_wherever_it_was_I1(
    words: list[int], stop: list[str], min_tokens: int
) -> None:
    out, whole = moments(words, stop, min_tokens)
    for ids in out:
        text, run = continued(ids, words[len(ids) :], stop, min_tokens)
        assert text + run.text == whole


@given(_REPLY, _REPLY, st.sampled_from(_STOPS))
@settings(max_examples=400, deadline=None)
def test_other_tokens_after_a_takeover_never_complete_a_stop_string_across_the_cut_I1(
    words: list[int], others: list[int], stop: list[str]
) -> None:
    for ids in moments(words, stop, 0)[0]:
        text, run = continued(ids, others, stop, 0)
        assert first_stop(text + run.text, stop) is None


def test_a_stop_string_that_begins_in_text_that_is_out_ends_the_choice_I1() -> None:
    run = Run([b"en> more"])
    run.assembler = Assembler(SimDetokenizer([b"en> more"]), stop=["<en>"], emitted_text="a <")
    run.push([FIRST_PIECE])
    assert run.assembler.finish_reason is STOP
    assert run.text == ""
