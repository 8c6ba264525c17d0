"""The official ``openai`` package for Node against the gateway (tests/node/client.mjs)."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from infra.settings import DEV_PAID_KEY, Settings
from tests.integration.gateway_fixture import Gateway, gateway_in_a_thread
from tests.integration.pipeline_double import script

CLIENT = Path(__file__).resolve().parent.parent / "node" / "client.mjs"


@pytest.fixture
def gateway(settings: Callable[..., Settings], tmp_path: Path) -> Iterator[Gateway]:
    with gateway_in_a_thread(settings(files={"url": str(tmp_path / "files")})) as running:
        yield running


def test_the_official_package_for_node(gateway: Gateway) -> None:
    message = script(tokens=["Paris", " it", " is"])[0]["content"]
    command = ["node", str(CLIENT), f"{gateway.url}/v1", DEV_PAID_KEY, message]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    for name in ("completion", "stored", "response"):
        assert seen[name] == "Paris it is"
    for name in ("chunks", "deltas"):
        assert seen[name] == ["Paris", " it", " is"]
    assert (seen["usage"], seen["streamUsage"]) == (10, 10)
    assert (seen["events"][0], seen["events"][-1]) == ("response.created", "response.completed")
    assert seen["resumed"] == list(range(5, len(seen["events"])))
    assert (seen["file"], seen["flagged"]) == (19, False)
    assert "default" in seen["models"]
    assert seen["errors"] == [
        [400, "invalid_value", "BadRequestError"],
        [404, "not_found", "NotFoundError"],
        [401, "invalid_api_key", "AuthenticationError"],
    ]
