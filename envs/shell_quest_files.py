"""What lies in a quest's folder, as the host sees it: looked at from outside, kept here, and never trusted."""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from sandbox_gym import _records
from sandbox_gym.errors import LimitExceeded, ProtocolError
from sandbox_gym.guest.wire import Op
from sandbox_gym.sandbox import Sandbox

_MAX_BYTES = 4 << 20  # of all files; no quest needs more
_MAX_ENTRIES = 2000
_SLACK = 1 << 21  # bytes of an archive over its files: headers, padding


@dataclass(frozen=True)
class Entry:
    """`kind`: "file", "dir", "link" or "other"; `data`: a file's; `target`: a link's."""

    kind: str
    mode: int = 0o644
    data: bytes = b""
    target: str = ""


Files = Mapping[str, Entry]
"""By path below the folder; a repository's own .git is left out."""


def put(box: Sandbox, folder: str, files: Files) -> None:
    """Makes the folder and what lies in it, in one call."""
    spool = io.BytesIO()
    with tarfile.open(fileobj=spool, mode="w:") as archive:
        for path, entry in files.items():
            member = tarfile.TarInfo(path)
            member.mode, member.size, member.linkname = entry.mode, len(entry.data), entry.target
            member.type = {"dir": tarfile.DIRTYPE, "link": tarfile.SYMTYPE}.get(entry.kind, tarfile.REGTYPE)
            archive.addfile(member, io.BytesIO(entry.data))
    box._file_call(Op.UNPACK, {"data": spool.getvalue(), "target": folder, "first": True, "last": True})


def look(box: Sandbox, folder: str) -> Files:
    """What is there now. Nothing, where the folder is gone, or holds more than any quest needs.

    Raises ProtocolError for what is no archive.
    """
    try:
        found = box.list_files(folder, recursive=True, max_entries=_MAX_ENTRIES)
        if sum(max(0, info.size) for info in found if info.kind == "file") > _MAX_BYTES:
            return {}
        archive = _archive(box, folder)
    except (OSError, ValueError, LimitExceeded):  # ValueError: more entries than were asked for
        if box.status == "dead":
            raise
        return {}
    try:
        return _read(archive)
    except (tarfile.TarError, ValueError, UnicodeError) as error:
        raise ProtocolError(f"sandbox {box.name}: its archive of {folder} is refused: {error}") from None


def fingerprint(files: Files) -> str:
    """Alike for folders that hold the same: a hash over names, kinds, modes and contents."""
    digest = hashlib.sha256()
    for path in sorted(files):
        entry = files[path]
        head = f"{path}\0{entry.kind}\0{entry.mode:o}\0{entry.target}\0{len(entry.data)}\0"
        digest.update(head.encode("utf-8", "surrogateescape"))
        digest.update(entry.data)
    return digest.hexdigest()


def _archive(box: Sandbox, folder: str) -> bytes:
    blocks: list[bytes] = []
    size, end = 0, False
    with box._awake():
        while not end:
            request = {"path": None if blocks else folder, "offset": size}
            data, end = box._checked(_records.block, box._file_call(Op.PACK, request))
            blocks.append(data)
            size += len(data)
            if size > _MAX_BYTES + _SLACK:
                raise LimitExceeded(f"sandbox {box.name}: {folder} has grown beyond {_MAX_BYTES} bytes")
    return b"".join(blocks)


def _read(archive: bytes) -> dict[str, Entry]:
    files: dict[str, Entry] = {}
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as members:
        for member in members:
            parts = PurePosixPath(member.name).parts[1:]
            if not parts or ".git" in parts:
                continue
            if member.issparse() or member.size > len(archive):
                raise ValueError(f"{member.name!r} says it is larger than the archive")
            content = members.extractfile(member) if member.isreg() else None
            kinds = ((member.isreg(), "file"), (member.isdir(), "dir"), (member.issym(), "link"))
            kind = next((kind for holds, kind in kinds if holds), "other")
            # A hard link is the file that it is a second name of.
            first = files.get("/".join(PurePosixPath(member.linkname).parts[1:])) if member.islnk() else None
            files["/".join(parts)] = first or Entry(
                kind,
                member.mode & 0o7777,
                content.read() if content else b"",
                member.linkname if kind == "link" else "",
            )
    return files
