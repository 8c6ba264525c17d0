"""Which batches a runner takes in hand, and the files whose time is over."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Final

from contracts.token_stream import StreamsUnavailable
from infra.batches_redis import Lease, LeaseLost, OpenBatch
from infra.file_storage_fsspec import StorageUnavailable
from infra.tasks import end_tasks

from .batch_run import BatchRun, BatchServices
from .storage_layout import upload_path

log = logging.getLogger(__name__)

_LOOK_SECONDS: Final = 0.25
_MOST_OPEN: Final = 10_000
#: Batches that one look tries to take in hand, those that others have included.
_CLAIMS: Final = 64
#: After a run that failed, and between two looks at a batch that somebody else has.
_AGAIN_MS: Final = 3_000
_EXPIRY_SECONDS: Final = 30.0
_EXPIRED_AT_ONCE: Final = 100
#: A file that an open batch reads is looked at again after so long.
_USED_MS: Final = 600_000


def in_turn(
    open_batches: Sequence[OpenBatch], in_hand: Collection[OpenBatch], at_once: int
) -> Iterator[OpenBatch]:
    """Batches to take in hand, the oldest first; a tenant gets half of the room at most.

    Args:
        in_hand: looked at again after each batch, so that one which was taken counts.
    """
    tenants = Counter(batch.tenant_digest for batch in in_hand)
    most = max(1, at_once // 2)
    for batch in open_batches:
        if batch in in_hand or tenants[batch.tenant_digest] >= most:
            continue
        yield batch
        tenants[batch.tenant_digest] += batch in in_hand


class BatchRunner:
    """Runs batches until cancelled.

    Args:
        at_once: batches in hand.
    """

    def __init__(self, services: BatchServices, at_once: int) -> None:
        self._services = services
        self._at_once = at_once
        self._runs: dict[OpenBatch, asyncio.Task[None]] = {}
        #: When to look at a batch again, Unix milliseconds; only of batches that are open.
        self._not_before: dict[OpenBatch, int] = {}

    async def run(self) -> None:
        """Work, until cancelled; then batches are given up, for others to go on at once."""
        expiring = asyncio.create_task(self._expire())
        try:
            while True:
                try:
                    await self._look()
                except StreamsUnavailable as error:
                    log.warning("batches not looked at", extra={"error": str(error)[:200]})
                await asyncio.sleep(_LOOK_SECONDS)
        finally:
            await end_tasks([expiring, *self._runs.values()])

    async def _look(self) -> None:
        services = self._services
        now_ms = services.now_ms()
        found = await services.batches.open_batches(_MOST_OPEN)
        known = set(found)
        self._not_before = {b: at for b, at in self._not_before.items() if b in known and at > now_ms}
        waiting = [batch for batch in found if batch not in self._not_before]
        for batch in islice(in_turn(waiting, self._runs, self._at_once), _CLAIMS):
            if len(self._runs) >= self._at_once:
                break
            lease = await services.batches.claim(batch.batch_id, secrets.token_hex(16))
            if lease is None:
                self._not_before[batch] = now_ms + _AGAIN_MS
            else:
                self._runs[batch] = asyncio.create_task(self._run(batch, lease))

    async def _run(self, batch: OpenBatch, lease: Lease) -> None:
        again_ms: int | None = self._services.now_ms() + _AGAIN_MS
        facts = {"batch_id": batch.batch_id}
        try:
            again_ms = await BatchRun(self._services, batch.batch_id, lease).run()
            if again_ms is None:
                await self._services.batches.close(batch)
        except LeaseLost:
            log.warning("a batch is somebody else's now", extra=facts)
        except (StreamsUnavailable, StorageUnavailable) as error:
            log.warning("a batch waits", extra=facts | {"error": str(error)[:200]})
        except Exception:
            log.exception("a batch failed to run", extra=facts)
        finally:
            del self._runs[batch]
            if again_ms is not None:
                self._not_before[batch] = again_ms
            with suppress(LeaseLost, StreamsUnavailable):
                await lease.give_up()

    async def _expire(self) -> None:
        """Remove the files whose time is over, for ever."""
        while True:
            try:
                await expire_files(self._services)
            except (StreamsUnavailable, StorageUnavailable) as error:
                log.warning("expired files not removed", extra={"error": str(error)[:200]})
            await asyncio.sleep(_EXPIRY_SECONDS)


async def expire_files(services: BatchServices) -> None:
    """Remove the files whose time is over now.

    Raises:
        StreamsUnavailable, StorageUnavailable: some are left.
    """
    while True:
        now_ms = services.now_ms()
        found = await services.files.expired(now_ms, _EXPIRED_AT_ONCE)
        for file in found:
            if await services.files.is_used(file.file_id):
                await services.files.postpone(file, now_ms + _USED_MS)
                continue
            path = file.record.path if file.record is not None else upload_path(file.file_id)
            await services.storage.delete(path)
            await services.files.forget(file.tenant_digest, file.file_id)
        if len(found) < _EXPIRED_AT_ONCE:
            return
