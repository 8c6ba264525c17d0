"""The calls that ``headrace batch`` makes: files and batches over HTTP, nothing whole in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any, Final
from urllib.parse import quote

import httpx

from ..stack.errors import StackError

_TIMEOUT: Final = httpx.Timeout(30.0, connect=10.0)
_CHUNK: Final = 256 * 1024


class BatchApi:
    """A gateway's files and batches, with one key.

    Every method raises :class:`StackError` with one line for people: what the gateway refused, or that it
    cannot be reached.
    """

    def __init__(self, url: str, key: str) -> None:
        self._client = httpx.Client(
            base_url=f"{url.rstrip('/')}/v1",
            headers={"Authorization": f"Bearer {key}"},
            timeout=_TIMEOUT,
            trust_env=False,
        )
        self._url = url

    def close(self) -> None:
        """Disconnect."""
        self._client.close()

    def upload(self, name: str, content: IO[bytes]) -> str:
        """Upload the input of a batch; returns the file's id."""
        with self._told():
            answer = self._client.post(
                "/files",
                data={"purpose": "batch"},
                files={"file": (name, content, "application/jsonl")},
                timeout=httpx.Timeout(600.0, connect=10.0),
            )
        return str(_checked(answer)["id"])

    def create(self, file_id: str, endpoint: str) -> dict[str, Any]:
        """Begin a batch of a file."""
        body = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": "24h"}
        with self._told():
            return _checked(self._client.post("/batches", json=body))

    def get(self, batch_id: str) -> dict[str, Any]:
        """A batch as it is now."""
        with self._told():
            return _checked(self._client.get(f"/batches/{quote(batch_id, safe='')}"))

    def cancel(self, batch_id: str) -> dict[str, Any]:
        """End a batch; what is done stays."""
        with self._told():
            return _checked(self._client.post(f"/batches/{quote(batch_id, safe='')}/cancel"))

    def download(self, file_id: str, write: Callable[[bytes], object]) -> None:
        """Pass on the content of a file, part by part."""
        path = f"/files/{quote(file_id, safe='')}/content"
        with self._told(), self._client.stream("GET", path) as answer:
            if answer.is_error:
                answer.read()
                _checked(answer)
            for part in answer.iter_bytes(_CHUNK):
                write(part)

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise StackError(f"{self._url}: {type(error).__name__}: {error}") from None


def _checked(answer: httpx.Response) -> dict[str, Any]:
    try:
        body = answer.json()
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise StackError(
            f"{answer.url}: status {answer.status_code}, and no JSON object: is this Headrace?"
        )
    if answer.is_error:
        error = body.get("error")
        message = error.get("message") if isinstance(error, dict) else None
        raise StackError(f"{message or 'refused'} (status {answer.status_code})")
    return body
