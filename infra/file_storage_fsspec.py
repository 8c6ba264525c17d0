"""The content of files: a folder, or object storage, through fsspec.

fsspec blocks, so it runs in threads. Nothing is ever changed in place, because object storage cannot: a file
is written once, from its start to its end. A file whose writer died may be there in part, or not at all.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, Final

import fsspec

from .settings import FileSettings
from .stack.state import default_data_dir

BLOCK_BYTES: Final = 256 * 1024


class StorageUnavailable(Exception):
    """The storage cannot be reached or takes no more; what was asked for may have happened in part."""


class ContentMissing(StorageUnavailable):
    """There is no such file."""


@contextmanager
def _reachable() -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise ContentMissing("there is no such file on the storage") from error
    except (OSError, TimeoutError) as error:
        raise StorageUnavailable(type(error).__name__) from error


class ContentWriter:
    """A file being written. Blocks: call it from a thread. It is whole once :meth:`close` has returned."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.size_bytes = 0

    def write(self, data: bytes) -> None:
        """Append."""
        with _reachable():
            self._file.write(data)
        self.size_bytes += len(data)

    def close(self) -> None:
        """Make it durable."""
        with _reachable():
            self._file.flush()
            # Object storage has no descriptor: there, what is closed is stored.
            with suppress(OSError, AttributeError):
                os.fsync(self._file.fileno())
            self._file.close()


class FileStorage:
    """One folder of a storage. Methods raise :class:`StorageUnavailable`.

    Args:
        url: a folder, or a URL that fsspec knows (``s3://bucket/folder``).
    """

    def __init__(self, url: str) -> None:
        self._fs: Any
        self._fs, self._root = fsspec.core.url_to_fs(url, use_listings_cache=False)

    @contextmanager
    def writing(self, path: str) -> Iterator[ContentWriter]:
        """A new file, in the place of one that may be there. Blocks.

        Whole when the block of code is left; removed again when that is by an exception.
        """
        full = self._full(path)
        with _reachable():
            self._fs.makedirs(self._fs._parent(full), exist_ok=True)
            writer = ContentWriter(self._fs.open(full, "wb"))
        try:
            yield writer
            writer.close()
        except BaseException:
            with suppress(StorageUnavailable):
                writer.close()
            with suppress(OSError):
                self._fs.rm(full)
            raise

    @asynccontextmanager
    async def new(self, path: str) -> AsyncIterator[ContentWriter]:
        """:meth:`writing` for a coroutine."""
        inner = self.writing(path)
        writer = await _finish(inner.__enter__)
        try:
            yield writer
        except BaseException as error:
            await _finish(inner.__exit__, type(error), error, error.__traceback__)
            raise
        await _finish(inner.__exit__, None, None, None)

    def lines(self, path: str) -> Iterator[bytes]:
        """The lines of a file, each with its LF but perhaps the last one. Blocks."""
        with _reachable(), self._fs.open(self._full(path), "rb") as file:
            yield from file

    def read_blocks(self, path: str) -> Generator[bytes]:
        """The content of a file in blocks. Blocks."""
        with _reachable(), self._fs.open(self._full(path), "rb") as file:
            while block := file.read(BLOCK_BYTES):
                yield block

    async def blocks(self, path: str) -> AsyncGenerator[bytes]:
        """:meth:`read_blocks` for a coroutine."""
        blocks = self.read_blocks(path)
        try:
            while (block := await _finish(next, blocks, None)) is not None:
                yield block
        finally:
            blocks.close()

    def names(self, folder: str) -> list[str]:
        """Names of the files in a folder, sorted; none where there is no folder. Blocks."""
        with _reachable():
            try:
                found = self._fs.ls(self._full(folder), detail=False)
            except FileNotFoundError:
                return []
        return sorted(str(path).rstrip("/").rsplit("/", 1)[-1] for path in found)

    async def delete(self, path: str) -> None:
        """Remove a file, or a folder with all in it; nothing where it is not there."""

        def remove() -> None:
            with _reachable(), suppress(FileNotFoundError):
                self._fs.rm(self._full(path), recursive=True)

        await asyncio.to_thread(remove)

    def _full(self, path: str) -> str:
        return f"{self._root.rstrip('/')}/{path}"


def make_file_storage(settings: FileSettings) -> FileStorage:
    """The storage of the configuration; connects when it is first used."""
    return FileStorage(settings.url or str(default_data_dir() / "files"))


async def _finish(call: Any, *arguments: Any) -> Any:
    """Call in a thread, and wait for its end even when cancelled: two threads never use one file."""
    calling = asyncio.ensure_future(asyncio.to_thread(call, *arguments))
    try:
        return await asyncio.shield(calling)
    except asyncio.CancelledError:
        await asyncio.wait([calling])
        if not calling.cancelled():
            calling.exception()
        raise
