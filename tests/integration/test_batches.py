"""Batches through gateway and runner, with the official client; the pipeline behind them is a double."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Batch
from openai.types.responses import Response

from infra.settings import DEV_FREE_KEY, Settings
from producers.batch.line_outcome import MAX_ATTEMPTS
from tests.batches import CHAT
from tests.integration.batch_fixture import BatchSystem, batch_system, chat_line, played
from tests.stack_process import eventually

RESPONSES = "/v1/responses"


@pytest.fixture(scope="module")
def system(
    module_settings: Callable[..., Settings], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[BatchSystem]:
    quick = {"lease_seconds": 1.0, "flush_seconds": 0.05, "in_flight": 4, "entrance_share": 1.0}
    folder = tmp_path_factory.mktemp("files")
    with batch_system(module_settings(files={"url": str(folder)}, batch=quick)) as running:
        yield running


def test_a_batch_of_the_official_client_from_its_file_to_its_results_K1_K8(system: BatchSystem) -> None:
    content = codecs.BOM_UTF8 + b"".join(
        [
            played("ünï 👩‍💻", tokens=["one", "\u2028", "two"]),
            b"\r\n",
            chat_line("other name", model="headrace-sim"),
            chat_line("no such model", model="gpt-none"),
        ]
    )
    batch = system.submit(content, metadata={"job": "nightly"})
    assert (batch.object, batch.status, batch.metadata) == ("batch", "validating", {"job": "nightly"})
    batch, output, errors = system.ended(batch)
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert batch.request_counts.to_dict() == {"total": 3, "completed": 2, "failed": 1}
    texts = {r["custom_id"]: r["response"]["body"]["choices"][0]["message"]["content"] for r in output}
    assert texts == {"ünï 👩‍💻": "one\u2028two", "other name": "Hello there"}
    assert all(r["response"]["body"]["id"] == r["response"]["request_id"] for r in output)
    (unknown,) = errors
    assert (unknown["custom_id"], unknown["error"]) == ("no such model", None)
    assert unknown["response"]["status_code"] == 404
    assert unknown["response"]["body"]["error"]["code"] == "model_not_found"
    assert batch.usage is not None
    assert (batch.usage.input_tokens, batch.usage.output_tokens) == (14, 5)
    order = [batch.created_at, batch.in_progress_at, batch.finalizing_at, batch.completed_at]
    assert None not in order
    assert sorted(order) == order  # type: ignore[type-var]
    files = [f.id for f in system.client().files.list(purpose="batch_output").data]  # type: ignore[call-arg]
    assert {batch.output_file_id, batch.error_file_id} <= set(files)


def test_lines_wait_in_the_batch_class_and_need_no_reader(system: BatchSystem) -> None:
    before = set(system.gateway.double.records)
    system.ended(system.submit(chat_line("a")))
    (record,) = system.made_since(before).values()
    assert (record.tenant, record.key_id, record.tier) == ("dev", "dev", "batch")
    assert record.queue_class == "batch"
    assert record.leave_grace_ms is None


def test_lines_can_be_responses(system: BatchSystem) -> None:
    bodies = [{"input": "hi", "metadata": {"a": "b"}}, {"input": "hi", "max_output_tokens": 0}]
    lines = [
        {"custom_id": str(n), "method": "POST", "url": RESPONSES, "body": {"model": "default", **body}}
        for n, body in enumerate(bodies)
    ]
    content = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    made = system.client().batches.create(
        input_file_id=system.upload(content), endpoint=RESPONSES, completion_window="24h"
    )
    batch, output, errors = system.ended(made)
    assert (batch.status, len(output), len(errors)) == ("completed", 1, 1)
    response = Response.model_validate(output[0]["response"]["body"])
    assert (response.output_text, response.metadata, response.object) == (
        *("Hello there", {"a": "b"}, "response"),
    )
    with pytest.raises(openai.NotFoundError):
        system.client().responses.retrieve(response.id)
    assert errors[0]["response"]["body"]["error"]["param"] == "max_output_tokens"


def test_a_file_with_bad_lines_is_refused_with_their_numbers_K4_K7(system: BatchSystem) -> None:
    content = b"".join(
        [chat_line("a"), b"[1]\n", b"\n", chat_line("b", stream=True), b'{"custom_id": ', b"\n"]
    )
    before = set(system.gateway.double.records)
    batch, output, errors = system.ended(system.submit(content))
    assert (batch.status, output, errors) == ("failed", [], [])
    assert batch.failed_at is not None
    assert batch.errors is not None
    faults = [(e.line, e.code) for e in batch.errors.data or ()]
    assert faults == [
        (2, "invalid_json_line"),
        (4, "unsupported_parameter"),
        (5, "invalid_json_line"),
    ]
    assert system.made_since(before) == {}


def test_what_fails_is_an_error_and_never_an_answer_K11_B7_B8(system: BatchSystem) -> None:
    content = b"".join(
        [
            played("long", refuse="context_length_exceeded"),
            played("broken", tokens=["half of", " an answer"], fail_after=1),
        ]
    )
    batch, output, errors = system.ended(system.submit(content))
    assert (batch.status, batch.output_file_id, output) == ("completed", None, [])
    assert batch.request_counts is not None
    assert batch.request_counts.failed == 2
    found = {
        r["custom_id"]: (r["response"]["status_code"], r["response"]["body"]["error"]["code"])
        for r in errors
    }
    assert found == {"long": (400, "context_length_exceeded"), "broken": (500, "engine_error")}


def test_a_request_that_is_lost_is_made_again_and_not_for_ever(system: BatchSystem) -> None:
    before = set(system.gateway.double.records)
    _, output, errors = system.ended(system.submit(played("a", refuse="request_lost")))
    assert len(system.made_since(before)) == MAX_ATTEMPTS
    assert (len(output), len(errors)) == (0, 1)
    assert errors[0]["response"]["body"]["error"]["code"] == "request_lost"


def test_a_cancelled_batch_delivers_what_is_done(system: BatchSystem) -> None:
    system.portal.call(system.gateway.double.hold)
    content = b"".join(
        [
            *(chat_line(f"done {n}") for n in range(3)),
            *(played(f"held {n}", hold_before=1, tokens=["x", "y"]) for n in range(9)),
        ]
    )
    batch = system.submit(content)

    def three_done() -> bool:
        counts = system.client().batches.retrieve(batch.id).request_counts
        return counts is not None and counts.completed == 3

    eventually(three_done, 10, "three lines are done")
    assert system.client().batches.cancel(batch.id).status == "cancelling"
    assert system.client().batches.cancel(batch.id).status == "cancelling"
    batch, output, errors = system.ended(batch)
    system.portal.call(system.gateway.double.release)
    assert batch.status == "cancelled"
    assert {r["custom_id"] for r in output} == {f"done {n}" for n in range(3)}
    assert {r["custom_id"] for r in errors} == {f"held {n}" for n in range(9)}
    assert {r["error"]["code"] for r in errors} == {"batch_cancelled"}
    assert (batch.cancelling_at, batch.cancelled_at) != (None, None)


def test_a_runner_that_goes_leaves_its_lines_to_the_next_one_K13(system: BatchSystem) -> None:
    before = set(system.gateway.double.records)
    system.portal.call(system.gateway.double.hold)
    lines = [f"line {n}" for n in range(12)]
    batch = system.submit(
        b"".join(
            played(name, hold_before=n % 2 or None, tokens=["a", "b"]) for n, name in enumerate(lines)
        )
    )
    eventually(lambda: len(system.made_since(before)) >= 6, 10, "some lines run")
    system.stop_runner()
    system.portal.call(system.gateway.double.release)
    system.start_runner()
    batch, output, errors = system.ended(batch)
    assert (batch.status, errors) == ("completed", [])
    assert sorted(r["custom_id"] for r in output) == sorted(lines)
    made = system.made_since(before)
    assert {r["response"]["request_id"] for r in output} == set(made)
    assert len(made) == 12  # none was generated twice


def test_looking_at_a_batch_changes_nothing_K17(system: BatchSystem) -> None:
    batch = system.submit(b"".join(chat_line(str(n)) for n in range(20)))
    with ThreadPoolExecutor(5) as pool:
        seen = [found for found in pool.map(lambda _: system.wait(batch), range(5)) if found is not None]
    assert {(b.output_file_id, b.error_file_id) for b in seen} == {(seen[0].output_file_id, None)}
    counts = seen[0].request_counts
    assert counts is not None
    assert (counts.completed, len(system.results(seen[0].output_file_id))) == (20, 20)


def test_batches_are_listed_newest_first_and_in_pages(system: BatchSystem) -> None:
    ids = [system.submit(chat_line("a")).id for _ in range(3)]
    client = system.client()
    page = client.batches.list(limit=2)
    assert [b.id for b in page.data] == [ids[2], ids[1]]
    assert page.has_more
    rest = client.batches.list(limit=1, after=ids[1])
    assert [b.id for b in rest.data] == [ids[0]]
    for batch_id in ids:
        system.wait(client.batches.retrieve(batch_id))


def test_a_call_that_comes_again_makes_one_batch_O5(system: BatchSystem) -> None:
    file_id = system.upload(chat_line("a"))

    def create(key: str = "once", **more: Any) -> Batch:
        return system.client().batches.create(
            input_file_id=file_id,
            endpoint=CHAT,
            completion_window="24h",
            extra_headers={"Idempotency-Key": key},
            **more,
        )

    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda _: create(), range(4)))
    assert len({batch.id for batch in made}) == 1
    batch = system.wait(made[0])
    assert create() == batch
    assert create("another").id != batch.id
    with pytest.raises(openai.UnprocessableEntityError) as caught:
        create(metadata={"a": "b"})
    assert caught.value.code == "idempotency_mismatch"


def test_somebody_elses_batch_is_not_there_K16(system: BatchSystem) -> None:
    batch, _, _ = system.ended(system.submit(chat_line("a")))
    other = system.client(DEV_FREE_KEY)
    assert batch.output_file_id is not None
    calls: list[Callable[[], Any]] = [
        lambda: other.batches.retrieve(batch.id),
        lambda: other.batches.cancel(batch.id),
        lambda: other.files.retrieve(batch.output_file_id or ""),
        lambda: other.files.content(batch.output_file_id or ""),
        lambda: other.files.delete(batch.output_file_id or ""),
        lambda: other.batches.create(
            input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h"
        ),
        lambda: system.client().batches.retrieve("batch_" + "0" * 32),
        lambda: system.client().batches.retrieve("../x"),
    ]
    for call in calls:
        with pytest.raises(openai.NotFoundError) as caught:
            call()
        assert caught.value.code == "not_found"
    assert other.batches.list().data == []
    assert other.files.list().data == []


def test_a_batch_that_is_over_cannot_be_cancelled(system: BatchSystem) -> None:
    batch, _, _ = system.ended(system.submit(chat_line("a")))
    with pytest.raises(openai.ConflictError) as caught:
        system.client().batches.cancel(batch.id)
    assert caught.value.code == "batch_over"


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("endpoint", "/v1/embeddings"),
        ("endpoint", None),
        ("completion_window", "1h"),
        ("metadata", {"a": 1}),
        ("metadata", {"a" * 65: "b"}),
        ("output_expires_after", {"anchor": "created_at", "seconds": 5}),
        ("input_file_id", 7),
    ],
)
def test_what_a_batch_cannot_be_made_of_is_named_C10(
    system: BatchSystem, param: str, value: object
) -> None:
    body = {
        "input_file_id": "file-" + "0" * 32,
        "endpoint": CHAT,
        "completion_window": "24h",
        "unknown": 1,
        param: value,
    }
    with pytest.raises(openai.BadRequestError) as caught:
        system.client().post("/batches", body=body, cast_to=object)
    assert (caught.value.param or "").startswith(param)


def test_results_live_as_long_as_was_asked_for(system: BatchSystem) -> None:
    lifetime = {"anchor": "created_at", "seconds": 3600}
    batch, _, _ = system.ended(system.submit(chat_line("a"), output_expires_after=lifetime))
    file = system.client().files.retrieve(batch.output_file_id or "")
    assert file.expires_at is not None
    assert file.expires_at - file.created_at == 3600
    assert file.purpose == "batch_output"
    with pytest.raises(openai.BadRequestError):
        system.client().batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")


def test_a_file_that_a_batch_reads_cannot_be_deleted(system: BatchSystem) -> None:
    system.portal.call(system.gateway.double.hold)
    batch = system.submit(played("a", hold_before=0))
    with pytest.raises(openai.ConflictError) as caught:
        system.client().files.delete(batch.input_file_id)
    assert caught.value.code == "file_in_use"
    system.portal.call(system.gateway.double.release)
    system.wait(batch)

    def deleted() -> bool:
        try:
            return system.client().files.delete(batch.input_file_id).deleted
        except openai.ConflictError:
            return False

    eventually(deleted, 5, "the file can be deleted")


def test_lines_wait_for_the_limits_of_their_tenant(
    settings: Callable[..., Settings], tmp_path: Path
) -> None:
    tiers = settings().model_dump(mode="json")["tiers"]
    tiers["batch"]["limits"] = {"concurrent": 1}
    limited = settings(tiers=tiers, batch={"flush_seconds": 0.05}, files={"url": str(tmp_path)})
    with batch_system(limited) as system:
        batch, output, errors = system.ended(
            system.submit(b"".join(chat_line(str(n)) for n in range(3)))
        )
        assert (batch.status, len(output), errors) == ("completed", 3, [])
