"""Files over HTTP: the official client, forms that are none, limits, and uploads that are cut off."""

from __future__ import annotations

import codecs
import io
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from infra.settings import DEV_FREE_KEY, DEV_PAID_KEY, Settings
from tests.integration.batch_fixture import chat_line
from tests.integration.gateway_fixture import gateway_in_a_thread
from tests.stack_process import eventually

MAX_BYTES = 20_000
AUTH = {"Authorization": f"Bearer {DEV_PAID_KEY}"}


@dataclass
class Shelf:
    url: str
    folder: Path

    def client(self, api_key: str = DEV_PAID_KEY) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=20)

    def post(self, **form: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/files", headers=AUTH, timeout=20, **form)

    def upload(self, content: bytes, name: str = "in.jsonl") -> openai.types.FileObject:
        return self.client().files.create(file=(name, io.BytesIO(content)), purpose="batch")

    def stored(self) -> list[Path]:
        return [path for path in self.folder.rglob("*") if path.is_file()]


@pytest.fixture(scope="module")
def shelf(
    module_settings: Callable[..., Settings], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Shelf]:
    folder = tmp_path_factory.mktemp("files")
    settings = module_settings(
        files={"url": str(folder), "max_bytes": MAX_BYTES, "tenant_files": 8, "idle_seconds": 1.0},
        batch={"max_lines": 50, "max_line_bytes": 5_000},
    )
    with gateway_in_a_thread(settings) as gateway:
        yield Shelf(gateway.url, folder)


@pytest.fixture(autouse=True)
def empty(shelf: Shelf) -> Iterator[None]:
    yield
    client = shelf.client()
    for file in client.files.list().data:
        client.files.delete(file.id)
    assert shelf.stored() == []


def test_the_official_client_uploads_reads_lists_and_deletes_K1_K2(shelf: Shelf) -> None:
    content = codecs.BOM_UTF8 + chat_line("ünï 你好") + b"\r\n" + chat_line("b")
    client = shelf.client()
    file = shelf.upload(content, "n ä\tme.jsonl")
    assert (file.object, file.bytes, file.purpose) == ("file", len(content), "batch")
    assert file.status == "processed"
    assert client.files.retrieve(file.id) == file
    assert client.files.content(file.id).read() == content
    assert client.files.list().data == [file]
    assert client.files.delete(file.id).deleted
    for gone in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            gone(file.id)


def test_files_are_listed_in_pages_in_both_orders(shelf: Shelf) -> None:
    ids = [shelf.upload(chat_line(str(n))).id for n in range(3)]
    client = shelf.client()
    first = client.files.list(limit=2, order="asc")
    listed = [file.id for file in client.files.list(order="asc")]
    assert sorted(listed) == sorted(ids)
    assert [file.id for file in first.data] == listed[:2]
    assert first.has_more
    rest = client.files.list(after=first.data[-1].id, order="asc")
    assert [file.id for file in rest.data] == listed[2:]
    assert [file.id for file in client.files.list()] == listed[::-1]
    assert client.files.list(purpose="batch_output").data == []


@pytest.mark.parametrize("query", ["limit=0", "limit=x", "limit=10001", "order=up", "purpose=vision"])
def test_a_list_that_cannot_be_is_refused_C10(shelf: Shelf, query: str) -> None:
    answer = httpx.get(f"{shelf.url}/v1/files?{query}", headers=AUTH)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == query.partition("=")[0]


def test_a_lifetime_is_taken_from_the_form(shelf: Shelf) -> None:
    lifetime = {"anchor": "created_at", "seconds": 3600}
    file = shelf.client().files.create(
        file=("in.jsonl", chat_line("a")),
        purpose="batch",
        expires_after=lifetime,  # type: ignore[arg-type]
    )
    assert file.expires_at is not None
    assert file.expires_at - file.created_at == 3600


FILE = {"file": ("in.jsonl", chat_line("a"))}
BATCH = {"purpose": "batch"}


@pytest.mark.parametrize(
    ("status", "code", "param", "form"),
    [
        (400, "invalid_value", "purpose", {"files": FILE, "data": {"purpose": "assistants"}}),
        (400, "invalid_value", "purpose", {"files": FILE}),
        (400, "invalid_value", "file", {"files": {"other": ("x", b"x")}, "data": BATCH}),
        (400, "invalid_value", "file", {"files": [*FILE.items(), *FILE.items()], "data": BATCH}),
        (
            400,
            "invalid_value",
            "expires_after",
            {"files": FILE, "data": BATCH | {"expires_after[seconds]": "5"}},
        ),
        (400, "invalid_request", None, {"files": FILE, "data": {"purpose": "x" * 2000}}),
        (415, "unsupported_media_type", None, {"json": {}}),
        (415, "unsupported_media_type", None, {"content": b"x"}),
        (
            400,
            "invalid_request",
            None,
            {
                "content": b"nothing",
                "headers": AUTH | {"content-type": "multipart/form-data; boundary=b"},
            },
        ),
        (400, "invalid_file", "file", {"files": {"file": ("x", b"")}, "data": BATCH}),
        (
            400,
            "invalid_file",
            "file",
            {"files": {"file": ("x", chat_line("a").decode().encode("utf-16-le"))}, "data": BATCH},
        ),
    ],
)
def test_an_upload_that_is_none_is_refused_and_leaves_nothing_C10_K2(
    shelf: Shelf, status: int, code: str, param: str | None, form: dict[str, Any]
) -> None:
    headers = form.pop("headers", AUTH)
    answer = httpx.post(f"{shelf.url}/v1/files", timeout=20, headers=headers, **form)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == (code, param)
    assert shelf.stored() == []


@pytest.mark.parametrize(
    "content",
    [
        b"".join(chat_line(str(n), "x" * 300) for n in range(49)),
        b"".join(b'{"custom_id": "%d"}\n' % n for n in range(51)),
        chat_line("long", "x" * 6_000),
    ],
    ids=["bytes", "lines", "line"],
)
def test_what_is_over_a_limit_is_a_413_with_and_without_a_length_K14(
    shelf: Shelf, content: bytes
) -> None:
    form = httpx.Request("POST", shelf.url, files={"file": ("x", content)}, data=BATCH)
    body = form.read()

    def pieces() -> Iterator[bytes]:
        for start in range(0, len(body), 1_000):
            yield body[start : start + 1_000]

    headers = AUTH | {"content-type": form.headers["content-type"]}
    for sent in (body, pieces()):
        answer = httpx.post(f"{shelf.url}/v1/files", headers=headers, content=sent, timeout=20)
        assert answer.status_code == 413, answer.text
        assert answer.json()["error"]["code"] == "request_too_large"
    assert shelf.stored() == []


def test_a_body_far_over_the_limit_is_refused_before_it_comes_K14(shelf: Shelf) -> None:
    url = urlsplit(shelf.url)
    head = (
        "POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=b\r\n"
        f"Authorization: Bearer {DEV_PAID_KEY}\r\nContent-Length: 201000000\r\n\r\n"
    )
    with socket.create_connection((url.hostname or "", url.port or 0), timeout=10) as connection:
        connection.sendall(head.encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 413")


def test_an_upload_that_is_cut_off_or_stalls_leaves_nothing(shelf: Shelf) -> None:
    url = urlsplit(shelf.url)
    begun = (
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n' + chat_line("a") * 20
    )
    head = (
        "POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=b\r\n"
        f"Authorization: Bearer {DEV_PAID_KEY}\r\nContent-Length: {len(begun) + 5000}\r\n\r\n"
    )
    for stall in (False, True):
        with socket.create_connection((url.hostname or "", url.port or 0), timeout=10) as connection:
            connection.sendall(head.encode() + begun)
            eventually(shelf.stored, 5, "the content comes in")
            if stall:
                assert connection.recv(100).startswith(b"HTTP/1.1 400")
        eventually(lambda: not shelf.stored(), 5, "nothing is left of it")
    assert shelf.client().files.list().data == []


def test_somebody_elses_file_is_not_there_K16(shelf: Shelf) -> None:
    file = shelf.upload(chat_line("a"))
    other = shelf.client(DEV_FREE_KEY)
    for call in (other.files.retrieve, other.files.content, other.files.delete):
        for file_id in (file.id, "file-" + "0" * 32, "file-..", "file-" + "x" * 5000):
            with pytest.raises(openai.NotFoundError):
                call(file_id)
    assert other.files.list().data == []


def test_a_tenant_that_stores_as_much_as_it_may_uploads_no_more_K14(shelf: Shelf) -> None:
    with ThreadPoolExecutor(4) as pool:
        ids = {file.id for file in pool.map(shelf.upload, [chat_line(str(n)) for n in range(8)])}
    assert len(ids) == 8
    with pytest.raises(openai.PermissionDeniedError) as caught:
        shelf.upload(chat_line("more"))
    assert caught.value.code == "storage_quota_exceeded"
    shelf.client(DEV_FREE_KEY).files.delete(
        shelf.client(DEV_FREE_KEY).files.create(file=("x", chat_line("a")), purpose="batch").id
    )
