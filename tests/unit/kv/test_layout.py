from hypothesis import given
from hypothesis import strategies as st

from kv.layout import prefix_hashes

tokens = st.lists(st.integers(0, 2**31), max_size=40)


@given(tokens, tokens, st.integers(1, 8))
def test_equal_hashes_mean_equal_prefixes(a: list[int], b: list[int], chunk: int) -> None:
    for i, (x, y) in enumerate(
        zip(prefix_hashes(a, "s", chunk), prefix_hashes(b, "s", chunk), strict=False), 1
    ):
        assert (x == y) == (a[: i * chunk] == b[: i * chunk])


@given(tokens, st.integers(1, 8))
def test_only_full_chunks_have_a_hash(a: list[int], chunk: int) -> None:
    assert len(prefix_hashes(a, "s", chunk)) == len(a) // chunk


def test_n2_tenants_never_share_a_hash() -> None:
    a = list(range(512))
    assert not set(prefix_hashes(a, "t1")) & set(prefix_hashes(a, "t2"))
