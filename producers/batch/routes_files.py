"""``/v1/files``: upload, list, look at, read and delete a tenant's files."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from typing import Final

from fastapi import APIRouter, Request
from starlette.responses import Response, StreamingResponse

from contracts.batch import FilePurpose, FileRecord, tenant_digest
from contracts.errors import ApiError, ErrorCode
from contracts.identity import Principal
from contracts.token_stream import StreamsUnavailable
from infra.file_storage_fsspec import ContentMissing, FileStorage
from infra.files_redis import Files
from infra.live_settings import LiveSettings
from infra.settings import Settings
from streaming_edge.protocols import Door

from ..api_document import describe
from ..http_auth import authenticate
from ..http_errors import JsonResponse
from ..paging import (
    AFTER_ID,
    cut_page,
    is_ascending,
    limit_parameter,
    order_parameter,
    page_limit,
)
from ..request_times import unix_ms
from .ids import is_file_id, make_file_id
from .lines import FileCheck
from .options import PURPOSE, UPLOAD_SCHEMA, parse_upload_fields, wanted_purpose
from .shapes import FileDeleted, FileList, FileObject, file_object
from .storage_layout import upload_path
from .upload import receive_upload

_TAG: Final = "Files"
_MOST: Final = 10_000
#: An upload that takes longer is refused.
_UPLOAD_SECONDS: Final = 3_600
#: What a form needs beside the content.
_FORM_BYTES: Final = 64 * 1024


class FileDesk:
    """What the routes do: files of one tenant at a time; unknown, foreign and expired ones look the same."""

    def __init__(self, live: LiveSettings, files: Files, storage: FileStorage) -> None:
        self._live = live
        self._files = files
        self._storage = storage

    async def upload(self, principal: Principal, request: Request) -> FileRecord:
        """Take a file in; whatever goes wrong, nothing of it stays.

        Raises:
            ApiError: it is refused.
        """
        settings = self._live.current
        await self._check_room(principal, settings, request)
        file_id, now_ms = make_file_id(secrets.token_bytes(16)), unix_ms()
        path = upload_path(file_id)
        await self._files.begin(principal.tenant, file_id, now_ms + 2000 * _UPLOAD_SECONDS)
        try:
            check = FileCheck(
                settings.files.max_bytes, settings.batch.max_lines, settings.batch.max_line_bytes
            )
            async with self._storage.new(path) as writer, asyncio.timeout(_UPLOAD_SECONDS):
                form = await receive_upload(request, writer, check, settings.files.idle_seconds)
                options = parse_upload_fields(form.fields, form.filename or "")
        except BaseException as error:
            # Content is gone; what is left in the index is looked at again there.
            with suppress(StreamsUnavailable):
                await self._files.forget(tenant_digest(principal.tenant), file_id)
            if isinstance(error, TimeoutError):
                message = "The body did not arrive in time."
                raise ApiError(ErrorCode.INVALID_REQUEST, message) from None
            raise
        life_seconds = options.life_seconds or settings.files.retention_seconds
        record = FileRecord(
            id=file_id,
            tenant=principal.tenant,
            filename=options.filename,
            purpose=FilePurpose.BATCH,
            size_bytes=writer.size_bytes,
            created_ms=now_ms,
            expires_ms=now_ms + 1000 * life_seconds,
            path=path,
        )
        await self._files.add(record)
        return record

    async def _check_room(self, principal: Principal, settings: Settings, request: Request) -> None:
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > settings.files.max_bytes + _FORM_BYTES:
            message = f"The file is larger than {settings.files.max_bytes} bytes."
            raise ApiError(ErrorCode.REQUEST_TOO_LARGE, message, param="file")
        there = await self._files.all(principal.tenant)
        used = sum(record.size_bytes for record in there)
        if len(there) >= settings.files.tenant_files or used >= settings.files.tenant_bytes:
            raise ApiError(ErrorCode.STORAGE_QUOTA, "You store as much as you may; delete files first.")

    async def listed(self, principal: Principal, purpose: FilePurpose | None) -> list[FileRecord]:
        """The files, the oldest first."""
        now_ms = unix_ms()
        found = await self._files.all(principal.tenant)
        return [f for f in found if f.expires_ms > now_ms and purpose in (None, f.purpose)]

    async def get(self, principal: Principal, file_id: str) -> FileRecord:
        """A file.

        Raises:
            ApiError: 404.
        """
        record = await self._files.get(principal.tenant, file_id) if is_file_id(file_id) else None
        if record is None or record.expires_ms <= unix_ms():
            raise _not_found()
        return record

    async def content(self, record: FileRecord) -> AsyncIterator[bytes]:
        """The content of a file in blocks, once it is certain that it can be read.

        Raises:
            ApiError: 404: it was deleted just now.
            StorageUnavailable: it cannot be read.
        """
        blocks = self._storage.blocks(record.path)
        try:
            first = await anext(blocks, b"")
        except ContentMissing:
            raise _not_found() from None

        async def rest() -> AsyncIterator[bytes]:
            async with aclosing(blocks):
                yield first
                async for block in blocks:
                    yield block

        return rest()

    async def delete(self, principal: Principal, file_id: str) -> None:
        """Delete a file.

        Raises:
            ApiError: 404; 409 while a batch reads it.
        """
        record = await self.get(principal, file_id)
        if await self._files.is_used(file_id):
            raise ApiError(ErrorCode.FILE_IN_USE, "A batch reads this file; wait for it or cancel it.")
        await self._storage.delete(record.path)
        await self._files.forget(tenant_digest(principal.tenant), file_id)


def make_files_router(door: Door, desk: FileDesk) -> APIRouter:
    """The routes under ``/v1/files``."""
    router = APIRouter(prefix="/v1/files", redirect_slashes=False)

    @router.post(
        "",
        **describe(
            "Upload a file",
            tag=_TAG,
            body=UPLOAD_SCHEMA,
            body_media_type="multipart/form-data",
            success=FileObject,
            errors=(
                ErrorCode.INVALID_REQUEST,
                ErrorCode.INVALID_VALUE,
                ErrorCode.INVALID_FILE,
                ErrorCode.REQUEST_TOO_LARGE,
                ErrorCode.UNSUPPORTED_MEDIA_TYPE,
                ErrorCode.STORAGE_QUOTA,
                ErrorCode.UNAVAILABLE,
            ),
        ),
    )
    async def upload(request: Request) -> Response:
        return JsonResponse(file_object(await desk.upload(authenticate(request, door), request)))

    @router.get(
        "",
        **describe(
            "List files",
            tag=_TAG,
            success=FileList,
            parameters=(AFTER_ID, limit_parameter(_MOST, _MOST), order_parameter(), PURPOSE),
            errors=(ErrorCode.INVALID_VALUE, ErrorCode.NOT_FOUND, ErrorCode.UNAVAILABLE),
        ),
    )
    async def list_files(request: Request) -> Response:
        principal = authenticate(request, door)
        query = request.query_params
        found = await desk.listed(principal, wanted_purpose(query))
        limit, ascending = page_limit(query, _MOST, _MOST), is_ascending(query)
        objects = [file_object(record) for record in found]
        return JsonResponse(cut_page(objects, query.get("after"), limit, ascending=ascending))

    @router.get(
        "/{file_id}",
        **describe(
            "Look at a file",
            tag=_TAG,
            success=FileObject,
            errors=(ErrorCode.NOT_FOUND, ErrorCode.UNAVAILABLE),
        ),
    )
    async def retrieve(request: Request, file_id: str) -> Response:
        return JsonResponse(file_object(await desk.get(authenticate(request, door), file_id)))

    @router.get(
        "/{file_id}/content",
        **describe(
            "Read a file's content",
            tag=_TAG,
            success={"type": "string", "format": "binary"},
            media_type="application/octet-stream",
            errors=(ErrorCode.NOT_FOUND, ErrorCode.UNAVAILABLE),
        ),
    )
    async def content(request: Request, file_id: str) -> Response:
        record = await desk.get(authenticate(request, door), file_id)
        return StreamingResponse(
            await desk.content(record),
            media_type="application/octet-stream",
            headers={"content-length": str(record.size_bytes)},
        )

    @router.delete(
        "/{file_id}",
        **describe(
            "Delete a file",
            tag=_TAG,
            success=FileDeleted,
            errors=(ErrorCode.NOT_FOUND, ErrorCode.FILE_IN_USE, ErrorCode.UNAVAILABLE),
        ),
    )
    async def delete(request: Request, file_id: str) -> Response:
        await desk.delete(authenticate(request, door), file_id)
        return JsonResponse({"id": file_id, "object": "file", "deleted": True})

    return router


def _not_found() -> ApiError:
    return ApiError(ErrorCode.NOT_FOUND, "There is no such file.")
