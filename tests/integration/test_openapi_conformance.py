"""What the gateway answers is what its OpenAPI document says, whatever is sent (schemathesis)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck
from hypothesis import settings as effort

from contracts.stream_ids import OFFSET_PATTERN
from infra.settings import DEV_PAID_KEY, Settings
from tests.api_document import gateway_document
from tests.integration.gateway_fixture import Gateway, gateway_in_a_thread
from tests.integration.pipeline_double import script

#: What valid data may still meet, beside success: a name that nobody has, a key that was used before.
NO_FAULT_OF_THE_DATA = ["2xx", "3xx", 401, 403, 404, 409, 422, 429]
#: What invalid data must meet; 413 is said before the body is read to its end.
REFUSED = [400, 401, 403, 404, 405, 409, 413, 415, 422, 428, 429]
api = schemathesis.openapi.from_dict(
    gateway_document(),
    config=schemathesis.Config.from_dict(
        {
            "checks": {
                "positive_data_acceptance": {"expected-statuses": NO_FAULT_OF_THE_DATA},
                "negative_data_rejection": {"expected-statuses": REFUSED},
            },
            "generation": {"allow-extra-parameters": False},  # ours are ignored, and may be
        }
    ),
)
KEY = {"Authorization": f"Bearer {DEV_PAID_KEY}"}
CHAT = "/v1/chat/completions"
FORM_FIELDS = {"file", "purpose", "expires_after[anchor]", "expires_after[seconds]"}


@pytest.fixture(scope="module")
def gateway(module_settings: Callable[..., Settings]) -> Iterator[Gateway]:
    with gateway_in_a_thread(module_settings()) as running:
        yield running


@pytest.fixture(scope="module")
def known(gateway: Gateway) -> dict[str, str]:
    """Path parameters that name something."""
    with httpx.Client(base_url=gateway.url, headers=KEY) as client:
        body = {"model": "default", "messages": script(tokens=["Hi", " there"]), "logprobs": True}
        return {"request_id": client.post(CHAT, json=body).json()["id"], "name": "default"}


@api.parametrize()
@pytest.mark.filterwarnings("ignore:Do not use the `random` module")  # schemathesis does, inside
@effort(max_examples=15, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_answer_is_in_the_document_C5_C10(
    case: schemathesis.Case, gateway: Gateway, known: dict[str, str]
) -> None:
    for name, made in known.items():
        if len(str(case.path_parameters.get(name, ""))) % 2:
            case.path_parameters[name] = made
    if isinstance(case.body, dict):
        keep_the_rules_between_fields(case.body)
    if CHAT in case.path and "request_id" in case.path_parameters:
        keep_one_offset(case)
    case.call_and_validate(base_url=gateway.url, headers=KEY)


def keep_one_offset(case: schemathesis.Case) -> None:
    """Two would contradict each other; a pattern bounds no number, and schemathesis cuts one with '|'."""
    for place, name in ((case.query, "after"), (case.headers, "Last-Event-ID")):
        if re.fullmatch(OFFSET_PATTERN, str((place or {}).get(name))):
            place[name] = "0-0"
        elif place and name == "Last-Event-ID":
            place.pop(name, None)


def keep_the_rules_between_fields(body: dict[str, Any]) -> None:
    """What a schema of single fields cannot say. Values that are wrong by themselves stay wrong."""
    for field, value in body.items():
        if isinstance(value, float) and value.is_integer():  # 5.0 is an integer to a schema, not to us
            body[field] = int(value)
    if "file" in body:  # nor can it say of a file that it is text
        body["file"] = repr(body["file"]).encode()
        for name in body.keys() - FORM_FIELDS:  # a form has a bound on its parts
            del body[name]
    if "expires_after[seconds]" in body:
        body.setdefault("expires_after[anchor]", "created_at")
    elif "expires_after[anchor]" in body:
        body["expires_after[seconds]"] = 3600
    expires = body.get("output_expires_after")
    if isinstance(expires, dict) and isinstance(expires.get("seconds"), float):
        expires["seconds"] = int(expires["seconds"])
    if isinstance(body.get("model"), str) and body["model"]:
        body["model"] = "default"
    for field in ("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens"):
        if type(body.get(field)) is int and 1 <= body[field] < 2**31:
            body[field] = 4
    for field, needed in (("top_logprobs", "logprobs"), ("stream_options", "stream")):
        if body.get(field) is not None and (body.get(needed) is None or body[needed] is False):
            body[needed] = True
    if body.get("previous_response_id") is not None:
        body.pop("conversation", None)
    if body.get("background") is True:
        body.pop("store", None)
    text = body.get("text")
    shape = text.get("format") if isinstance(text, dict) else None
    if isinstance(shape, dict) and shape.get("type") == "json_schema" and shape.get("schema") is None:
        shape["schema"] = {}
    wanted = body.get("response_format")
    if isinstance(wanted, dict) and wanted.get("type") == "json_schema":
        wanted["json_schema"] = wanted.get("json_schema") or {"schema": {}}
