"""Services for the tests. Nothing here is skipped when it is missing: it fails and says what to run.

``kafka``         host:port of one embedded broker (session)
``redis_server``  host:port of one embedded Redis (session)
``redis_url``     URL of an empty database of that Redis, one per test
``topic_prefix``  a topic prefix nobody else uses, one per test
``settings``      factory of settings on all of these: ``settings(streams={"lease_ms": 300})``
``module_settings``  the same for what the tests of a module share (module)
``sim_stack``     a whole ``headrace up --engine sim`` (session)
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from schemathesis.pytest.plugin import SchemathesisFunction

from infra.embedded import (
    BROKER_FETCH_MAX_WAIT_MS,
    BROKER_SESSION_TIMEOUT_MS,
    embedded_broker,
    embedded_redis,
)
from infra.settings import Settings, development, parse
from tests.stack_process import StackProcess

_databases = count(1)

# Nothing here depends on how fast a machine is, and several processes may share it.
hypothesis.settings.register_profile("headrace", deadline=None)
hypothesis.settings.load_profile("headrace")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each item an id of its own: pytest-xdist runs one of those that share one, and says nothing."""
    for item in items:
        if isinstance(item, SchemathesisFunction):  # one for each operation of the API
            item._id = item.id.with_params(item.operation_label)
    repeated = [node_id for node_id, times in Counter(i.nodeid for i in items).items() if times > 1]
    if repeated:
        raise pytest.UsageError(f"several tests are called {', '.join(repeated)}")


def _empty_database(redis_server: str) -> str:
    return f"redis://{redis_server}/{next(_databases) % 1024}"


def _unused_prefix() -> str:
    return f"t{uuid.uuid4().hex[:12]}"


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with embedded_broker(tmp_path_factory.mktemp("broker")) as bootstrap:
        yield bootstrap


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with embedded_redis(tmp_path_factory.mktemp("redis")) as address:
        yield address


@pytest.fixture
def redis_url(redis_server: str) -> str:
    return _empty_database(redis_server)


@pytest.fixture
def topic_prefix() -> str:
    return _unused_prefix()


@pytest.fixture
def settings(kafka: str, redis_url: str, topic_prefix: str) -> Callable[..., Settings]:
    """``settings(**sections)``: development settings with these keys of these sections replaced."""
    return _settings_on(kafka, redis_url, topic_prefix)


@pytest.fixture(scope="module")
def module_settings(kafka: str, redis_server: str) -> Callable[..., Settings]:
    """The same for what all tests of a module share."""
    return _settings_on(kafka, _empty_database(redis_server), _unused_prefix())


def _settings_on(kafka: str, redis_url: str, topic_prefix: str) -> Callable[..., Settings]:
    def make(**sections: Any) -> Settings:
        raw: dict[str, Any] = development("sim").model_dump(mode="json")
        raw["kafka"] |= {
            "bootstrap": kafka,
            "topic_prefix": topic_prefix,
            "partitions": 2,
            "worker_slots": 4,
            "worker_partitions": 2,
            "fetch_max_wait_ms": BROKER_FETCH_MAX_WAIT_MS,
            "session_timeout_ms": BROKER_SESSION_TIMEOUT_MS,
            "idempotent": False,
        }
        raw["redis"] |= {"url": redis_url}
        raw["http"] |= {"port": 0}
        raw["files"] |= {"url": f"memory://{topic_prefix}"}
        raw["edge"] |= {"port": 0}
        for name, value in sections.items():
            raw[name] = raw[name] | value if isinstance(raw[name], dict) else value
        return parse(raw)

    return make


@pytest.fixture(scope="session")
def sim_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StackProcess]:
    with StackProcess(tmp_path_factory.mktemp("sim") / "data", "--engine", "sim") as stack:
        stack.wait_ready(60)
        yield stack


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    return tmp_path / "data"
