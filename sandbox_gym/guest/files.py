"""Files of the sandbox, read and written by its own process: no path of the guest's is ever followed by the host."""

from __future__ import annotations

import os
import stat
import tarfile
import tempfile
from typing import Any

from .wire import Op

CHUNK = 8 << 20
_spool: Any = None  # an upload under way, or the archive of a download


def read(path: str, offset: int, size: int) -> dict[str, Any]:
    with open(path, "rb") as file:
        file.seek(offset)
        block = file.read(min(size, CHUNK))
        return {"data": block, "end": len(block) < min(size, CHUNK)}


def write(path: str, data: bytes, append: bool, mode: int | None) -> None:
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    with open(path, "ab" if append else "wb") as file:
        file.write(data)
    if mode is not None:
        os.chmod(path, mode)


def list_files(path: str, recursive: bool, most: int) -> list[list[Any]]:
    found: list[list[Any]] = []
    waiting = [path]
    while waiting:
        folder = waiting.pop()
        for entry in sorted(os.scandir(folder), key=lambda e: e.name):
            info = entry.stat(follow_symlinks=False)
            found.append([entry.path, _kind(info.st_mode), info.st_size, stat.S_IMODE(info.st_mode), info.st_mtime])
            if len(found) > most:
                raise ValueError(f"more than {most} entries below {path}")
            if recursive and entry.is_dir(follow_symlinks=False):
                waiting.append(entry.path)
    return found


def _kind(mode: int) -> str:
    for test, name in ((stat.S_ISREG, "file"), (stat.S_ISDIR, "dir"), (stat.S_ISLNK, "link")):
        if test(mode):
            return name
    return "other"


def unpack(data: bytes, target: str, last: bool) -> None:
    """Blocks of a tar archive; the last one unpacks it below `target`."""
    global _spool
    if _spool is None:
        _spool = tempfile.TemporaryFile()
    _spool.write(data)
    if not last:
        return
    spool, _spool = _spool, None
    with spool:
        spool.seek(0)
        os.makedirs(target, exist_ok=True)
        with tarfile.open(fileobj=spool, mode="r:") as archive:
            archive.extractall(target)


def pack(path: str | None, offset: int) -> dict[str, Any]:
    """With a path: makes its tar archive; then, or without one, the block at `offset`. The end closes the archive."""
    global _spool
    if path is not None:
        os.stat(path)  # FileNotFoundError before an archive is begun
        _spool = tempfile.TemporaryFile()
        with tarfile.open(fileobj=_spool, mode="w:") as archive:
            archive.add(path, arcname=os.path.basename(os.path.normpath(path)))
    _spool.seek(offset)
    block = _spool.read(CHUNK)
    if len(block) < CHUNK:
        _spool.close()
        _spool = None
        return {"data": block, "end": True}
    return {"data": block, "end": False}


HANDLERS = {Op.READ: read, Op.WRITE: write, Op.LIST: list_files, Op.UNPACK: unpack, Op.PACK: pack}
