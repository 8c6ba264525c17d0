import fcntl
import os
from pathlib import Path

import pytest

from infra.stack.errors import StackError
from infra.stack.ports import PortKeeper
from infra.stack.state import (
    ProcessState,
    StackState,
    data_dir_lock,
    read_state,
    running_state,
    state_file,
    write_json,
)


def _state(**changes: object) -> StackState:
    facts = {
        "url": "http://x",
        "ws_url": "ws://x",
        "pid": 1,
        "engine": "sim",
        "kafka": "k",
        "redis": "r",
    }
    return StackState.model_validate(facts | changes)


def test_a_state_file_of_a_dead_stack_is_not_taken_for_a_running_one(data_dir: Path) -> None:
    with data_dir_lock(data_dir):
        write_json(state_file(data_dir), _state().model_dump_json())
        assert running_state(data_dir) == _state()
    assert running_state(data_dir) is None


def test_no_folder_means_nothing_runs(data_dir: Path) -> None:
    assert running_state(data_dir) is None


def test_a_second_stack_on_a_data_folder_is_refused_and_names_the_first(data_dir: Path) -> None:
    with data_dir_lock(data_dir):
        write_json(state_file(data_dir), _state(pid=4711).model_dump_json())
        with (
            pytest.raises(StackError, match=r"already runs on .* \(pid 4711\)"),
            data_dir_lock(data_dir),
        ):
            pass


def test_an_unusable_data_folder_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StackError, match="cannot be used"), data_dir_lock(tmp_path / "file" / "data"):
        pass


@pytest.mark.parametrize("text", ["", "{", "[]", '{"url": 3}'])
def test_a_broken_state_file_is_no_state(tmp_path: Path, text: str) -> None:
    path = tmp_path / "stack.json"
    path.write_text(text)
    assert read_state(path) is None


def test_ready_needs_every_process_and_at_least_one() -> None:
    up = ProcessState(name="edge", index=0, kind="role", ready=True)
    down = ProcessState(name="worker", index=0, kind="role")
    assert not _state(roles=[]).ready
    assert _state(roles=[up]).ready
    assert not _state(roles=[up, down]).ready


def test_two_stacks_never_pick_the_same_port() -> None:
    first, second = PortKeeper(), PortKeeper()
    try:
        port = first.any()
        assert second.any(preferred=port) != port
        with pytest.raises(StackError, match=f"port {port} is in use: give another --port"):
            second.given(port, "--port")
    finally:
        first.release()
        second.release()


def test_released_ports_can_be_had_again() -> None:
    first, second = PortKeeper(), PortKeeper()
    try:
        port = first.any()
        first.release()
        assert second.given(port, "--port") == port
    finally:
        second.release()


def test_the_lock_is_free_for_others_after_a_look(data_dir: Path) -> None:
    with data_dir_lock(data_dir):
        pass
    assert running_state(data_dir) is None
    with (data_dir / "lock").open("r+") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert os.access(data_dir / "lock", os.W_OK)
