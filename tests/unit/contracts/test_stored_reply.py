"""What is kept of a request, from its acceptance to its outcome."""

from __future__ import annotations

import json

from contracts.keep import Keep
from contracts.outcome import make_outcome
from contracts.records import Message, OutcomeRecord, RequestRecord, Sampling, decode
from contracts.reply import Reply
from contracts.stored_reply import ended_reply, reply_in_progress
from contracts.tiers import QueueClass, Status
from infra.settings import ModelSettings
from stages.moderation import queued_record
from stages.outcomes import STREAM_LOST
from tests.stored import kept_outcome

KEEP = Keep(kind="response", metadata={"a": "b"}, params={"top_p": 1.0}, previous_response_id="resp_1")


def request(keep: Keep | None) -> RequestRecord:
    return RequestRecord(
        request_id="chatcmpl-" + "1" * 32,
        tenant="t1",
        key_id="k1",
        tier="paid",
        queue_class=QueueClass.INTERACTIVE,
        model="m",
        pool="default",
        created_ms=5_000,
        deadline_ms=6_000,
        conversation_id="c",
        turn=[Message(role="user", content="Hi")],
        messages=[Message(role="user", content="before"), Message(role="user", content="Hi")],
        sampling=Sampling(),
        keep=keep,
    )


def test_what_is_kept_goes_through_the_queue_to_the_outcome_as_it_was_accepted() -> None:
    accepted = request(KEEP)
    queued = queued_record(accepted, [1, 2], ModelSettings(path="builtin:sim"), 1)
    outcome = make_outcome(queued, Reply(terminal=STREAM_LOST), now_ms=9_000)
    begun, ended = reply_in_progress(accepted), ended_reply(decode(OutcomeRecord, outcome.encode()))
    assert begun is not None
    assert ended is not None
    assert (begun.status, begun.ended, ended.status, ended.ended) == (None, None, Status.FAILED, 9)
    assert ended.error == STREAM_LOST.error
    same = begun.model_copy(update={"status": ended.status, "ended": 9, "error": ended.error})
    assert same == ended
    assert [m.content for m in ended.messages] == ["Hi"]
    assert (ended.created, ended.previous_response_id) == (5, "resp_1")


def test_nothing_is_kept_of_a_request_that_did_not_ask_for_it() -> None:
    assert reply_in_progress(request(None)) is None
    assert ended_reply(kept_outcome().model_copy(update={"keep": None})) is None


def test_records_of_older_versions_keep_nothing_and_newer_fields_are_ignored_G16() -> None:
    for record in (request(KEEP), kept_outcome()):
        raw = json.loads(record.encode())
        del raw["keep"]
        assert decode(type(record), json.dumps(raw).encode()).keep is None
        raw["keep"] = {"kind": "response", "from_the_future": 1}
        assert decode(type(record), json.dumps(raw).encode()).keep == Keep(kind="response")
