"""Values of the tier: what was written is read, and whatever else is there is not used."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv.codec import ENCODINGS, HEADER_BYTES, Header, verified
from kv.errors import ChunkRejected

EXPECTED = Header(b"n" * 16, b"s" * 8, 64, 2, 4, (2, 16, 8), "float16", "raw", 32)
PAYLOAD = bytes(range(32))
VALUE = EXPECTED.sealed((PAYLOAD,)).pack() + PAYLOAD

headers = st.builds(
    Header,
    name=st.binary(min_size=16, max_size=16),
    namespace=st.binary(min_size=8, max_size=8),
    tokens=st.integers(0, 2**32 - 1),
    layers=st.integers(0, 2**16 - 1),
    blocks=st.integers(0, 2**16 - 1),
    block_shape=st.lists(st.integers(0, 2**32 - 1), max_size=6).map(tuple),
    dtype=st.sampled_from(
        ["float32", "float16", "bfloat16", "uint8", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz"]
    ),
    encoding=st.sampled_from(ENCODINGS),
    payload_bytes=st.integers(0, 2**64 - 1),
    checksum=st.integers(0, 2**32 - 1),
)


@settings(deadline=None)
@given(headers)
def test_a_header_is_read_as_it_was_written(header: Header) -> None:
    packed = header.pack()
    assert len(packed) == HEADER_BYTES
    assert Header.unpack(packed) == header


@settings(deadline=None)
@given(headers, st.lists(st.binary(max_size=40), max_size=4))
def test_a_payload_in_parts_is_read_as_one(header: Header, parts: list[bytes]) -> None:
    payload = b"".join(parts)
    expected = replace(header, checksum=0, payload_bytes=len(payload))
    value = memoryview(expected.sealed(parts).pack() + payload)
    assert verified(value, expected) == payload


def spoiled(at: int, what: bytes) -> bytes:
    return VALUE[:at] + what + VALUE[at + len(what) :]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b"", "truncated"),
        (VALUE[: HEADER_BYTES - 1], "truncated"),
        (spoiled(0, b"HRKX"), "format"),
        (b"\0" * len(VALUE), "format"),
        (spoiled(4, struct.pack("<H", 2)), "version"),
        (spoiled(6, bytes([len(ENCODINGS)])), "format"),
        (spoiled(7, bytes([7])), "format"),
        (VALUE[:HEADER_BYTES], "length"),
        (VALUE[:-1], "length"),
        (VALUE + b"\0", "length"),
        (VALUE[:-1] + b"\0", "checksum"),
    ],
)
def test_a_spoiled_value_is_rejected_and_says_why(value: bytes, reason: str) -> None:
    with pytest.raises(ChunkRejected) as raised:
        verified(memoryview(value), EXPECTED)
    assert raised.value.reason == reason


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (replace(EXPECTED, name=b"x" * 16), "name"),
        (replace(EXPECTED, namespace=b"x" * 8), "name"),
        (replace(EXPECTED, tokens=32), "shape"),
        (replace(EXPECTED, layers=1), "shape"),
        (replace(EXPECTED, blocks=3), "shape"),
        (replace(EXPECTED, block_shape=(2, 8, 16)), "shape"),
        (replace(EXPECTED, block_shape=(2, 16, 8, 1)), "shape"),
        (replace(EXPECTED, dtype="bfloat16"), "shape"),
        (replace(EXPECTED, encoding="fp8"), "shape"),
        (replace(EXPECTED, payload_bytes=31), "length"),
        (replace(EXPECTED, payload_bytes=33), "length"),
    ],
)
def test_a_whole_value_of_something_else_is_rejected(other: Header, reason: str) -> None:
    with pytest.raises(ChunkRejected) as raised:
        verified(memoryview(other.sealed((PAYLOAD,)).pack() + PAYLOAD), EXPECTED)
    assert raised.value.reason == reason


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e4m3fnuz"])
def test_types_of_long_names_are_told_apart(dtype: str) -> None:
    expected = replace(EXPECTED, dtype=dtype)
    value = memoryview(expected.sealed((PAYLOAD,)).pack() + PAYLOAD)
    assert verified(value, expected) == PAYLOAD
    with pytest.raises(ChunkRejected, match="shape"):
        verified(value, replace(expected, dtype=dtype[:12]))


@settings(deadline=None)
@given(st.integers(0, len(VALUE) - 1), st.integers(1, 255))
def test_no_flipped_bits_go_unnoticed(at: int, bits: int) -> None:
    """Rejected, or in a byte that nobody reads."""
    value = memoryview(spoiled(at, bytes([VALUE[at] ^ bits])))
    try:
        payload = verified(value, EXPECTED)
    except ChunkRejected:
        return
    assert payload == PAYLOAD
    assert Header.unpack(value) == EXPECTED.sealed((PAYLOAD,))


@settings(deadline=None)
@given(st.binary(max_size=3 * HEADER_BYTES))
def test_anything_else_is_rejected(value: bytes) -> None:
    with pytest.raises(ChunkRejected):
        verified(memoryview(value), EXPECTED)
