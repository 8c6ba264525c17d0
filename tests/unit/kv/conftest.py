"""Real Redis for the tests of the KV tier.

``cache``    host:port of one embedded Redis as a cache (session)
``tier``     a client of it, with an empty database (session's server)
``proxy``    a proxy before it
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from redis import Redis

from infra.embedded import embedded_cache
from tests.tcp_proxy import TcpProxy, tcp_proxy


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with embedded_cache(tmp_path_factory.mktemp("cache"), memory_mib=256) as address:
        yield address


@pytest.fixture
def tier(cache: str) -> Iterator[Redis]:
    with Redis.from_url(f"redis://{cache}/0") as client:
        client.flushdb()
        yield client


@pytest.fixture
async def proxy(cache: str) -> AsyncIterator[TcpProxy]:
    async with tcp_proxy(int(cache.rpartition(":")[2])) as made:
        yield made
