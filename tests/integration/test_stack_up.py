"""``headrace up`` from outside, on the simulated engine."""

import asyncio
import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from infra.embedded import broker_answers
from infra.role import EXIT_CONFIGURATION
from infra.settings import Settings
from infra.stack.state import read_state, state_file
from infra.topics import TopicsError, ensure_topics
from tests.stack_process import ROLES, StackProcess, eventually, run_headrace

READY_SECONDS = 90.0

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def own_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StackProcess]:
    """A stack this file may hurt; its last test stops it."""
    with StackProcess(tmp_path_factory.mktemp("own") / "data", "--engine", "sim") as stack:
        stack.wait_ready(READY_SECONDS)
        yield stack


def _processes(stack: StackProcess) -> list[psutil.Process]:
    """``up`` and everything below it."""
    parent = psutil.Process(stack.running.pid)
    return [parent, *parent.children(recursive=True)]


def _gone(processes: list[psutil.Process]) -> bool:
    return not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes[1:])


def test_status_has_every_role_once_and_says_it_is_ready(sim_stack: StackProcess) -> None:
    status = sim_stack.status()
    assert set(status) == {"url", "ws_url", "ready", "config_error", "redis", "roles"}
    assert status["redis"]["policy"] == "noeviction"
    assert status["redis"]["warning"] is None
    assert status["ready"] is True
    assert status["url"].startswith("http://127.0.0.1:")
    assert status["ws_url"].startswith("ws://127.0.0.1:")
    assert status["ws_url"].endswith("/v1/ws")
    names = [role["name"] for role in status["roles"]]
    assert sorted(names) == sorted([*ROLES, "redis", "broker"])
    for role in status["roles"]:
        assert {"name", "index", "pid", "ready", "restarts", "reason"} <= set(role)
        assert (role["index"], role["ready"], role["reason"]) == (0, True, None)
        # The browser tests kill this stack's edge.
        assert role["restarts"] == 0 or role["name"] == "edge"
        assert psutil.pid_exists(role["pid"])


def test_status_for_people_has_a_line_per_process(sim_stack: StackProcess) -> None:
    done = run_headrace("status", "--data-dir", str(sim_stack.data_dir))
    assert done.returncode == 0
    lines = done.stdout.strip().split("\n")
    # Of the broker, Redis, what Redis says of itself, and the page.
    assert len(lines) == len(ROLES) + 4
    assert sim_stack.url in lines[-1]


def test_ask_streams_a_reply_and_its_figures(sim_stack: StackProcess) -> None:
    done = run_headrace("ask", "why?", "--max-tokens", "9", "--data-dir", str(sim_stack.data_dir))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "first token after" in done.stderr
    assert "9 tokens" in done.stderr


def test_ask_with_a_wrong_key_fails_in_one_line(sim_stack: StackProcess) -> None:
    done = run_headrace("ask", "why?", "--key", "sk-wrong", "--data-dir", str(sim_stack.data_dir))
    assert done.returncode == 1
    assert len(done.stderr.strip().split("\n")) == 1
    assert "sk-wrong" not in done.stderr


def test_a_second_stack_on_the_same_folder_is_refused(sim_stack: StackProcess) -> None:
    done = run_headrace("up", "--engine", "sim", "--data-dir", str(sim_stack.data_dir))
    assert done.returncode == 1
    assert "already runs on" in done.stderr


def test_two_stacks_run_side_by_side(sim_stack: StackProcess, own_stack: StackProcess) -> None:
    first, second = sim_stack.status(), own_stack.status()
    assert first["ready"]
    assert second["ready"]
    assert first["url"] != second["url"]
    assert first["ws_url"] != second["ws_url"]
    assert {r["pid"] for r in first["roles"]}.isdisjoint({r["pid"] for r in second["roles"]})
    for stack in (sim_stack, own_stack):
        done = run_headrace("ask", "hello", "--max-tokens", "5", "--data-dir", str(stack.data_dir))
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["gateway", "worker", "redis", "broker"])
def test_a_killed_process_comes_back_and_the_stack_answers(own_stack: StackProcess, name: str) -> None:
    before = own_stack.process_state(name)
    assert before.pid is not None
    os.kill(before.pid, signal.SIGKILL)

    def restarted() -> bool:
        now = own_stack.process_state(name)
        return now.restarts == before.restarts + 1 and now.ready and now.pid != before.pid

    eventually(restarted, 60, f"{name} restarted and ready")
    own_stack.wait_ready(READY_SECONDS)
    status = {role["name"]: role for role in own_stack.status()["roles"]}
    assert status[name]["restarts"] == before.restarts + 1
    done = run_headrace(
        "ask", "again?", "--max-tokens", "5", "--data-dir", str(own_stack.data_dir), seconds=90
    )
    assert done.returncode == 0, done.stderr


