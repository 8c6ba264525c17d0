import json
from pathlib import Path

import pytest

from infra.embedded import BROKER_FETCH_MAX_WAIT_MS
from infra.settings import BUILTIN_SIM, SettingsError, development, load
from infra.stack.configure import (
    Addresses,
    UpOptions,
    base_settings,
    effective_settings,
    reachable_host,
)
from infra.stack.errors import StackError

_WHERE = Addresses(8100, 8101, "127.0.0.1:9", "redis://127.0.0.1:7/0", Path("/doorbells"))


def _model(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def _config(tmp_path: Path, **changes: object) -> Path:
    raw = development("sim").model_dump(mode="json") | changes
    path = tmp_path / "headrace.json"
    path.write_text(json.dumps(raw))
    return path


def test_the_simulated_engine_needs_no_model(tmp_path: Path) -> None:
    settings = base_settings(UpOptions(tmp_path, engine="sim", sim_tpot_ms=0.5, sim_ttft_ms=0))
    assert settings.worker.engine == "sim"
    assert [m.path for m in settings.models.values()] == [BUILTIN_SIM]
    assert (settings.worker.sim.ttft_ms, settings.worker.sim.tpot_ms) == (0, 0.5)


def test_vllm_is_the_default_and_its_missing_model_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_MODEL_DIR", str(tmp_path / "none"))
    with pytest.raises(StackError, match=r"there is no model in .*none: run make model"):
        base_settings(UpOptions(tmp_path))


def test_paths_do_not_depend_on_where_the_roles_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _model(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    options = UpOptions(tmp_path, engine="vllm", model=Path("model"), sim_script=Path("s.json"))
    settings = base_settings(options)
    assert [m.path for m in settings.models.values()] == [str(tmp_path / "model")]
    assert settings.worker.sim.script == str(tmp_path / "s.json")


def test_a_file_s_engine_gives_way_to_the_option(tmp_path: Path) -> None:
    config = _config(tmp_path)
    assert base_settings(UpOptions(tmp_path, config=config)).worker.engine == "sim"
    assert base_settings(UpOptions(tmp_path, config=config, engine="vllm")).worker.engine == "vllm"


def test_a_model_beside_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StackError, match="--model"):
        base_settings(UpOptions(tmp_path, config=_config(tmp_path), model=tmp_path))


def test_an_unknown_key_of_the_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="modles: is not a known key"):
        base_settings(UpOptions(tmp_path, config=_config(tmp_path, modles={})))


def test_roles_get_this_stack_s_addresses_and_their_own_drain_times(tmp_path: Path) -> None:
    options = UpOptions(tmp_path, engine="sim")
    base = base_settings(options)
    settings = effective_settings(base, _WHERE, options)
    assert (settings.http.port, settings.edge.port) == (8100, 8101)
    assert (settings.kafka.bootstrap, settings.redis.url) == ("127.0.0.1:9", "redis://127.0.0.1:7/0")
    assert settings.kafka.fetch_max_wait_ms == BROKER_FETCH_MAX_WAIT_MS
    assert settings.kafka.doorbells == _WHERE.doorbells
    assert settings.drain_seconds == base.drain_seconds
    assert settings.worker.drain_seconds == base.worker.drain_seconds


def test_each_worker_of_a_large_pool_finds_a_slot_though_all_were_killed_just_now(
    tmp_path: Path,
) -> None:
    options = UpOptions(tmp_path, engine="sim", workers=40)
    assert effective_settings(base_settings(options), _WHERE, options).kafka.worker_slots == 80


def test_a_kafka_of_one_s_own_keeps_its_fetch_wait(tmp_path: Path) -> None:
    options = UpOptions(tmp_path, engine="sim", kafka="127.0.0.1:9")
    base = base_settings(options)
    settings = effective_settings(base, _WHERE, options)
    assert settings.kafka.fetch_max_wait_ms == base.kafka.fetch_max_wait_ms
    assert settings.kafka.partitions == base.kafka.partitions
    assert settings.kafka.worker_partitions == 1
    assert settings.kafka.doorbells is None
    assert settings.kafka.idempotent is None


def test_written_settings_are_read_back_the_same(tmp_path: Path) -> None:
    options = UpOptions(tmp_path, engine="sim")
    settings = effective_settings(base_settings(options), _WHERE, options)
    path = tmp_path / "settings.json"
    path.write_text(settings.model_dump_json())
    assert load(path) == settings


@pytest.mark.parametrize(
    ("host", "shown"), [("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("10.1.2.3", "10.1.2.3")]
)
def test_urls_name_a_host_one_can_reach(host: str, shown: str) -> None:
    assert reachable_host(host) == shown
