"""The store on real servers: what is asked is what is answered."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest
from redis import Redis

from kv.errors import TierUnavailable
from kv.store import ChunkStore
from tests.redis_servers import SERVERS, server_url

SECONDS = 5.0
TTL_MS = 60_000


@pytest.fixture(scope="module", params=SERVERS)
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with server_url(request.param, tmp_path_factory.mktemp(request.param)) as found:
        yield found


@pytest.fixture
def client(url: str) -> Iterator[Any]:
    with Redis.from_url(url) as found:
        found.flushall()
        yield found


@pytest.fixture
def store(url: str, client: Any) -> Iterator[ChunkStore]:
    with closing(ChunkStore(url, connections=4)) as made:
        yield made


def read(store: ChunkStore, key: str, room: int = 1_000_000) -> bytes | None:
    buffer = bytearray(room)
    size = store.read(key, memoryview(buffer), SECONDS)
    return None if size is None else bytes(buffer[:size])


@pytest.mark.parametrize(
    "value",
    [b"", b"a", b"\r\n", b"+OK\r\n$-1\r\n", bytes(range(256)), random.Random(1).randbytes(300_000)],
    ids=lambda value: f"{len(value)} bytes",
)
def test_a_value_is_read_as_it_was_written(store: ChunkStore, client: Any, value: bytes) -> None:
    half = len(value) // 2
    store.write("k", (value[:half], memoryview(value)[half:]), TTL_MS, SECONDS)
    assert client.get("k") == value
    assert read(store, "k") == value
    assert read(store, "k", room=len(value)) == value


def test_a_value_of_megabytes_comes_whole(store: ChunkStore) -> None:
    value = random.Random(2).randbytes(20_000_000)
    store.write("k", (value,), TTL_MS, SECONDS)
    assert read(store, "k", len(value)) == value


def test_what_is_written_again_is_replaced(store: ChunkStore) -> None:
    for value in (b"long ago", b"now"):
        store.write("k", (value,), TTL_MS, SECONDS)
    assert read(store, "k") == b"now"


def test_only_the_start_of_a_buffer_is_written(store: ChunkStore) -> None:
    store.write("k", (b"abc",), TTL_MS, SECONDS)
    buffer = bytearray(b"------")
    assert store.read("k", memoryview(buffer), SECONDS) == 3
    assert buffer == b"abc---"


def test_a_missing_key_is_no_value(store: ChunkStore) -> None:
    assert read(store, "k") is None
    store.write("other", (b"x",), TTL_MS, SECONDS)
    assert read(store, "k") is None
    assert read(store, "other") == b"x"


def test_h1_a_value_that_does_not_fit_says_its_size_and_leaves_nothing_behind(store: ChunkStore) -> None:
    store.write("long", (b"x" * 200_000,), TTL_MS, SECONDS)
    store.write("k", (b"mine",), TTL_MS, SECONDS)
    for _ in range(5):
        assert store.read("long", memoryview(bytearray(100)), SECONDS) == 200_000
        assert read(store, "k") == b"mine"


def test_touch_tells_which_keys_are_there_in_their_order(store: ChunkStore, client: Any) -> None:
    chance = random.Random(3)
    keys = [f"k{i}" for i in range(200)]
    there = {key for key in keys if chance.random() < 0.5}
    for key in there:
        client.set(key, "x")
    chance.shuffle(keys)
    assert store.touch(keys, TTL_MS, SECONDS) == [key in there for key in keys]
    assert store.touch([], TTL_MS, SECONDS) == []


def test_touch_asks_in_one_round_trip(store: ChunkStore, client: Any) -> None:
    store.touch(["k"], TTL_MS, SECONDS)

    def reads() -> int:
        return int(client.info("stats")["total_reads_processed"])

    before = reads()
    store.touch([f"k{i}" for i in range(100)], TTL_MS, SECONDS)
    assert reads() - before <= 2  # the pipeline, and the question itself


def test_what_is_written_has_a_lifetime_and_touch_extends_it(store: ChunkStore, client: Any) -> None:
    store.write("k", (b"x",), 10_000, SECONDS)
    assert 0 < client.pttl("k") <= 10_000
    assert store.touch(["k"], TTL_MS, SECONDS) == [True]
    assert 10_000 < client.pttl("k") <= TTL_MS
    store.write("k", (b"y",), 10_000, SECONDS)
    assert 0 < client.pttl("k") <= 10_000
    assert read(store, "k") == b"y"
    assert 0 < client.pttl("k") <= 10_000


def test_what_is_deleted_is_gone(store: ChunkStore) -> None:
    store.write("k", (b"x",), TTL_MS, SECONDS)
    store.delete("k", SECONDS)
    store.delete("k", SECONDS)
    assert read(store, "k") is None
    assert store.touch(["k"], TTL_MS, SECONDS) == [False]


def test_a_key_of_another_type_is_refused_and_the_next_call_works(
    store: ChunkStore, client: Any
) -> None:
    client.rpush("list", "x")
    store.write("k", (b"mine",), TTL_MS, SECONDS)
    for _ in range(3):
        with pytest.raises(TierUnavailable, match="refused"):
            read(store, "list")
        assert read(store, "k") == b"mine"


def test_a_full_server_that_evicts_nothing_is_full_and_still_serves(
    store: ChunkStore, client: Any
) -> None:
    store.write("k", (b"mine",), TTL_MS, SECONDS)
    client.config_set("maxmemory", 1)
    try:
        for size in (10, 1_000_000):
            with pytest.raises(TierUnavailable, match="full"):
                store.write("more", (b"x" * size,), TTL_MS, SECONDS)
        assert read(store, "k") == b"mine"
        assert store.touch(["k", "more"], TTL_MS, SECONDS) == [True, False]
        store.delete("k", SECONDS)
    finally:
        client.config_set("maxmemory", 0)
    store.write("more", (b"room",), TTL_MS, SECONDS)
    assert read(store, "more") == b"room"


def test_what_a_user_may_not_do_is_refused(store: ChunkStore, client: Any, url: str) -> None:
    client.execute_command("ACL", "SETUSER", "reader", "on", ">secret", "~*", "-@all", "+get")
    with closing(ChunkStore(with_login(url, "reader", "secret"), connections=1)) as reader:
        store.write("k", (b"mine",), TTL_MS, SECONDS)
        with pytest.raises(TierUnavailable, match="refused"):
            reader.write("k", (b"other",), TTL_MS, SECONDS)
        with pytest.raises(TierUnavailable, match="refused"):
            reader.touch(["k"], TTL_MS, SECONDS)
        with pytest.raises(TierUnavailable, match="refused"):
            reader.infos(SECONDS)
        assert read(reader, "k") == b"mine"


def test_a_wrong_password_is_no_answer_and_is_not_told(client: Any, url: str) -> None:
    client.execute_command("ACL", "SETUSER", "writer", "on", ">right", "~*", "+@all")
    with closing(ChunkStore(with_login(url, "writer", "wr0ng"), connections=1)) as store:
        with pytest.raises(TierUnavailable, match="connection") as raised:
            store.touch(["k"], TTL_MS, SECONDS)
        assert "wr0ng" not in f"{raised.value!r} {raised.value.__cause__!r}"
        with pytest.raises(TierUnavailable, match="connection"):
            read(store, "k")
    with closing(ChunkStore(with_login(url, "writer", "right"), connections=1)) as store:
        store.write("k", (b"mine",), TTL_MS, SECONDS)
        assert read(store, "k") == b"mine"


def with_login(url: str, user: str, password: str) -> str:
    return url.replace("redis://", f"redis://{user}:{password}@")


def test_a_url_names_its_database(client: Any, url: str) -> None:
    with closing(ChunkStore(url.removesuffix("/0") + "/5", connections=1)) as store:
        store.write("k", (b"five",), TTL_MS, SECONDS)
        assert read(store, "k") == b"five"
        assert client.get("k") is None


def test_a_server_says_what_it_is(store: ChunkStore, client: Any, url: str) -> None:
    [(place, info)] = store.infos(SECONDS)
    assert f"redis://{place}/0" == url
    assert info["run_id"] == client.info("server")["run_id"]
    assert (info["maxmemory"], info["maxmemory_policy"]) == (0, "noeviction")


def test_nobody_there_is_no_answer() -> None:
    with closing(ChunkStore("redis://127.0.0.1:1/0", connections=1)) as store:
        for call in (
            lambda: store.touch(["k"], TTL_MS, SECONDS),
            lambda: read(store, "k"),
            lambda: store.write("k", (b"x",), TTL_MS, SECONDS),
            lambda: store.delete("k", SECONDS),
            lambda: store.infos(SECONDS),
        ):
            with pytest.raises(TierUnavailable, match="connection"):
                call()


def test_h1_many_threads_at_once_each_get_their_own(url: str, client: Any) -> None:
    threads = 8
    shared = ChunkStore(url, connections=threads)
    chance = random.Random(4)
    values = {f"k{i}": bytes([i]) * chance.randint(1, 50_000) for i in range(100)}
    for key, value in values.items():
        shared.write(key, (value,), TTL_MS, SECONDS)

    def work(thread: int) -> int:
        order = random.Random(thread)
        for _ in range(60):
            key = order.choice(list(values))
            if order.random() < 0.3:
                shared.write(key, (values[key],), TTL_MS, SECONDS)
            elif order.random() < 0.2:
                assert shared.touch([key, "never"], TTL_MS, SECONDS) == [True, False]
            assert read(shared, key, 60_000) == values[key]
        return thread

    with closing(shared), ThreadPoolExecutor(threads) as pool:
        assert list(pool.map(work, range(threads))) == list(range(threads))


def test_a_closed_store_keeps_no_connection(url: str, client: Any) -> None:
    def connections() -> int:
        return int(client.info("clients")["connected_clients"])

    before = connections()
    store = ChunkStore(url, connections=3)
    store.write("k", (b"x",), TTL_MS, SECONDS)
    assert connections() == before + 1
    store.close()
    store.close()
    assert client.ping()
    while connections() != before:
        assert client.ping()
