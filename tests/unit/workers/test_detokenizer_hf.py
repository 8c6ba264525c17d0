"""Hugging Face tokenizers to text, on a byte-level tokenizer and a byte-fallback one made here."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from workers.detokenizer_hf import HfDetokenizer, HfVocabulary


def byte_level() -> HfVocabulary:
    """One token per byte, a few merged ones that cut characters, and a special token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate(alphabet)}
    for merged in ("Ġð", "ðŁ", "Ġo", "ok"):
        vocab[merged] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return HfVocabulary(tokenizer, silent={vocab["z"]})


def byte_fallback() -> HfVocabulary:
    """The SentencePiece way: ▁ for spaces, <0xNN> for bytes, the first space stripped."""
    vocab = {"<unk>": 0, "▁Hello": 1, "▁world": 2, "!": 3}
    vocab |= {f"<0x{b:02X}>": 4 + b for b in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return HfVocabulary(tokenizer)


BYTES = byte_level()
PIECES = byte_fallback()
_BY_BYTE = {BYTES.token_bytes(i): i for i in range(256)}


def ids_of(raw: bytes) -> list[int]:
    return [_BY_BYTE[bytes([b])] for b in raw]


def streamed(vocabulary: HfVocabulary, context: list[int], ids: list[int]) -> list[str]:
    detokenizer = HfDetokenizer(vocabulary, context)
    return [*(detokenizer.push(i) for i in ids), detokenizer.finish()]


def test_bytes_of_characters_come_out_as_whole_characters_A1() -> None:
    text = "👩‍💻 你好 ďábel 🇨🇿"
    parts = streamed(BYTES, [], ids_of(text.encode()))
    assert "".join(parts) == text
    assert not any("\ufffd" in part for part in parts)


def test_an_incomplete_character_at_the_end_is_dropped_and_text_before_it_kept_A2() -> None:
    assert "".join(streamed(BYTES, [], ids_of("👋".encode()[:3]))) == ""
    space_and_half = BYTES.tokenizer.token_to_id("Ġð")
    assert "".join(streamed(BYTES, [], [*ids_of(b"hi"), space_and_half])) == "hi "


def test_bytes_that_are_no_utf8_become_replacement_characters_and_never_raise_A4() -> None:
    assert "".join(streamed(BYTES, [], ids_of(b"\xe4 ok"))) == "\ufffd ok"
    assert "".join(streamed(BYTES, [], ids_of(b"\x80" * 9 + b"ok"))) == "\ufffd" * 9 + "ok"


def test_a_prompt_that_ends_inside_a_character_never_shows_A5() -> None:
    prompt = ids_of(b"the prompt " + "你".encode()[:2])
    assert "".join(streamed(BYTES, prompt, ids_of("你".encode()[2:] + b" ok"))) == "你 ok"
    assert "".join(streamed(BYTES, prompt, ids_of(b"ok"))).endswith("ok")
    assert "prompt" not in "".join(streamed(BYTES, prompt, ids_of(b"ok")))


def test_replacement_characters_that_are_out_do_not_come_again_after_a_takeover_I1() -> None:
    emitted = ids_of(b"ok" + b"\x80" * 4)
    assert "".join(streamed(BYTES, [], emitted)).endswith("\ufffd" * 4)
    detokenizer = HfDetokenizer(BYTES, emitted, all_out=True)
    assert "".join(detokenizer.push(i) for i in ids_of(b" more")) == " more"


def test_special_tokens_and_ends_of_sequence_have_no_text_B5() -> None:
    end = BYTES.tokenizer.token_to_id("<|end|>")
    assert "".join(streamed(BYTES, [end], [*ids_of(b"a"), end, *ids_of(b"zb"), end])) == "ab"


def test_a_space_at_the_start_of_a_continued_reply_survives() -> None:
    hello, world = 1, 2
    assert "".join(streamed(PIECES, [], [hello, world])) == "Hello world"
    assert "".join(streamed(PIECES, [hello], [world])) == " world"


def test_byte_fallback_tokens_are_joined_A1() -> None:
    ids = [1, *(4 + b for b in " 你".encode()), 3]
    assert "".join(streamed(PIECES, [], ids)) == "Hello 你!"
    assert PIECES.token_bytes(4 + 0xE4) == b"\xe4"
    assert PIECES.token_bytes(1) == b" Hello"


def test_token_bytes_are_exact_also_inside_characters() -> None:
    assert BYTES.token_bytes(BYTES.tokenizer.token_to_id("ðŁ")) == b"\xf0\x9f"
    assert BYTES.token_bytes(BYTES.tokenizer.token_to_id("<|end|>")) == b"<|end|>"
    assert BYTES.token_bytes(10_000_000) == b""


@settings(max_examples=200)
@given(st.text("aé你👋 z\n", max_size=20), st.integers(0, 30))
def test_a_continued_reply_joins_exactly_at_every_whole_character_I1(text: str, cut: int) -> None:
    raw = text.replace("z", "").encode()
    head = raw.decode()[:cut].encode()
    assert "".join(streamed(BYTES, [], ids_of(raw))) == raw.decode()
    prompt = ids_of(b"the question\n")
    rest = streamed(BYTES, [*prompt, *ids_of(head)], ids_of(raw[len(head) :]))
    assert head.decode() + "".join(rest) == raw.decode()


@pytest.mark.parametrize("size", [1, 2, 5])
@given(st.binary(max_size=30))
@settings(max_examples=100)
def test_any_bytes_end_without_an_exception_and_without_loss_of_good_text_A4(
    size: int, raw: bytes
) -> None:
    noise = raw.replace(b"z", b"")
    text = "".join(streamed(BYTES, [], ids_of(noise + b"ok" * size)))
    assert text.endswith("ok" * size)
