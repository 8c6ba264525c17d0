"""The store on a real Redis cluster, whose keys move and whose nodes die."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import pytest
from redis import Redis
from redis.crc import key_slot

from infra.embedded import LOOPBACK, free_port
from infra.settings import SettingsError
from kv.errors import TierUnavailable
from kv.fitness import require_fit
from kv.layout import Chain
from kv.store import ChunkStore
from tests.redis_servers import RedisServer, restartable
from tests.stack_process import eventually

SECONDS = 5.0
TTL_MS = 60_000
LAST_SLOT = 16_383


class Cluster:
    """Two primaries, each with half of the slots."""

    def __init__(self, servers: list[RedisServer], bus_port: int) -> None:
        self.servers = servers
        self.url = servers[0].url
        self.nodes: list[Any] = [Redis(port=server.port, decode_responses=True) for server in servers]
        self._ids = [node.execute_command("CLUSTER MYID") for node in self.nodes]
        middle = LAST_SLOT // 2
        self.nodes[0].execute_command("CLUSTER ADDSLOTSRANGE", 0, middle)
        self.nodes[1].execute_command("CLUSTER ADDSLOTSRANGE", middle + 1, LAST_SLOT)
        self.nodes[0].execute_command("CLUSTER MEET", LOOPBACK, servers[1].port, bus_port)
        eventually(lambda: all(map(self._is_well, self.nodes)), 30, "the cluster covers all slots")

    def _is_well(self, node: Any) -> bool:
        return bool(node.cluster("INFO")["cluster_state"] == "ok")

    def node_of(self, slot: int) -> int:
        return int(slot > LAST_SLOT // 2)

    def move(self, slot: int, to: int) -> None:
        """Give a slot, in which nothing is stored, to the other node."""
        for node in (self.nodes[to], self.nodes[1 - to]):
            node.execute_command("CLUSTER SETSLOT", slot, "NODE", self._ids[to])


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with ExitStack() as stack:
        servers, bus_ports = [], [free_port(), free_port()]
        for bus_port in bus_ports:
            options = {
                "cluster-enabled": "yes",
                "cluster-port": str(bus_port),
                "maxmemory": "64mb",
                "maxmemory-policy": "allkeys-lfu",
            }
            folder = tmp_path_factory.mktemp("node")
            servers.append(stack.enter_context(restartable("valkey", folder, options)))
        yield Cluster(servers, bus_ports[1])


@pytest.fixture
def store(cluster: Cluster) -> Iterator[ChunkStore]:
    for node in cluster.nodes:
        node.flushall()
    with closing(ChunkStore(cluster.url, connections=2, cluster=True)) as made:
        yield made


def keys(count: int) -> list[str]:
    """Keys of the first chunks of prompts, which spread over the nodes."""
    chains = [Chain(str(i), block_tokens=1, chunk_tokens=2) for i in range(count)]
    return [chain.full([1, 2], 0).key(b"\0" * 8) for chain in chains]


def read(store: ChunkStore, key: str) -> bytes | None:
    buffer = bytearray(100)
    size = store.read(key, memoryview(buffer), SECONDS)
    return None if size is None else bytes(buffer[:size])


def test_each_key_has_its_value_whichever_node_it_is_on(store: ChunkStore, cluster: Cluster) -> None:
    for key in keys(40):
        store.write(key, (key.encode(), b"!"), TTL_MS, SECONDS)
    assert all(node.dbsize() for node in cluster.nodes)
    assert [read(store, key) for key in keys(50)] == [
        *(f"{k}!".encode() for k in keys(40)),
        *[None] * 10,
    ]
    assert store.touch(keys(50), TTL_MS, SECONDS) == [True] * 40 + [False] * 10
    store.delete(keys(1)[0], SECONDS)
    assert store.touch(keys(2), TTL_MS, SECONDS) == [False, True]


def test_all_of_its_nodes_say_what_they_are(store: ChunkStore, cluster: Cluster) -> None:
    infos = dict(store.infos(SECONDS))
    assert set(infos) == {f"{LOOPBACK}:{server.port}" for server in cluster.servers}
    assert len({info["run_id"] for info in infos.values()}) == 2


@contextmanager
def moved(cluster: Cluster, key: str) -> Iterator[Any]:
    """For the length of a block, the key is on the other node; yields that."""
    slot = key_slot(key.encode())
    home = cluster.node_of(slot)
    away = cluster.nodes[1 - home]
    cluster.move(slot, 1 - home)
    try:
        yield away
    finally:
        away.delete(key)
        cluster.move(slot, home)


@pytest.mark.parametrize("first", ["read", "write"])
def test_keys_that_have_moved_are_found_after_one_refusal(
    store: ChunkStore, cluster: Cluster, first: str
) -> None:
    key = keys(1)[0]
    assert read(store, key) is None
    calls: dict[str, Callable[[], object]] = {
        "read": lambda: read(store, key),
        "write": lambda: store.write(key, (b"again",), TTL_MS, SECONDS),
    }
    with moved(cluster, key) as away:
        away.set(key, "moved")
        with pytest.raises(TierUnavailable, match="refused"):
            calls[first]()
        assert read(store, key) == b"moved"
        calls["write"]()
        assert read(store, key) == b"again"


def test_a_lookup_follows_keys_that_have_moved(store: ChunkStore, cluster: Cluster) -> None:
    key, *others = keys(10)
    store.write(others[0], (b"x",), TTL_MS, SECONDS)
    with moved(cluster, key) as away:
        away.set(key, "moved")
        assert store.touch([key, *others], TTL_MS, SECONDS) == [True, True] + [False] * 8
        assert read(store, key) == b"moved"


def test_a_cluster_of_which_nobody_answers_is_no_answer() -> None:
    with closing(ChunkStore("redis://127.0.0.1:1/0", connections=1, cluster=True)) as store:
        for call in (
            lambda: store.touch(["k"], TTL_MS, SECONDS),
            lambda: read(store, "k"),
            lambda: store.write("k", (b"x",), TTL_MS, SECONDS),
            lambda: store.delete("k", SECONDS),
            lambda: store.infos(SECONDS),
        ):
            with pytest.raises(TierUnavailable, match="connection"):
                call()


def test_a_server_that_is_no_cluster_is_no_answer(cache: str) -> None:
    store = ChunkStore(f"redis://{cache}/0", connections=1, cluster=True)
    with closing(store), pytest.raises(TierUnavailable, match="connection"):
        store.touch(["k"], TTL_MS, SECONDS)


def test_a_cluster_is_fit_if_all_its_nodes_are(cluster: Cluster, redis_server: str) -> None:
    streams = f"redis://{redis_server}/0"
    require_fit(cluster.url, streams, cluster=True)
    for node, server in zip(cluster.nodes, cluster.servers, strict=True):
        node.config_set("maxmemory-policy", "noeviction")
        with pytest.raises(SettingsError, match=rf"{server.port}.*noeviction"):
            require_fit(cluster.url, streams, cluster=True)
        node.config_set("maxmemory-policy", "allkeys-lfu")
    require_fit(cluster.url, streams, cluster=True)


def test_a_dead_node_costs_no_keys_but_its_own(store: ChunkStore, cluster: Cluster) -> None:
    """Even the one that the URL names, as the others are known by then. The last test: it stays dead."""
    for node in cluster.nodes:
        node.config_set("cluster-require-full-coverage", "no")
    for key in keys(40):
        store.write(key, (key.encode(),), TTL_MS, SECONDS)
    cluster.servers[0].kill()
    outcomes = [_try(store, key) for key in keys(40)]
    on_dead = [cluster.node_of(key_slot(key.encode())) == 0 for key in keys(40)]
    assert outcomes == [
        "connection" if gone else key for key, gone in zip(keys(40), on_dead, strict=True)
    ]


def _try(store: ChunkStore, key: str) -> str:
    try:
        return (read(store, key) or b"none").decode()
    except TierUnavailable as error:
        return error.reason
