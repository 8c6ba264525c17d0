"""Names and keys of chunks: equal exactly where the blocks are exchangeable."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.crc import key_slot

from kv import layout
from kv.layout import CHUNK_TOKENS, CHUNKS_PER_NODE, Chain, Chunk, Namespace, prefix_hashes

token = st.integers(0, 2**32 - 1)
tokens = st.lists(token, max_size=40)
#: Two sequences that begin alike.
pairs = st.tuples(tokens, tokens, tokens).map(lambda parts: (parts[0] + parts[1], parts[0] + parts[2]))
sizes = st.tuples(st.integers(1, 3), st.integers(1, 4)).map(lambda each: (each[0], each[0] * each[1]))
#: What may be in a tenant's name: separators of keys, hash tags, line ends, look-alikes.
ODD_TENANTS = [
    "a", "a:b", "b", "a:b:c", ":", "", " ", "a ", "A", "a\n", "a\nb", "a\0", "a{b}", "{a}", "}{", "{}",
    "а",  # Cyrillic
    "\u00e1", "a\u0301",  # composed and not
    "ａ", "\u202ea", "a\u200b", "👩‍💻",
]  # fmt: skip
NAMESPACE = Namespace("m", "r1", "0" * 16, "float16", "NHD", 16, 256)


def runs(
    sequence: Sequence[int], block: int, chunk: int, tenant: str = "t", shared: int = 0
) -> Iterator[Chunk]:
    """Every chunk a sequence has, in the order in which it would grow into them."""
    chain = Chain(tenant, block_tokens=block, chunk_tokens=chunk, shared_tokens=shared)
    for end in range(block, len(sequence) + 1, block):
        index = end // chunk
        yield (chain.full(sequence, index - 1) if end % chunk == 0 else chain.tail(sequence, index, end))


@settings(deadline=None)
@given(pairs, sizes)
def test_equal_names_mean_equal_tokens_from_the_start(
    pair: tuple[list[int], list[int]], size: tuple[int, int]
) -> None:
    one, other = pair
    for a, b in zip(runs(one, *size), runs(other, *size), strict=False):
        assert (a.name == b.name) == (one[: a.end] == other[: b.end])


@settings(deadline=None)
@given(tokens, sizes)
def test_all_names_of_a_sequence_differ(sequence: list[int], size: tuple[int, int]) -> None:
    names = [chunk.name for chunk in runs(sequence, *size)]
    assert len(set(names)) == len(names)


@settings(deadline=None)
@given(tokens, sizes, st.integers(0, 50))
def test_a_sequence_that_grows_is_named_as_if_it_came_at_once(
    sequence: list[int], size: tuple[int, int], shared: int
) -> None:
    block, chunk = size
    growing = Chain("t", block_tokens=block, chunk_tokens=chunk, shared_tokens=shared)
    for end in range(block, len(sequence) + 1, block):
        at_once = Chain("t", block_tokens=block, chunk_tokens=chunk, shared_tokens=shared)
        index, rest = divmod(end, chunk)
        known = sequence[:end]
        if rest:
            assert growing.tail(known, index, end) == at_once.tail(sequence, index, end)
        else:
            assert growing.full(known, index - 1) == at_once.full(sequence, index - 1)


@settings(deadline=None)
@given(tokens, sizes, st.integers(0, 50))
def test_tenants_share_the_whole_chunks_of_a_shareable_prompt_and_nothing_else(
    sequence: list[int], size: tuple[int, int], shared: int
) -> None:
    one, other = [list(runs(sequence, *size, tenant, shared)) for tenant in ("t1", "t2")]
    for a, b in zip(one, other, strict=True):
        assert (a.name == b.name) == (a.full and a.end <= shared)
    assert not {c.name for c in one} & {c.name for c in other} - {
        c.name for c in one if c.full and c.end <= shared
    }


@settings(deadline=None)
@given(tokens, sizes, st.integers(1, 50))
def test_a_prompt_that_is_not_declared_shareable_finds_nothing_shared(
    sequence: list[int], size: tuple[int, int], shared: int
) -> None:
    """So that its tenant cannot tell whether the prompt is in use."""
    declared, own = [{c.name for c in runs(sequence, *size, "t", each)} for each in (shared, 0)]
    assert declared == own if shared < size[1] else not declared & own


@settings(deadline=None)
@given(st.lists(token, min_size=1, max_size=40), st.text(), st.text())
def test_n4_tenants_have_no_name_in_common(sequence: list[int], one: str, other: str) -> None:
    names = [{c.name for c in runs(sequence, 1, 2, tenant)} for tenant in (one, other)]
    assert names[0] == names[1] if one == other else not names[0] & names[1]


def test_n4_odd_tenants_collide_neither_in_names_nor_in_keys() -> None:
    sequence = list(range(8))
    keys = [c.key(b"\0" * 8) for tenant in ODD_TENANTS for c in runs(sequence, 2, 4, tenant)]
    assert len(set(keys)) == len(ODD_TENANTS) * 4


@settings(deadline=None)
@given(st.lists(token, min_size=1, max_size=60), st.one_of(st.sampled_from(ODD_TENANTS), st.text()))
def test_n4_keys_have_one_hash_tag_and_nothing_of_the_tenant(sequence: list[int], tenant: str) -> None:
    for chunk in runs(sequence, 1, 2, tenant):
        assert re.fullmatch(r"kv:\{[0-9a-f]{16}\}:[0-9a-f]{16}:[0-9a-f]{32}", chunk.key(b"\1" * 8))


@settings(deadline=None)
@given(st.lists(token, min_size=1, max_size=80), sizes, st.integers(0, 50))
def test_chunks_of_a_group_are_on_one_node(
    sequence: list[int], size: tuple[int, int], shared: int
) -> None:
    slots: dict[int, set[int]] = {}
    tags: dict[int, set[str]] = {}
    for chunk in runs(sequence, *size, shared=shared):
        group = chunk.start // size[1] // CHUNKS_PER_NODE
        slots.setdefault(group, set()).add(key_slot(chunk.key(NAMESPACE.digest()).encode()))
        tags.setdefault(group, set()).add(chunk.tag)
    assert {len(each) for each in slots.values()} | {len(each) for each in tags.values()} <= {1}


def test_groups_and_tenants_spread_over_nodes() -> None:
    sequence = list(range(2 * CHUNKS_PER_NODE))
    tags = [{c.tag for c in runs(sequence, 1, 1, tenant)} for tenant in ("a", "b")]
    assert len(tags[0] | tags[1]) == 4


@pytest.mark.parametrize("field", [each.name for each in dataclasses.fields(Namespace)])
def test_n2_every_field_of_the_namespace_changes_its_keys(field: str) -> None:
    value = getattr(NAMESPACE, field)
    other = dataclasses.replace(NAMESPACE, **{field: value + (1 if isinstance(value, int) else "x")})
    assert other.digest() != NAMESPACE.digest()
    (chunk,) = runs([1], 1, 1)
    assert chunk.key(other.digest()) != chunk.key(NAMESPACE.digest())


def test_n2_another_format_finds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = NAMESPACE.digest()
    monkeypatch.setattr(layout, "FORMAT", layout.FORMAT + 1)
    assert NAMESPACE.digest() != before


def test_n4_namespaces_do_not_collide_where_a_field_ends() -> None:
    ends = [("a", "b:c"), ("a:b", "c"), ('a","b', "c"), ("a", 'b","c')]
    made = [dataclasses.replace(NAMESPACE, model=model, revision=rest) for model, rest in ends]
    assert len({namespace.digest() for namespace in made}) == len(ends)


def test_names_are_what_other_processes_and_machines_compute() -> None:
    """A change of these needs another ``FORMAT``, or else it finds what is not its own."""
    own, shared = [Chain("t", block_tokens=16, shared_tokens=each) for each in (0, CHUNK_TOKENS)]
    tokens = range(CHUNK_TOKENS)
    assert [
        chunk.key(NAMESPACE.digest()) for chunk in (own.full(tokens, 0), own.tail(tokens, 0, 32))
    ] == [
        "kv:{f46692b83160fbad}:35d742ca72a43a8a:c7fedf60857d4234bd3bb0be790f629c",
        "kv:{f46692b83160fbad}:35d742ca72a43a8a:820bb95a7037eba178ee58215b839128",
    ]
    assert shared.full(tokens, 0).name.hex() == "dc458c653bd12c5e2628a89943b8eab5"


@settings(deadline=None)
@given(tokens, tokens, st.integers(1, 8))
def test_equal_hashes_mean_equal_prefixes(a: list[int], b: list[int], chunk: int) -> None:
    hashes = [prefix_hashes(each, "s", chunk_tokens=chunk) for each in (a, b)]
    for i, (x, y) in enumerate(zip(*hashes, strict=False), 1):
        assert (x == y) == (a[: i * chunk] == b[: i * chunk])


@settings(deadline=None)
@given(tokens, st.integers(1, 8))
def test_only_full_chunks_have_a_hash(a: list[int], chunk: int) -> None:
    assert len(prefix_hashes(a, "s", chunk_tokens=chunk)) == len(a) // chunk


def test_n2_tenants_never_share_a_hash() -> None:
    a = list(range(512))
    assert not set(prefix_hashes(a, "t1")) & set(prefix_hashes(a, "t2"))


@settings(deadline=None)
@given(tokens, sizes, st.integers(0, 50))
def test_routing_knows_full_chunks_by_the_engines_names(
    sequence: list[int], size: tuple[int, int], shared: int
) -> None:
    hashes = prefix_hashes(sequence, "t", chunk_tokens=size[1], shared_tokens=shared)
    full = [chunk for chunk in runs(sequence, *size, shared=shared) if chunk.full]
    assert hashes == [chunk.name.hex() for chunk in full]
