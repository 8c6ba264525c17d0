"""A file's upload: ``multipart/form-data`` that comes in pieces, its content on to the storage as it comes.

The body is parsed by :mod:`python_multipart`, piece by piece; of the file never more than a piece is held.
The fields may come before the file or after it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final

from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from contracts.errors import ApiError, ErrorCode
from infra.file_storage_fsspec import ContentWriter

from ..refusals import invalid
from .lines import BadFile, FileCheck

_FILE: Final = "file"
_MAX_FIELDS: Final = 16
_MAX_FIELD_BYTES: Final = 1024


class UploadForm:
    """The parts of a form as they come.

    Args:
        boundary: from the Content-Type.

    Attributes:
        fields: text fields by name.
        filename: as the client calls the file; None while there is none.
        finished: whether the last part has come.
    """

    def __init__(self, boundary: bytes) -> None:
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.finished = False
        self._content: list[bytes] = []
        self._headers: dict[bytes, bytes] = {}
        self._header = b""
        self._value = b""
        self._name: str | None = None
        self._field = b""
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._part_begins,
                "on_header_field": self._header_field,
                "on_header_value": self._header_value,
                "on_header_end": self._header_ends,
                "on_headers_finished": self._headers_finished,
                "on_part_data": self._part_data,
                "on_part_end": self._part_ends,
                "on_end": self._ends,
            },
        )

    def feed(self, piece: bytes) -> bytes:
        """Parse the next piece of the body; returns what of the file is in it.

        Raises:
            ApiError: 400.
        """
        try:
            self._parser.write(piece)
        except MultipartParseError:
            raise _malformed() from None
        content = b"".join(self._content)
        self._content.clear()
        return content

    def _part_begins(self) -> None:
        self._headers.clear()
        self._field = b""

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header_ends(self) -> None:
        self._headers[self._header.lower()] = self._value
        self._header = self._value = b""

    def _headers_finished(self) -> None:
        kind, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        self._name = _text(options.get(b"name", b""))
        if kind != b"form-data" or not self._name:
            raise _malformed()
        if self._name == _FILE:
            if self.filename is not None:
                raise invalid(_FILE, "must be given once.")
            self.filename = _text(options.get(b"filename", b""))
        elif len(self.fields) >= _MAX_FIELDS or self._name in self.fields:
            raise _malformed()

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        if self._name == _FILE:
            self._content.append(data[start:end])
            return
        self._field += data[start:end]
        if len(self._field) > _MAX_FIELD_BYTES:
            raise _malformed()

    def _part_ends(self) -> None:
        if self._name is not None and self._name != _FILE:
            self.fields[self._name] = _text(self._field)

    def _ends(self) -> None:
        self.finished = True


async def receive_upload(
    request: Request, writer: ContentWriter, check: FileCheck, idle_seconds: float
) -> UploadForm:
    """Write an upload's content; returns the form, whose fields are not looked at here.

    Raises:
        ApiError: 400, 413 or 415.
        StorageUnavailable: the content cannot be written.
        starlette.requests.ClientDisconnect: the client left.
    """
    form = UploadForm(_boundary(request))
    try:
        async for piece in _pieces(request, idle_seconds):
            content = form.feed(piece)
            if content:
                check.feed(content)
                await asyncio.to_thread(writer.write, content)
        if not form.finished:
            raise _malformed()
        if form.filename is None:
            raise invalid(_FILE, "must be given.")
        check.finish()
    except BadFile as error:
        code = ErrorCode.REQUEST_TOO_LARGE if error.too_large else ErrorCode.INVALID_FILE
        raise ApiError(code, str(error), param=_FILE) from None
    return form


async def _pieces(request: Request, idle_seconds: float) -> AsyncIterator[bytes]:
    stream = request.stream()
    while True:
        try:
            async with asyncio.timeout(idle_seconds):
                piece = await anext(stream, None)
        except TimeoutError:
            raise ApiError(ErrorCode.INVALID_REQUEST, "The body did not arrive in time.") from None
        if piece is None:
            return
        yield piece


def _boundary(request: Request) -> bytes:
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not 1 <= len(boundary) <= 70:
        raise ApiError(ErrorCode.UNSUPPORTED_MEDIA_TYPE, "The Content-Type must be multipart/form-data.")
    return boundary


def _text(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise _malformed() from None


def _malformed() -> ApiError:
    return ApiError(ErrorCode.INVALID_REQUEST, "The body is not a valid multipart/form-data form.")
