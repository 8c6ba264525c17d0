"""One row's load, in a process of its own: ``python -m bench.load http|ws TARGET CLIENTS REQUESTS OUT``.

Writes one JSON object: the run and this process's CPU seconds. The HTTP side reads the socket by hand, so
that the client costs little of the two cores it shares with what it measures.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
import urllib.parse
from collections.abc import Awaitable, Callable
from pathlib import Path

import orjson
import uvloop
import websockets

from infra.settings import DEV_PAID_KEY

from .measure import Run, Timeline, closed_loop

TOKENS = 32


def chat_body(number: int, **more: object) -> dict[str, object]:
    """A chat completion body whose prompt no other request of the run has."""
    prompt = f"Say hello. ({number})"
    return {
        "model": "default",
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": TOKENS,
        "temperature": 0,
        **more,
    }


async def over_http(base: str, number: int) -> Timeline:
    """One streamed completion over a new HTTP connection."""
    return await stream_http(base, DEV_PAID_KEY, chat_body(number, stream=True))


async def stream_http(base: str, key: str, request: dict[str, object]) -> Timeline:
    """One streamed completion over a new HTTP connection.

    Raises:
        RuntimeError: it was refused, or did not come to its end.
    """
    url = urllib.parse.urlparse(base)
    body = orjson.dumps(request)
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {url.netloc}\r\n"
        f"Authorization: Bearer {key}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    timeline = Timeline()
    reader, writer = await asyncio.open_connection(url.hostname, url.port, limit=1 << 20)
    try:
        writer.write(head.encode() + body)
        status = int((await reader.readline()).split()[1])
        finished = False
        async for line in reader:
            if not line.startswith(b"data: "):
                continue
            if line.startswith(b"data: [DONE]"):
                finished = True
                break
            event = orjson.loads(line[6:])
            if event.get("choices") and event["choices"][0]["delta"].get("content"):
                timeline.chunk()
        if status != 200 or not finished or not timeline.chunks:
            raise RuntimeError(f"status {status}, {len(timeline.chunks)} chunks, end {finished}")
    finally:
        writer.close()
    return timeline


async def over_websocket(url: str, number: int) -> Timeline:
    """One reply over a new websocket."""
    headers = {"Authorization": f"Bearer {DEV_PAID_KEY}"}
    timeline = Timeline()
    connection = websockets.connect(
        url, additional_headers=headers, compression=None, proxy=None, ping_interval=None
    )
    async with connection as socket:
        timeline.sent = time.perf_counter()
        frame = {"type": "chat.create", "ref": "1", "body": chat_body(number)}
        await socket.send(orjson.dumps(frame).decode())
        while True:
            event = orjson.loads(await socket.recv())
            if event["type"] == "stream.text":
                timeline.chunk()
            elif event["type"] == "stream.end":
                if event["status"] != "completed":
                    raise RuntimeError(str(event))
                return timeline
            elif event["type"] == "error":
                raise RuntimeError(str(event))


ROADS: dict[str, Callable[[str, int], Awaitable[Timeline]]] = {
    "http": over_http,
    "ws": over_websocket,
}


async def run(road: str, target: str, clients: int, requests: int) -> Run:
    """Drive one road."""
    return await closed_loop(lambda number: ROADS[road](target, number), clients, requests)


def main() -> None:
    """Command line."""
    road, target, clients, requests, output = sys.argv[1:]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        result = runner.run(run(road, target, int(clients), int(requests)))
    Path(output).write_text(json.dumps({"run": result.to_json(), "cpu_seconds": time.process_time()}))


if __name__ == "__main__":
    main()
