"""``/v1/batches``: create, look at, list and cancel a tenant's batches. The batch runner does the rest."""

from __future__ import annotations

import secrets
from typing import Final

from fastapi import APIRouter, Request
from starlette.responses import Response

from contracts.batch import BatchRecord, BatchStatus, FilePurpose, FileRecord
from contracts.errors import ApiError, ErrorCode
from contracts.identity import Principal
from infra.batches_redis import Batches
from infra.files_redis import MAX_LIFE_SECONDS, Files
from infra.live_settings import LiveSettings
from streaming_edge.protocols import Door

from ..api_document import describe
from ..api_parameters import IDEMPOTENCY_KEY
from ..http_auth import authenticate
from ..http_body import read_json
from ..http_errors import JsonResponse
from ..idempotency import Once, once_of
from ..paging import AFTER_ID, limit_parameter, list_object, page_limit
from ..refusals import invalid
from ..request_times import unix_ms
from . import life
from .ids import is_batch_id, is_file_id, make_batch_id, repeatable_batch_id
from .options import WINDOW_MS, BatchBody, parse_batch_body
from .shapes import BatchList, BatchObject, batch_object

_TAG: Final = "Batches"
_MOST: Final = 100
_DEFAULT: Final = 20


class BatchDesk:
    """What the routes do: batches of one tenant at a time; unknown and foreign ones look the same."""

    def __init__(self, live: LiveSettings, files: Files, batches: Batches) -> None:
        self._live = live
        self._files = files
        self._batches = batches

    async def create(self, principal: Principal, body: BatchBody, once: Once | None) -> BatchRecord:
        """Make a batch, for a runner to find; a call that comes again gets the one it made.

        Raises:
            ApiError: it is refused.
        """
        batch_id = make_batch_id(secrets.token_bytes(16))
        if once is not None:
            batch_id = repeatable_batch_id(principal.tenant, once.key)
            made = await self._batches.get(batch_id)
            if made is not None:
                return _same(made, once)
        settings, now_ms = self._live.current, unix_ms()
        line_tier = settings.line_tier(principal.tier)
        if line_tier is None:
            raise ApiError(ErrorCode.UNSUPPORTED, "There is no tier for batches here.")
        if await self._batches.count(principal.tenant) >= settings.batch.tenant_batches:
            raise ApiError(ErrorCode.STORAGE_QUOTA, "You have as many batches as you may.")
        record = await self._input(principal, body.input_file_id, batch_id, now_ms)
        lifetime = body.output_expires_after
        batch = BatchRecord(
            id=batch_id,
            tenant=principal.tenant,
            key_id=principal.key_id,
            tier=principal.tier,
            line_tier=line_tier,
            endpoint=body.endpoint,
            input_file_id=record.id,
            input_path=record.path,
            completion_window=body.completion_window,
            window_ms=WINDOW_MS,
            created_ms=now_ms,
            output_seconds=lifetime.seconds if lifetime else settings.files.retention_seconds,
            metadata=body.metadata,
            body_digest=once.digest if once is not None else None,
        )
        made = await self._batches.create(batch)
        return made if once is None else _same(made, once)

    async def _input(self, principal: Principal, file_id: str, batch_id: str, now_ms: int) -> FileRecord:
        """The input of a batch, which cannot be deleted from now on."""
        record = await self._file(principal, file_id, now_ms)
        await self._files.use(file_id, batch_id, WINDOW_MS // 1000 + MAX_LIFE_SECONDS)
        try:
            await self._file(principal, file_id, now_ms)  # not deleted just before
        except ApiError:
            await self._files.release(file_id, batch_id)
            raise
        return record

    async def _file(self, principal: Principal, file_id: str, now_ms: int) -> FileRecord:
        record = await self._files.get(principal.tenant, file_id) if is_file_id(file_id) else None
        if record is None or record.expires_ms <= now_ms:
            raise ApiError(ErrorCode.NOT_FOUND, "There is no such file.", param="input_file_id")
        if record.purpose is not FilePurpose.BATCH:
            raise invalid("input_file_id", "must be a file with purpose batch.")
        return record

    async def get(self, principal: Principal, batch_id: str) -> BatchRecord:
        """A batch.

        Raises:
            ApiError: 404.
        """
        batch = await self._batches.get(batch_id) if is_batch_id(batch_id) else None
        if batch is None or batch.tenant != principal.tenant:
            raise ApiError(ErrorCode.NOT_FOUND, "There is no such batch.")
        return batch

    async def page(
        self, principal: Principal, after: str | None, limit: int
    ) -> tuple[list[BatchRecord], bool]:
        """A page of the batches, the newest first, and whether there are more.

        Raises:
            ApiError: 404: there is no batch ``after``.
        """
        last = None if after is None else await self.get(principal, after)
        found = await self._batches.page(principal.tenant, last, limit + 1)
        return found[:limit], len(found) > limit

    async def cancel(self, principal: Principal, batch_id: str) -> BatchRecord:
        """Let a batch begin no more lines; one that is cancelled already stays as it is.

        Raises:
            ApiError: 404; 409 when it is too late for that.
        """
        await self.get(principal, batch_id)
        batch = await self._batches.change(batch_id, lambda b: life.cancelled(b, unix_ms()))
        if batch is None:
            raise ApiError(ErrorCode.NOT_FOUND, "There is no such batch.")
        if batch.status not in (BatchStatus.CANCELLING, BatchStatus.CANCELLED):
            message = f"The batch is {batch.status}: it cannot be cancelled any more."
            raise ApiError(ErrorCode.BATCH_OVER, message)
        return batch


def make_batches_router(live: LiveSettings, door: Door, desk: BatchDesk) -> APIRouter:
    """The routes under ``/v1/batches``."""
    router = APIRouter(prefix="/v1/batches", redirect_slashes=False)

    @router.post(
        "",
        **describe(
            "Create a batch",
            tag=_TAG,
            body=BatchBody,
            success=BatchObject,
            parameters=(IDEMPOTENCY_KEY,),
            errors=(
                ErrorCode.NOT_FOUND,
                ErrorCode.IDEMPOTENCY_MISMATCH,
                ErrorCode.UNSUPPORTED,
                ErrorCode.STORAGE_QUOTA,
                ErrorCode.UNAVAILABLE,
            ),
        ),
    )
    async def create(request: Request) -> Response:
        principal = authenticate(request, door)
        raw = await read_json(request, live.current.http.max_body_bytes)
        once = once_of(request.headers.get("idempotency-key"), raw)
        batch = await desk.create(principal, parse_batch_body(raw), once)
        return JsonResponse(batch_object(batch))

    @router.get(
        "",
        **describe(
            "List batches",
            tag=_TAG,
            success=BatchList,
            parameters=(AFTER_ID, limit_parameter(_MOST, _DEFAULT)),
            errors=(ErrorCode.INVALID_VALUE, ErrorCode.NOT_FOUND, ErrorCode.UNAVAILABLE),
        ),
    )
    async def list_batches(request: Request) -> Response:
        principal = authenticate(request, door)
        query = request.query_params
        found, more = await desk.page(principal, query.get("after"), page_limit(query, _MOST, _DEFAULT))
        return JsonResponse(list_object([batch_object(batch) for batch in found], more))

    @router.get(
        "/{batch_id}",
        **describe(
            "Look at a batch",
            tag=_TAG,
            success=BatchObject,
            errors=(ErrorCode.NOT_FOUND, ErrorCode.UNAVAILABLE),
        ),
    )
    async def retrieve(request: Request, batch_id: str) -> Response:
        return JsonResponse(batch_object(await desk.get(authenticate(request, door), batch_id)))

    @router.post(
        "/{batch_id}/cancel",
        **describe(
            "Cancel a batch",
            tag=_TAG,
            success=BatchObject,
            errors=(ErrorCode.NOT_FOUND, ErrorCode.BATCH_OVER, ErrorCode.UNAVAILABLE),
        ),
    )
    async def cancel(request: Request, batch_id: str) -> Response:
        return JsonResponse(batch_object(await desk.cancel(authenticate(request, door), batch_id)))

    return router


def _same(batch: BatchRecord, once: Once) -> BatchRecord:
    """The batch that a call made when it came before.

    Raises:
        ApiError: that call had another body.
    """
    if batch.body_digest != once.digest:
        raise ApiError(
            ErrorCode.IDEMPOTENCY_MISMATCH, "This idempotency key was used with another body."
        )
    return batch