def test_an_interrupt_drains_everything_and_ends_with_0(own_stack: StackProcess) -> None:
    processes = _processes(own_stack)
    assert len(processes) > len(ROLES)
    assert own_stack.stop(signal.SIGINT) == 0
    eventually(lambda: _gone(processes), 5, "no process left")
    assert "stopped" in own_stack.output
    assert run_headrace("status", "--data-dir", str(own_stack.data_dir)).returncode == 1


def test_a_killed_supervisor_leaves_nothing_behind(data_dir: Path) -> None:
    with StackProcess(data_dir, "--engine", "sim") as stack:

        def all_started() -> bool:
            state = read_state(state_file(data_dir))
            started = {role.name for role in state.roles if role.pid} if state else set()
            return started >= ROLES

        eventually(all_started, READY_SECONDS, "every role started")
        processes = _processes(stack)
        stack.running.kill()
        stack.running.wait(5)
        eventually(lambda: _gone(processes), 10, "no process left")


def test_given_services_are_used_not_started_and_outlive_the_stack(
    data_dir: Path, kafka: str, redis_url: str, topic_prefix: str, settings: Callable[..., Settings]
) -> None:
    config = data_dir.parent / "headrace.json"
    config.write_text(settings().model_dump_json())
    options = ("--config", str(config), "--kafka", kafka, "--redis", redis_url, "--workers", "2")
    with StackProcess(data_dir, *options) as stack:
        stack.wait_ready(READY_SECONDS)
        roles = stack.status()["roles"]
        assert {r["name"] for r in roles} == ROLES
        assert [r["index"] for r in roles if r["name"] == "worker"] == [0, 1]
        done = run_headrace("ask", "hi", "--max-tokens", "5", "--data-dir", str(data_dir))
        assert done.returncode == 0, done.stderr
        processes = _processes(stack)
        assert run_headrace("down", "--data-dir", str(data_dir)).returncode == 0
        assert stack.running.wait(5) == 0
        eventually(lambda: _gone(processes), 5, "no process left")
    host, _, port = kafka.rpartition(":")
    assert broker_answers(host, int(port))


def test_a_busy_port_is_one_line(data_dir: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = str(listener.getsockname()[1])
        done = run_headrace("up", "--engine", "sim", "--data-dir", str(data_dir), "--port", port)
    assert done.returncode == 1
    assert done.stderr == f"headrace: port {port} is in use: give another --port\n"


def test_a_configuration_error_is_one_line_that_names_the_key(data_dir: Path, tmp_path: Path) -> None:
    config = tmp_path / "bad.json"
    config.write_text(json.dumps({"models": {}, "tiers": {}, "kafka": {"bootstrp": "x"}}))
    done = run_headrace("up", "--config", str(config), "--data-dir", str(data_dir))
    assert done.returncode == EXIT_CONFIGURATION
    assert done.stderr == "headrace: configuration: kafka.bootstrp: is not a known key\n"


def test_a_kafka_that_does_not_answer_is_one_line(data_dir: Path) -> None:
    done = run_headrace(
        "up", "--engine", "sim", "--data-dir", str(data_dir), "--kafka", "127.0.0.1:1", seconds=60
    )
    assert done.returncode == 1
    assert "no topics on 127.0.0.1:1" in done.stderr


async def test_the_topics_step_creates_once_and_checks_afterwards(
    settings: Callable[..., Settings], topic_prefix: str
) -> None:
    wanted = settings()
    created = await ensure_topics(wanted, 10)
    assert created == [spec.name for spec in wanted.kafka.topics.specs(wanted.pools)]
    assert await ensure_topics(wanted, 10) == []
    bigger = settings(kafka={"partitions": 5})
    with pytest.raises(
        TopicsError, match=rf"topic {topic_prefix}.requests has 2 partitions, 5 are needed"
    ):
        await ensure_topics(bigger, 10)


async def test_the_topics_step_may_run_many_times_at_once(settings: Callable[..., Settings]) -> None:
    wanted = settings()
    await asyncio.gather(*(ensure_topics(wanted, 10) for _ in range(4)))
    assert await ensure_topics(wanted, 10) == []


async def test_the_topics_step_gives_up_at_its_deadline(settings: Callable[..., Settings]) -> None:
    with pytest.raises(TopicsError, match=r"no topics on 127\.0\.0\.1:1"):
        await ensure_topics(settings(kafka={"bootstrap": "127.0.0.1:1"}), 0.5)


def test_the_topics_command_says_what_it_made(kafka: str, tmp_path: Path, topic_prefix: str) -> None:
    config = tmp_path / "headrace.toml"
    config.write_text(
        f'[kafka]\ntopic_prefix = "{topic_prefix}"\n[models.m]\npath = "builtin:sim"\n'
        '[tiers.paid]\nqueue_class = "interactive"\n'
    )
    first = run_headrace("topics", "--config", str(config), "--kafka", kafka)
    assert first.returncode == 0, first.stderr
    assert f"created {topic_prefix}.requests" in first.stdout
    second = run_headrace("topics", "--config", str(config), "--kafka", kafka)
    assert second.stdout == "topics are as they must be\n"
