"""The content of files, in a folder and in another of fsspec's storages."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from infra.file_storage_fsspec import BLOCK_BYTES, ContentMissing, FileStorage, StorageUnavailable


@pytest.fixture(params=["folder", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> FileStorage:
    return FileStorage(str(tmp_path) if request.param == "folder" else f"memory://{uuid.uuid4().hex}")


async def test_what_was_written_is_read_in_blocks_and_in_lines(storage: FileStorage) -> None:
    data = b"one\n" * BLOCK_BYTES + b"end"
    async with storage.new("a/b") as file:
        file.write(data[:10])
        file.write(data[10:])
    assert file.size_bytes == len(data)
    blocks = [block async for block in storage.blocks("a/b")]
    assert b"".join(blocks) == data
    assert max(map(len, blocks)) == BLOCK_BYTES
    assert list(storage.lines("a/b"))[-2:] == [b"one\n", b"end"]
    assert storage.names("a") == ["b"]


async def test_a_writer_that_is_left_by_an_exception_leaves_nothing(storage: FileStorage) -> None:
    async def write() -> None:
        async with storage.new("a/b") as file:
            file.write(b"x" * 100_000)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await write()
    assert storage.names("a") == []


async def test_what_is_not_there_is_missing_and_can_be_deleted(storage: FileStorage) -> None:
    with pytest.raises(ContentMissing):
        await anext(storage.blocks("no"))
    await storage.delete("no")
    assert storage.names("no") == []


async def test_a_folder_is_deleted_with_all_in_it(storage: FileStorage) -> None:
    for name in ("w/1", "w/2"):
        async with storage.new(name) as file:
            file.write(b"x")
    await storage.delete("w")
    assert storage.names("w") == []


async def test_a_storage_that_takes_nothing_says_so(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a file, where a folder should be")
    with pytest.raises(StorageUnavailable):
        async with FileStorage(str(tmp_path)).new("a/b"):
            pass
