"""The life of a batch: which state follows which, and when. Pure; times are passed in.

::

    validating ──► in_progress ──► finalizing ──► completed
        │               ├───(late)──► finalizing ──► expired
        ├──► failed     └─(cancel)─► cancelling ───► cancelled
        └──(cancel)──────────────────►

A batch whose time is over, or that is cancelled, begins no more lines; its results are put into files as of
any other, and only then is it over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from contracts.batch import (
    BatchRecord,
    BatchStatus,
    BatchUsage,
    Counts,
    FileRecord,
    LineFault,
    ResultKind,
)

#: For so long after its end a batch can be brought to its end again from what is on the storage, should the
#: store of records lose its last seconds.
SETTLING_MS: Final = 10_000


def _at(batch: BatchRecord, status: BatchStatus, now_ms: int) -> dict[str, object]:
    """Fields of a batch that reaches a state now; the time of one it has reached before stays."""
    return {"status": status, "times": {status: now_ms, **batch.times}}


def taken(batch: BatchRecord, last_run: int) -> BatchRecord:
    """After a runner has taken it in hand: another run begins.

    Args:
        last_run: the last one that has left something on the storage, which the record may have forgotten.
    """
    return batch.model_copy(update={"runs": max(batch.runs, last_run) + 1})


def validated(batch: BatchRecord, total: int, faults: Sequence[LineFault], now_ms: int) -> BatchRecord:
    """After its input was read: begun, or failed. One that is being cancelled only learns its size."""
    if faults and batch.status is BatchStatus.VALIDATING:
        change = _at(batch, BatchStatus.FAILED, now_ms) | {"faults": list(faults)}
    elif faults:
        return batch
    elif batch.status is BatchStatus.VALIDATING:
        change = _at(batch, BatchStatus.IN_PROGRESS, now_ms)
    else:
        change = {}
    return batch.model_copy(update=change | {"counts": Counts(total=total)})


def cancelled(batch: BatchRecord, now_ms: int) -> BatchRecord:
    """After somebody asked for its end; as it was where it is too late for that."""
    if batch.status not in (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS):
        return batch
    change = _at(batch, BatchStatus.CANCELLING, now_ms)
    return batch.model_copy(update=change | {"ending": BatchStatus.CANCELLED})


def progressed(batch: BatchRecord, counts: Counts, usage: BatchUsage) -> BatchRecord:
    """After results of its lines went to the storage."""
    return batch.model_copy(update={"counts": counts, "usage": usage})


def ending_of(batch: BatchRecord, now_ms: int) -> BatchStatus | None:
    """Which end it has to be brought to now, before all its lines have results; None = go on."""
    if batch.ending is not None:
        return batch.ending
    return BatchStatus.EXPIRED if now_ms >= batch.expires_ms else None


def finalizing(batch: BatchRecord, ending: BatchStatus, now_ms: int) -> BatchRecord:
    """When its results are put into files, on the way to ``ending``.

    One that is being cancelled stays so. A cancellation that came before this has the last word.
    """
    if batch.status is BatchStatus.CANCELLING:
        return batch
    change = _at(batch, BatchStatus.FINALIZING, now_ms)
    return batch.model_copy(update=change | {"ending": batch.ending or ending})


def decided(
    batch: BatchRecord, files: Mapping[ResultKind, FileRecord], counts: Counts, usage: BatchUsage
) -> BatchRecord:
    """When its files are whole on the storage; which they are never changes after that."""
    if batch.files:
        return batch
    return batch.model_copy(update={"files": dict(files), "counts": counts, "usage": usage})


def ended(batch: BatchRecord, now_ms: int) -> BatchRecord:
    """When its files are known to everybody."""
    if batch.status.is_final:
        return batch
    return batch.model_copy(update=_at(batch, batch.ending or BatchStatus.COMPLETED, now_ms))


def settles_ms(batch: BatchRecord) -> int:
    """When what it was made from can go, Unix milliseconds; for a batch that is over."""
    return batch.times[batch.status] + SETTLING_MS
