"""Files of the sandbox, read and written by its own process: no path of the guest's is ever followed by the host."""

from __future__ import annotations

import errno
import os
import stat
import tarfile
import tempfile
from collections.abc import Callable
from typing import Any

from .wire import Op

CHUNK = 8 << 20
ROOT = "tree"  # as the host's `_transfer` names the root of an archive
_spool: Any = None  # an upload under way, or the archive of a download


def _open(path: str, flags: int) -> int:
    """Opens without ever waiting: a named pipe that nobody holds open would hang this process."""
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if stat.S_ISFIFO(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is a named pipe, not a file", path)
    return fd


def read(path: str, offset: int, size: int) -> dict[str, Any]:
    with open(_open(path, os.O_RDONLY), "rb") as file:
        if offset:
            file.seek(offset)
        block = file.read(min(size, CHUNK))
        return {"data": block, "end": len(block) < min(size, CHUNK)}


def write(path: str, data: bytes, append: bool, mode: int | None) -> None:
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    with open(_open(path, os.O_WRONLY | os.O_CREAT | (os.O_APPEND if append else os.O_TRUNC)), "wb") as file:
        file.write(data)
    if mode is not None:
        os.chmod(path, mode)


def list_files(path: str, recursive: bool, most: int) -> list[list[Any]]:
    found: list[list[Any]] = []
    waiting = [path]
    while waiting:
        folder = waiting.pop()
        try:
            entries = sorted(os.scandir(folder), key=lambda e: e.name)
        except (FileNotFoundError, NotADirectoryError):
            if folder == path:
                raise
            continue  # it has gone since its own folder was read: other programs go on meanwhile
        for entry in entries:
            row = _row(entry)
            if row is None:
                continue
            found.append(row)
            if len(found) > most:
                raise ValueError(f"more than {most} entries below {path}")
            if recursive and row[1] == "dir":
                waiting.append(entry.path)
    return found


def _row(entry: os.DirEntry[str]) -> list[Any] | None:
    """What a FileInfo holds; None for what has gone since its folder was read."""
    try:
        info = entry.stat(follow_symlinks=False)
        kind = _kind(info.st_mode)
        target = os.readlink(entry.path) if kind == "link" else ""
    except OSError as error:
        # EINVAL: a link before, and now something else has its place.
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EINVAL):
            return None
        raise
    return [entry.path, kind, info.st_size, stat.S_IMODE(info.st_mode), info.st_mtime, target]


def _kind(mode: int) -> str:
    for test, name in ((stat.S_ISREG, "file"), (stat.S_ISDIR, "dir"), (stat.S_ISLNK, "link")):
        if test(mode):
            return name
    return "other"


def unpack(data: bytes, target: str, first: bool, last: bool) -> None:
    """Blocks of a tar archive; the last one unpacks it below `target`. One that failed leaves nothing behind."""
    global _spool
    if first:
        _close()
        _spool = tempfile.TemporaryFile()
    try:
        _spool.write(data)
        if not last:
            return
        _spool.seek(0)
        os.makedirs(target, exist_ok=True)
        with tarfile.open(fileobj=_spool, mode="r:") as archive:
            # The host made it. As an attribute, since older Pythons in images know no filter argument.
            archive.extraction_filter = lambda member, path: member
            archive.extractall(target)
    except BaseException:
        _close()
        raise
    _close()


def pack(path: str | None, offset: int) -> dict[str, Any]:
    """With a path: makes its tar archive; then, or without one, the block at `offset`. The end closes the archive."""
    global _spool
    if path is not None:
        os.stat(path)  # FileNotFoundError before an archive is begun
        _close()
        _spool = tempfile.TemporaryFile()
        try:
            with tarfile.open(fileobj=_spool, mode="w:") as archive:
                archive.add(os.path.realpath(path), arcname=ROOT)
        except BaseException:
            _close()
            raise
    _spool.seek(offset)
    block = _spool.read(CHUNK)
    end = len(block) < CHUNK
    if end:
        _close()
    return {"data": block, "end": end}


def _close() -> None:
    """Ends the transfer under way, if one is; a flush that fails (a full disk) has lost nothing that matters."""
    global _spool
    spool, _spool = _spool, None
    if spool is not None:
        try:
            spool.close()
        except OSError:
            pass


HANDLERS: dict[Op, Callable[..., Any]] = {
    Op.READ: read,
    Op.WRITE: write,
    Op.LIST: list_files,
    Op.UNPACK: unpack,
    Op.PACK: pack,
}
