"""Who may open a websocket."""

from __future__ import annotations

import pytest

from streaming_edge.handshake import bearer_key, is_loopback, origin_allowed


@pytest.mark.parametrize(
    ("origin", "allowed", "bound_to", "expected"),
    [
        (None, [], "0.0.0.0", True),
        ("https://chat.example", ["https://chat.example"], "0.0.0.0", True),
        ("https://evil.example", ["https://chat.example"], "127.0.0.1", False),
        ("https://evil.example", [], "127.0.0.1", False),
        ("https://any.example", None, "127.0.0.1", True),
        ("https://any.example", None, "localhost", True),
        ("https://any.example", None, "0.0.0.0", False),
        ("http://edge.example:8000", None, "0.0.0.0", True),
        ("null", None, "0.0.0.0", False),
        ("http://[", None, "0.0.0.0", False),
    ],
)
def test_origins(origin: str | None, allowed: list[str] | None, bound_to: str, expected: bool) -> None:
    assert origin_allowed(origin, "edge.example:8001", allowed, bound_to) is expected


def test_a_page_without_a_host_to_compare_with_is_refused() -> None:
    assert not origin_allowed("null", None, None, "0.0.0.0")


def test_loopback() -> None:
    assert is_loopback("::1")
    assert not is_loopback("0.0.0.0")
    assert not is_loopback("edge.example")


@pytest.mark.parametrize(
    ("header", "key"),
    [(None, None), ("Bearer k", "k"), ("bearer  k ", "k"), ("Basic k", ""), ("k", ""), ("", "")],
)
def test_bearer_keys(header: str | None, key: str | None) -> None:
    assert bearer_key(header) == key
