"""Records of batches and files in a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import redis.asyncio as redis
from redis import Redis as SyncRedis

from contracts.batch import BatchRecord, BatchStatus, Counts, FilePurpose, FileRecord, tenant_digest
from infra.batches_redis import Batches, LeaseLost, OpenBatch
from infra.file_storage_fsspec import FileStorage
from infra.files_redis import Files
from infra.settings import BatchSettings
from producers.batch.batch_run import BatchServices
from producers.batch.runner import expire_files
from producers.batch.storage_layout import upload_path
from tests.batches import make_batch

DIGEST = tenant_digest("t1")


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[redis.Redis]:
    client = redis.Redis.from_url(redis_url)
    yield client
    await client.aclose()


@pytest.fixture
def batches(client: redis.Redis) -> Batches:
    return Batches(client, BatchSettings(lease_seconds=30.0))


def batch(number: int, tenant: str = "t1") -> BatchRecord:
    return make_batch(id=f"batch_{number:032x}", tenant=tenant, created_ms=1_000 + number)


def counted(record: BatchRecord) -> BatchRecord:
    counts = Counts(total=record.counts.total + 1)
    return record.model_copy(update={"counts": counts})


async def test_a_batch_is_found_by_its_id_and_by_runners(batches: Batches) -> None:
    record = make_batch(metadata={"a": "b"}, times={BatchStatus.FAILED: 1})
    assert await batches.create(record) == record
    assert await batches.create(make_batch(tier="other")) == record
    assert await batches.get(record.id) == record
    assert await batches.open_batches(10) == [OpenBatch(record.id, DIGEST)]
    await batches.close(OpenBatch(record.id, DIGEST))
    assert await batches.open_batches(10) == []
    assert await batches.get(record.id) == record


async def test_changes_that_meet_are_all_made(batches: Batches) -> None:
    record = make_batch()
    await batches.create(record)
    await asyncio.gather(*(batches.change(record.id, counted) for _ in range(8)))
    found = await batches.get(record.id)
    assert found is not None
    assert found.counts.total == 8


async def test_one_runner_has_a_batch_in_hand_and_only_it_changes_it(
    batches: Batches, client: redis.Redis
) -> None:
    record = make_batch()
    await batches.create(record)
    lease = await batches.claim(record.id, "one")
    assert lease is not None
    assert await batches.claim(record.id, "two") is None
    await lease.renew()
    await batches.change(record.id, counted, lease)
    await client.delete(f"hr:{{{record.id}}}:runner")  # it was silent for too long
    other = await batches.claim(record.id, "two")
    assert other is not None
    for late in (lease.renew(), lease.give_up(), batches.change(record.id, counted, lease)):
        with pytest.raises(LeaseLost):
            await late
    await batches.change(record.id, counted, other)
    found = await batches.get(record.id)
    assert found is not None
    assert found.counts.total == 2


async def test_a_lease_that_ends_between_look_and_write_changes_nothing(
    batches: Batches, redis_url: str
) -> None:
    record = make_batch()
    await batches.create(record)
    lease = await batches.claim(record.id, "one")
    assert lease is not None
    with SyncRedis.from_url(redis_url) as direct:

        def decide(found: BatchRecord) -> BatchRecord:
            direct.set(f"hr:{{{record.id}}}:runner", "two")
            return counted(found)

        with pytest.raises(LeaseLost):
            await batches.change(record.id, decide, lease)
    assert await batches.get(record.id) == record


async def test_pages_hold_a_tenants_batches_newest_first_without_forgotten_ones(
    batches: Batches, client: redis.Redis
) -> None:
    for number in range(7):
        await batches.create(batch(number))
    await batches.create(batch(99, "t2"))
    for number in (0, 4, 5):
        await client.delete(f"hr:{{{batch(number).id}}}:batch")
    first = await batches.page("t1", None, 2)
    assert [b.id for b in first] == [batch(6).id, batch(3).id]
    rest = await batches.page("t1", first[-1], 10)
    assert [b.id for b in rest] == [batch(2).id, batch(1).id]
    assert await batches.count("t1") == 4


def file(number: int, **changes: object) -> FileRecord:
    raw: dict[str, object] = {
        "id": f"file-{number:032x}",
        "tenant": "t1",
        "filename": "in.jsonl",
        "purpose": FilePurpose.BATCH,
        "size_bytes": 3,
        "created_ms": 1_000 + number,
        "expires_ms": 5_000 + number,
        "path": f"uploads/{number}",
    }
    return FileRecord.model_validate(raw | changes)


async def test_a_file_is_its_tenants_alone_and_replaced_whole_K16(
    client: redis.Redis,
) -> None:
    files = Files(client)
    await files.add(file(1, size_bytes=9))
    await files.add(file(1))
    await files.add(file(2))
    assert await files.get("t1", file(1).id) == file(1)
    assert await files.get("t2", file(1).id) is None
    assert await files.all("t1") == [file(1), file(2)]
    assert await files.all("t2") == []


async def test_expired_files_and_uploads_that_never_ended_are_found(client: redis.Redis) -> None:
    files = Files(client)
    await files.add(file(1))
    await files.begin("t1", file(2).id, 4_000)
    await files.begin("t1", file(3).id, 4_000)
    await files.add(file(3, expires_ms=90_000))
    found = await files.expired(6_000, 10)
    assert [(f.file_id, f.record) for f in found] == [(file(2).id, None), (file(1).id, file(1))]
    await files.postpone(found[1], 8_000)
    await files.forget(DIGEST, file(2).id)
    assert await files.expired(6_000, 10) == []
    assert [f.file_id for f in await files.expired(8_000, 10)] == [file(1).id]


async def test_what_is_expired_is_removed_with_its_content_unless_a_batch_reads_it(
    client: redis.Redis, tmp_path: Path
) -> None:
    files, storage = Files(client), FileStorage(str(tmp_path))
    cut_off = file(3)
    for record in (file(1), file(2), file(4, expires_ms=90_000)):
        async with storage.new(record.path) as writer:
            writer.write(b"x")
        await files.add(record)
    async with storage.new(upload_path(cut_off.id)) as writer:
        writer.write(b"x")
    await files.begin("t1", cut_off.id, 4_000)
    await files.use(file(2).id, "b1", 60)
    services = SimpleNamespace(files=files, storage=storage, now_ms=lambda: 10_000)
    await expire_files(cast(BatchServices, services))
    assert await files.all("t1") == [file(2), file(4, expires_ms=90_000)]
    assert storage.names("uploads") == [cut_off.id[5:7], "2", "4"]
    assert storage.names(f"uploads/{cut_off.id[5:7]}") == []


async def test_a_file_is_used_as_long_as_any_batch_reads_it(client: redis.Redis) -> None:
    files = Files(client)
    await files.use(file(1).id, "b1", 60)
    await files.use(file(1).id, "b2", 60)
    await files.release(file(1).id, "b1")
    assert await files.is_used(file(1).id)
    await files.release(file(1).id, "b2")
    assert not await files.is_used(file(1).id)


async def test_no_key_lives_for_ever(batches: Batches, client: redis.Redis) -> None:
    files = Files(client)
    await batches.create(make_batch())
    await files.add(file(1))
    await files.use(file(1).id, "b1", 60)
    assert await batches.claim(make_batch().id, "one") is not None
    indexes = {b"hr:batches:open", b"hr:files:expiring"}
    for key in set(await client.keys("*")) - indexes:
        assert await client.ttl(key) > 0, key
