"""Trees between host and guest, as tar archives. What a guest packs is hostile until it has been unpacked here."""

from __future__ import annotations

import os
import shutil
import tarfile
import tempfile
from pathlib import Path, PurePosixPath
from typing import IO

from sandbox_gym.errors import LimitExceeded, ProtocolError

ROOT = "tree"  # the name of an archive's one root: a file, or a folder with the rest below it
_MAX_ENTRIES = 1_000_000


def pack(source: Path, spool: IO[bytes]) -> int:
    """Writes the archive of a host folder; its size in bytes. Its owner in the sandbox is root."""

    def owned_by_guest(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = 0
        member.uname = member.gname = "root"
        return member

    with tarfile.open(fileobj=spool, mode="w:") as archive:
        archive.add(source, arcname=".", filter=owned_by_guest)
    size = spool.tell()
    spool.seek(0)
    return size


def unpack(spool: IO[bytes], target: Path, *, max_bytes: int, name: str) -> None:
    """Makes `target` from a guest's archive; nothing is ever written outside of it.

    Folders and files come first, each made new below a folder that was made here; links last, when nothing is written
    through them any more. So no archive can lead a write elsewhere, whatever it says.

    Raises:
        ProtocolError: it holds a device, a link that leaves the tree, a path with "..", or is no archive.
        LimitExceeded: its files are larger than `max_bytes` together: a sparse file is as large as it says.
    """
    with tempfile.TemporaryDirectory(dir=target.absolute().parent, prefix=".download-") as folder:
        try:
            _unpack(spool, folder, max_bytes, name)
        except (tarfile.TarError, ValueError, UnicodeError) as error:
            raise ProtocolError(f"sandbox {name}: its archive is refused: {error}") from None
        root = os.path.join(folder, ROOT)
        if not os.path.lexists(root):
            raise ProtocolError(f"sandbox {name}: its archive is refused: {ROOT!r} is missing")
        _replace(root, target)


def _unpack(spool: IO[bytes], folder: str, max_bytes: int, name: str) -> None:
    links: list[tuple[str, str]] = []
    folders: list[tuple[str, int]] = []
    size = count = 0
    with tarfile.open(fileobj=spool, mode="r:") as archive:
        for member in archive:
            size, count = size + max(0, member.size), count + 1
            if size > max_bytes:
                raise LimitExceeded(
                    f"sandbox {name}: the files are larger than {max_bytes} bytes (max_bytes=)"
                )
            if count > _MAX_ENTRIES:
                raise LimitExceeded(f"sandbox {name}: the tree has more than {_MAX_ENTRIES} entries")
            place = os.path.join(folder, _inside(member.name))
            mode = member.mode & 0o755 | 0o600
            if member.isdir():
                os.makedirs(place, exist_ok=True)
                folders.append((place, mode | 0o100))
                continue
            os.makedirs(os.path.dirname(place), exist_ok=True)
            if member.issym():
                links.append((place, _target_inside(member)))
            elif member.islnk():
                original = os.path.join(folder, _inside(member.linkname))
                if not os.path.isfile(original):
                    raise ValueError(
                        f"{member.name!r} is a hard link to {member.linkname!r}, which is no earlier file"
                    )
                os.link(original, place)
            elif member.isfile():
                _write(archive, member, place, mode)
            else:
                raise ValueError(f"{member.name!r} is neither a file, a folder nor a link")
    for place, target in links:
        os.symlink(target, place)
    for place, mode in reversed(folders):
        if not os.path.islink(place):
            os.chmod(place, mode)


def _write(archive: tarfile.TarFile, member: tarfile.TarInfo, place: str, mode: int) -> None:
    fd = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "wb") as file:
        content = archive.extractfile(member)
        if content is not None:
            shutil.copyfileobj(content, file, 1 << 20)
        if file.tell() != member.size:
            raise ValueError(f"{member.name!r} ends after {file.tell()} of {member.size} bytes")
        os.fchmod(fd, mode)
        os.utime(fd, (member.mtime, member.mtime))


def _inside(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or path.parts[:1] != (ROOT,) or "\0" in name:
        raise ValueError(f"the path {name!r} is not below {ROOT!r}")
    return str(path)


def _target_inside(member: tarfile.TarInfo) -> str:
    """A link's target, when it can't leave the tree: ".." only in front, where it counts folders that are no links."""
    parts = PurePosixPath(member.linkname).parts
    ups = 0
    while ups < len(parts) and parts[ups] == "..":
        ups += 1
    depth = len(PurePosixPath(member.name).parts) - 2  # folders between the tree's root and the link
    if (
        not parts
        or member.linkname.startswith("/")
        or ".." in parts[ups:]
        or ups > depth
        or "\0" in member.linkname
    ):
        raise ValueError(f"{member.name!r} is a link to {member.linkname!r}, which may leave the tree")
    return member.linkname


def _replace(root: str, target: Path) -> None:
    """Puts what was made in its place: over a file, or where nothing or an empty folder is."""
    os.replace(root, target)
