"""Which Redis may be the KV tier."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from redis import Redis

from infra.settings import SettingsError
from kv.fitness import require_fit
from tests.redis_servers import SERVERS, RedisServer, restartable

NOBODY = "redis://127.0.0.1:1/0"


@pytest.fixture(scope="module", params=SERVERS)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RedisServer]:
    with restartable(request.param, tmp_path_factory.mktemp(request.param)) as found:
        yield found


@pytest.fixture
def client(server: RedisServer) -> Iterator[Any]:
    """The server, fit."""
    with Redis(port=server.port) as found:
        found.config_set("maxmemory", "64mb")
        found.config_set("maxmemory-policy", "allkeys-lfu")
        yield found


@pytest.mark.parametrize("policy", ["allkeys-lfu", "allkeys-lru", "volatile-lru", "volatile-lfu"])
def test_a_cache_of_its_own_is_fit(
    server: RedisServer, client: Any, redis_url: str, policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    client.config_set("maxmemory-policy", policy)
    require_fit(server.url, redis_url)
    assert not caplog.records


def test_the_embedded_one_is_fit(cache: str, redis_url: str, caplog: pytest.LogCaptureFixture) -> None:
    require_fit(f"redis://{cache}/0", redis_url)
    assert not caplog.records


@pytest.mark.parametrize("policy", ["noeviction", "allkeys-random", "volatile-random", "volatile-ttl"])
def test_a_policy_that_does_not_keep_what_is_used_is_refused(
    server: RedisServer, client: Any, redis_url: str, policy: str
) -> None:
    client.config_set("maxmemory-policy", policy)
    with pytest.raises(SettingsError, match=rf"127\.0\.0\.1:{server.port}.*{policy}: a cache needs"):
        require_fit(server.url, redis_url)


def test_a_cache_without_a_limit_is_refused(server: RedisServer, client: Any, redis_url: str) -> None:
    client.config_set("maxmemory", 0)
    with pytest.raises(SettingsError, match="no maxmemory"):
        require_fit(server.url, redis_url)


def test_the_redis_of_the_token_streams_is_refused_however_it_is_named(
    server: RedisServer, client: Any
) -> None:
    for url in (server.url, f"redis://localhost:{server.port}/7"):
        with pytest.raises(SettingsError, match=r"token streams.*kv\.redis_url"):
            require_fit(url, server.url)


@pytest.mark.parametrize("which", ["tier", "streams"])
def test_one_that_does_not_answer_is_only_warned_about(
    which: str, server: RedisServer, client: Any, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    require_fit(*((NOBODY, redis_url) if which == "tier" else (server.url, NOBODY)))
    [record] = caplog.records
    assert (record.levelno, record.__dict__["reason"]) == (logging.WARNING, "connection")


def test_one_that_may_not_be_asked_is_only_warned_about(
    server: RedisServer, client: Any, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    client.execute_command("ACL", "SETUSER", "app", "on", ">s3cret", "~*", "+@all", "-@dangerous")
    url = server.url.replace("redis://", "redis://app:s3cret@")
    require_fit(url, redis_url)
    require_fit(url.replace("s3cret", "wr0ng"), redis_url)
    assert [record.__dict__["reason"] for record in caplog.records] == ["refused", "connection"]
    assert "s3cret" not in caplog.text


def test_no_connection_is_kept(server: RedisServer, client: Any, redis_url: str) -> None:
    require_fit(server.url, redis_url)
    names = {each["id"] for each in client.client_list()}
    require_fit(server.url, redis_url)
    assert {each["id"] for each in client.client_list()} <= names
