"""Layers, one over the other, into one folder: what a container of the image would see as its /.

By the rules of https://github.com/opencontainers/image-spec/blob/main/layer.md. Nothing is ever made outside of the
folder: paths are walked by descriptors, links are read as the container would, and no path may lead out. Devices are
left out, since every sandbox has its own few, and so are attributes that would speak to overlayfs.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from typing import NamedTuple

from sandbox_gym.errors import SandboxTimeout

from . import deadline
from .tar import Damaged, Entry, Reader
from .trees import FOLDER, MOST_PATH, clear, into, join, names, resolve, show

_MOST_FILES = 10_000_000  # of all layers
_MOST_BYTES = 1 << 38
_WHITEOUT, _OPAQUE, _RESERVED = b".wh.", b".wh..wh..opq", b".wh..wh."
_CAPABILITY, _USER, _USER_OVERLAY = "security.capability", "user.", "user.overlay."
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EMFILE, errno.ENFILE)


class _Place(NamedTuple):
    """A folder: its path without links, and a descriptor."""

    path: bytes
    fd: int


class Tree:
    """The folder that layers are applied to, lowest first; `finish` ends it. A context manager, for its descriptors.

    As root its files get their owners, which a sandbox then sees; for another user, who can give them to nobody, all
    are root's inside. Until `finish`, folders are open to their owner alone.
    """

    def __init__(self, root: int, until: float) -> None:
        """`root`: a descriptor of the empty folder. `until`: a deadline on the monotonic clock."""
        self.bytes = 0
        self._files = 0
        self._root = root
        self._until = until
        self._privileged = os.geteuid() == 0
        self._written: set[bytes] = {b""}  # by the layer at hand, with the folders above
        self._folders: dict[bytes, Entry] = {}  # how each is to look in the end
        self._last: tuple[list[bytes], _Place] | None = None  # where the entry before this one lies
        self._moved = False  # something is gone since, which may have been a link on the way there

    def __enter__(self) -> Tree:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._forget()

    def apply(self, reader: Reader) -> None:
        """Raises Damaged, SandboxTimeout; OSError where the disk fails."""
        self._written = {b""}
        for entry in reader:
            self._spend(files=1)
            try:
                self._add(entry, reader)
            except OSError as error:
                if error.errno in _DISK or isinstance(error, SandboxTimeout):
                    raise
                raise Damaged(f"its file {show(entry.name)} can't be made: {error.strerror}") from None
            except (OverflowError, ValueError) as error:
                if isinstance(error, Damaged):
                    raise
                raise Damaged(f"its file {show(entry.name)} can't be made: {error}") from None

    def finish(self) -> None:
        """Gives folders their owners, modes and times, which the files that were made in them would have changed."""
        self._forget()
        self._folders.setdefault(b"", _implied(b""))
        here, way = os.dup(self._root), [b""]

        def leave() -> None:
            nonlocal here
            self._spend()
            above = os.open("..", FOLDER, dir_fd=here)  # while it can still be searched
            try:
                self._adorn(here, self._folders[way.pop()])
            finally:
                os.close(here)
                here = above

        try:
            for path in sorted(self._folders.keys() - {b""}, key=lambda path: path.split(b"/")):
                above, _, name = path.rpartition(b"/")
                while way[-1] != above:
                    leave()
                here = into(here, name)
                way.append(path)
            while way:
                leave()
        finally:
            os.close(here)

    # ---- entries -------------------------------------------------------------------------------------------------

    def _add(self, entry: Entry, reader: Reader) -> None:
        parts = names(entry.name)
        if not parts:
            if entry.kind != "folder":
                raise Damaged("a root that is no folder")
            self._folders[b""] = entry
            return
        *above, name = parts
        if any(part.startswith(_WHITEOUT) for part in above):
            return  # aufs' own housekeeping, or nothing at all: no file can be in a whiteout
        folder = self._folder(above)
        path = join(folder.path, name)
        if len(path) > MOST_PATH:
            raise Damaged(f"the path {show(path)}, which no file can have")
        if name.startswith(_WHITEOUT):
            self._white_out(folder, name)
            return
        if entry.kind == "hardlink":
            self._link(folder, path, name, entry)
        elif entry.kind == "folder":
            self._make_folder(folder, path, name)
            self._folders[path] = entry
        else:
            self._remove(folder, path, name)
            self._make(folder.fd, name, entry, reader)
        self._mark(path)

    def _make(self, folder: int, name: bytes, entry: Entry, reader: Reader) -> None:
        """What is no folder and no link to another file."""
        if entry.kind == "device":
            return
        if entry.kind == "file":
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = os.open(name, flags, 0o600, dir_fd=folder)
            try:
                self._fill(fd, entry, reader)
                self._adorn(fd, entry)
            finally:
                os.close(fd)
            return
        if entry.kind == "fifo":
            os.mkfifo(name, 0o600, dir_fd=folder)
            os.chmod(name, entry.mode, dir_fd=folder)
        else:
            os.symlink(entry.target, name, dir_fd=folder)
        if self._privileged:
            os.chown(name, entry.uid, entry.gid, dir_fd=folder, follow_symlinks=False)
        os.utime(name, ns=(entry.modified,) * 2, dir_fd=folder, follow_symlinks=False)

    def _fill(self, fd: int, entry: Entry, reader: Reader) -> None:
        for offset, length in entry.pieces:
            os.lseek(fd, offset, os.SEEK_SET)
            for block in reader.data(length):
                self._spend(len(block))
                view = memoryview(block)
                while view:
                    view = view[os.write(fd, view) :]
        os.ftruncate(fd, entry.size)

    def _link(self, folder: _Place, path: bytes, name: bytes, entry: Entry) -> None:
        """Another name of a file that is there already, in this layer or below."""
        *above, last = names(entry.target) or [b""]
        where, fd = resolve(self._root, above, _refuse)
        try:
            if join(where, last) == path:
                return
            os.stat(last, dir_fd=fd, follow_symlinks=False)  # before anything is taken away for it
            self._remove(folder, path, name)
            os.link(last, name, src_dir_fd=fd, dst_dir_fd=folder.fd, follow_symlinks=False)
        finally:
            os.close(fd)

    def _make_folder(self, folder: _Place, path: bytes, name: bytes) -> None:
        """Where there is one already, in a layer below or earlier in this one, it is the same."""
        try:
            os.mkdir(name, 0o700, dir_fd=folder.fd)
        except FileExistsError:
            try:
                os.close(os.open(name, FOLDER, dir_fd=folder.fd))
            except NotADirectoryError:
                self._remove(folder, path, name)
                os.mkdir(name, 0o700, dir_fd=folder.fd)

    # ---- what goes away ------------------------------------------------------------------------------------------

    def _white_out(self, folder: _Place, name: bytes) -> None:
        """Takes away what lower layers have: never what is of this one, whichever comes first."""
        if name == _OPAQUE:
            self._mark(folder.path)
            self._clear(folder, self._written)
            return
        if name.startswith(_RESERVED):  # aufs' own housekeeping
            return
        hidden = name[len(_WHITEOUT) :]
        if hidden in (b"", b".", b".."):
            raise Damaged(f"a whiteout that is named {show(name)}")
        path = join(folder.path, hidden)
        if path not in self._written:
            self._remove(folder, path, hidden)
        elif (fd := _open_folder(folder.fd, hidden)) is not None:
            try:
                self._clear(_Place(path, fd), self._written)
            finally:
                os.close(fd)

    def _remove(self, folder: _Place, path: bytes, name: bytes) -> None:
        """Whatever has that name, with all that is in it, if anything has."""
        try:
            os.unlink(name, dir_fd=folder.fd)
        except FileNotFoundError:
            return
        except IsADirectoryError:
            fd = os.open(name, FOLDER, dir_fd=folder.fd)
            try:
                self._clear(_Place(path, fd), ())
            finally:
                os.close(fd)
            os.rmdir(name, dir_fd=folder.fd)
            self._folders.pop(path, None)
        self._moved = True

    def _clear(self, folder: _Place, keep: set[bytes] | tuple[()]) -> None:
        clear(folder.fd, folder.path, keep, lambda path: self._folders.pop(path, None))

    # ---- where they go -------------------------------------------------------------------------------------------

    def _folder(self, above: list[bytes]) -> _Place:
        """The folder of an entry; it is made where the archive has no entry for it."""
        if self._last is None or self._moved or self._last[0] != above:
            self._forget()
            self._moved = False
            self._last = above, _Place(*resolve(self._root, above, self._imply))
        return self._last[1]

    def _imply(self, folder: int, name: bytes, path: bytes) -> None:
        """In place of a file that a lower layer has there, too."""
        if path in self._written:
            raise Damaged(f"the path {show(path)}, which is a file and has files in it")
        self._spend(files=1)
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)
        os.mkdir(name, 0o700, dir_fd=folder)
        self._folders[path] = _implied(path)
        self._mark(path)

    def _forget(self) -> None:
        if self._last is not None:
            os.close(self._last[1].fd)
            self._last = None

    def _mark(self, path: bytes) -> None:
        while path not in self._written:
            self._written.add(path)
            path = path.rpartition(b"/")[0]

    # ---- what they look like -------------------------------------------------------------------------------------

    def _adorn(self, fd: int, entry: Entry) -> None:
        """Owner, mode, attributes and times: in this order, each of which takes away a later one's."""
        if self._privileged:
            os.fchown(fd, entry.uid, entry.gid)
        os.fchmod(fd, entry.mode)
        for name, value in entry.attributes.items():
            mine = name.startswith(_USER) and not name.startswith(_USER_OVERLAY)
            if mine or (name == _CAPABILITY and self._privileged):
                os.setxattr(fd, name, value)
        os.utime(fd, ns=(entry.modified,) * 2)

    def _spend(self, size: int = 0, files: int = 0) -> None:
        self.bytes += size
        self._files += files
        if self._files > _MOST_FILES or self.bytes > _MOST_BYTES:
            raise Damaged(f"more than {_MOST_FILES} files or {_MOST_BYTES >> 30} GiB")
        deadline.check(self._until)


def _implied(path: bytes) -> Entry:
    """A folder that the archive has no entry for."""
    return Entry(path, "folder", 0o755, 0, 0, 0, 0, b"", {}, [])


def _refuse(folder: int, name: bytes, path: bytes) -> None:
    raise FileNotFoundError(errno.ENOENT, "what it is another name of is not there")


def _open_folder(folder: int, name: bytes) -> int | None:
    try:
        return os.open(name, FOLDER, dir_fd=folder)
    except (FileNotFoundError, NotADirectoryError):
        return None
