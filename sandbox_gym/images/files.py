"""The files of an archive that holds images: of a folder, or of a tar, which may be compressed."""

from __future__ import annotations

import gzip
import hashlib
import os
import stat
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from . import deadline
from .tar import Damaged, Reader

Read = Callable[[int], bytes]  # the next n bytes, fewer only at the end
_MOST_WHOLE = 4 << 20  # bytes of a file that is read at once
_MOST_FILES = 100_000
_MOST_WINDOW = 1 << 27  # bytes that zstd may keep to decompress
_BLOCK = 1 << 20
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_SKIPPABLE = b"\x2a\x4d\x18"  # after one byte: a zstd frame that says nothing, which may come first


class Files:
    """By their names. A tar's are found by where they lie in it. `until`: a deadline on the monotonic clock."""

    def __init__(self, source: str | BinaryIO, until: float) -> None:
        self._source = source
        self._until = until
        self._places: dict[str, tuple[int, int]] = {}
        self._links: dict[str, str] = {}
        if not isinstance(source, str):
            self._list(source)

    @staticmethod
    @contextmanager
    def of(path: str, until: float) -> Iterator[Files]:
        """Raises Damaged, SandboxTimeout, OSError."""
        if os.path.isdir(path):
            yield Files(path, until)
            return
        with open(path, "rb") as file:
            if not _is_compressed(file.read(4)):
                yield Files(file, until)
                return
            file.seek(0)
            with tempfile.TemporaryFile() as spool:
                read = decompressed(file.read)
                while block := read(_BLOCK):
                    deadline.check(until)
                    spool.write(block)
                yield Files(spool, until)

    def __contains__(self, name: str) -> bool:
        if isinstance(self._source, str):
            return os.path.isfile(os.path.join(self._source, name))
        return name in self._places

    def followed(self, name: Any) -> str:
        """The file that a name means: older dockers write a layer once, and links to it. Raises Damaged."""
        if not isinstance(name, str):
            raise Damaged("a file without a name")
        way = os.path.normpath(name)
        for _ in self._links:
            if way not in self._links:
                break
            way = os.path.normpath(os.path.join(os.path.dirname(way), self._links[way]))
        return way

    @contextmanager
    def open(self, name: str) -> Iterator[Read]:
        """From a file's beginning. Raises Damaged where it is not there."""
        if os.path.isabs(name) or ".." in name.split("/") or not name.isprintable():
            raise Damaged(f"a file that is named {name[:200]!r}")
        if isinstance(self._source, str):
            try:
                file = open(os.path.join(self._source, name), "rb", opener=_without_waiting)
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                raise Damaged(f"{name} is missing in it") from None
            with file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise Damaged(f"{name} is no file")
                yield self._in_time(file, os.fstat(file.fileno()).st_size)
            return
        if name not in self._places:
            raise Damaged(f"{name} is missing in it")
        start, size = self._places[name]
        self._source.seek(start)
        yield self._in_time(self._source, size)

    def read(self, name: str) -> bytes:
        """All of a small file. Raises Damaged."""
        with self.open(name) as read:
            block = read(_MOST_WHOLE + 1)
        if len(block) > _MOST_WHOLE:
            raise Damaged(f"{name} has more than {_MOST_WHOLE} bytes")
        return block

    def check(self, name: str, digest: str | None) -> None:
        """Raises Damaged where a file is not what its hash says. None: it has none."""
        if digest is None:
            return
        with self.open(name) as read:
            source = Hashed(read)
            source.drain()
        if source.digest() != digest:
            raise Damaged(f"{name} does not have the hash that names it")

    def _in_time(self, file: BinaryIO, left: int) -> Read:
        def read(size: int) -> bytes:
            nonlocal left
            deadline.check(self._until)
            block = file.read(min(size, left))
            left -= len(block)
            return block

        return read

    def _list(self, file: BinaryIO) -> None:
        end = file.seek(0, os.SEEK_END)
        file.seek(0)

        def skip(size: int) -> None:
            file.seek(size, os.SEEK_CUR)

        reader = Reader(file.read, skip)
        for entry in reader:
            deadline.check(self._until)
            name = os.path.normpath(os.fsdecode(entry.name))
            target = os.fsdecode(entry.target)
            if entry.kind == "file":
                if reader.offset + entry.size > end:
                    raise Damaged("it breaks off")
                self._places[name] = reader.offset, entry.size
            elif entry.kind == "symlink":
                self._links[name] = target
            elif entry.kind == "hardlink" and os.path.normpath(target) in self._places:
                self._places[name] = self._places[os.path.normpath(target)]
            if len(self._places) + len(self._links) > _MOST_FILES:
                raise Damaged(f"more than {_MOST_FILES} files")


class Hashed:
    """What a function reads, and the SHA-256 of it so far."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._hash = hashlib.sha256()

    def read(self, size: int) -> bytes:
        block = self._read(size)
        self._hash.update(block)
        return block

    def drain(self) -> None:
        while self.read(_BLOCK):
            pass

    def digest(self) -> str:
        return self._hash.hexdigest()


def decompressed(read: Read) -> Read:
    """What gzip or zstd has compressed; anything else as it is. Bounded in memory. Raises Damaged."""
    head = read(4)
    source: Any = _Rejoined(head, read)
    if not _is_compressed(head):
        return lambda size: bytes(source.read(size))
    if head.startswith(_GZIP):
        unpacked: Any = gzip.GzipFile(fileobj=source)
        failures: tuple[type[Exception], ...] = (zlib.error, EOFError, gzip.BadGzipFile)
    else:
        import zstandard

        decompressor = zstandard.ZstdDecompressor(max_window_size=_MOST_WINDOW)
        unpacked = decompressor.stream_reader(source, read_size=_BLOCK, read_across_frames=True)
        failures = (zstandard.ZstdError,)

    def read_on(size: int) -> bytes:
        blocks, left = [], size
        try:
            while left and (block := unpacked.read(left)):
                blocks.append(block)
                left -= len(block)
        except failures as error:
            raise Damaged(f"it can't be decompressed ({error})") from None
        return b"".join(blocks)

    return read_on


def _is_compressed(head: bytes) -> bool:
    return head.startswith((_GZIP, _ZSTD)) or head[1:] == _SKIPPABLE


class _Rejoined:
    """A stream of which the first bytes were read already."""

    def __init__(self, head: bytes, read: Read) -> None:
        self._head, self._read = head, read

    def read(self, size: int) -> bytes:
        block, self._head = self._head[:size], self._head[size:]
        return block + self._read(size - len(block)) if len(block) < size else block


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # else a pipe of that name would be waited for
