"""One HTTP call of a client: server-sent events, a whole reply, a cancel. No retry here."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from contracts.identity import is_request_id
from contracts.stream_ids import StreamId

from .ledger import End
from .wire import (
    RETRY_CODES,
    SILENCE_SECONDS,
    STATUS_OF,
    Accepted,
    Cut,
    Event,
    Network,
    Status,
    Text,
    said,
)


@asynccontextmanager
async def call(
    network: Network, method: str, path: str, key: str, **options: Any
) -> AsyncIterator[aiohttp.ClientResponse]:
    """An HTTP call with a key.

    Raises:
        Cut: the connection is lost, or nothing comes.
    """
    headers = {"Authorization": f"Bearer {key}"} | options.pop("headers", {})
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=8, sock_read=SILENCE_SECONDS)
    timeout = options.pop("timeout", timeout)
    try:
        async with network.http.request(
            method, network.url + path, headers=headers, timeout=timeout, **options
        ) as response:
            yield response
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise Cut(type(error).__name__) from error


async def _refusal(response: aiohttp.ClientResponse) -> End:
    """The end that a status code tells; raises where the request is not over or was never accepted."""
    try:
        error = (await response.json())["error"]
    except (ValueError, KeyError, aiohttp.ContentTypeError) as problem:
        raise Cut(f"status {response.status}") from problem
    raised = said(error)
    if isinstance(raised, Cut) or not is_request_id(response.headers.get("x-request-id")):
        raise raised
    code = str(error["code"])
    return End(STATUS_OF.get(code, "failed"), code)


class EventStream:
    """Server-sent events of one reply."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response

    async def events(self) -> AsyncIterator[Event]:
        """What comes, until the reply's end."""
        response = self._response
        refusal = await _refusal(response) if response.status != 200 else None
        if is_request_id(rid := response.headers.get("x-request-id", "")):
            yield Accepted(rid)
        if refusal is not None:
            yield refusal
            return
        offset: StreamId | None = None
        usage: int | None = None
        async for raw in response.content:
            line = raw.decode().rstrip("\n")
            if line.startswith("id: "):
                offset = StreamId.parse(line[4:])
            if line.startswith(":"):
                yield Status(None)
            if not line.startswith("data: "):
                continue
            data = line[6:]
            if data == "[DONE]":
                yield End("completed", None, usage)
                return
            event = json.loads(data)
            if "error" in event:
                code = str(event["error"].get("code"))
                if code in RETRY_CODES:
                    raise Cut(code)
                yield End(STATUS_OF.get(code, "failed"), code)
                return
            if event.get("usage"):
                usage = event["usage"]["completion_tokens"]
            for choice in event["choices"]:
                if content := choice["delta"].get("content"):
                    assert offset is not None, "text without an id"
                    yield Text(offset, choice["index"], content)
        raise Cut("the event stream ended without an end")

    def abort(self) -> None:
        """Drop the connection without a word."""
        self._response.close()


@asynccontextmanager
async def event_stream(
    network: Network,
    key: str,
    *,
    create: tuple[dict[str, Any], str] | None = None,
    read: tuple[str, StreamId | None] | None = None,
) -> AsyncIterator[EventStream]:
    """The event stream of a new request ``(body, idempotency key)``, or of ``(request id, after)``."""
    if create is not None:
        body, once = create
        sent = call(
            network, "POST", "/v1/chat/completions", key, json=body, headers={"Idempotency-Key": once}
        )
    else:
        assert read is not None
        request_id, after = read
        headers = {"Last-Event-ID": str(after)} if after is not None else {}
        path = f"/v1/chat/completions/{request_id}?stream=true&include_usage=true"
        sent = call(network, "GET", path, key, headers=headers)
    async with sent as response:
        try:
            yield EventStream(response)
        finally:
            response.close()


@dataclass(frozen=True, slots=True)
class Whole:
    """A reply that was not streamed; ``texts`` is None where it did not complete."""

    request_id: str | None
    texts: list[str] | None
    end: End


async def whole(
    network: Network,
    key: str,
    seconds: float,
    *,
    create: tuple[dict[str, Any], str] | None = None,
    request_id: str = "",
) -> Whole:
    """A whole reply: of a new request ``(body, idempotency key)``, or of one there is."""
    options: dict[str, Any] = {"timeout": aiohttp.ClientTimeout(total=seconds, sock_connect=8)}
    method, path = "GET", f"/v1/chat/completions/{request_id}"
    if create is not None:
        method, path = "POST", "/v1/chat/completions"
        options |= {"json": create[0], "headers": {"Idempotency-Key": create[1]}}
    async with call(network, method, path, key, **options) as response:
        told = response.headers.get("x-request-id")
        told = told if is_request_id(told) else None
        if response.status != 200:
            return Whole(told, None, await _refusal(response))
        body = await response.json()
        texts = [c["message"]["content"] for c in sorted(body["choices"], key=lambda c: int(c["index"]))]
        return Whole(body["id"], texts, End("completed", None, body["usage"]["completion_tokens"]))


async def cancel(network: Network, key: str, request_id: str) -> None:
    """Cancel over HTTP."""
    timeout = aiohttp.ClientTimeout(total=10)
    path = f"/v1/chat/completions/{request_id}/cancel"
    async with call(network, "POST", path, key, timeout=timeout) as response:
        if response.status != 200:
            await _refusal(response)
