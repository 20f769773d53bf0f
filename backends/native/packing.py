"""A folder as a stream of bytes, and back: all that a layer of a guest's disk, or an image of its memory, consists of.

The same folder always gives the same bytes: names are sorted, and nothing of the file system that it lies on (inode
numbers, change times, handles in overlayfs' own attributes) goes in. A tar archive would lose sockets, and can name no
folder deeper than a path may be long; a guest makes both.

A stream is a series of records, each a length and that many bytes of JSON: a folder (what is in it follows, up to a
record that leaves it), a file, a link, another name of a file before it, a socket and so on. A file's record is
followed by its content in pieces, each (offset, length) and so many bytes; a piece of length 0 says how long it is.
Names are bytes, each written as the character of that number.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import struct
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from .walking import FOLDER, back, into

_encode = json.JSONEncoder(separators=(",", ":")).encode
_LENGTH, _PIECE = struct.Struct("<I"), struct.Struct("<QQ")
_MOST_RECORD = 16 << 20  # bytes; a file's attributes are bounded to less
_BLOCK = 1 << 20
_SMALL = 1 << 16  # up to here a copy through our own memory takes less than a call for it
_OVERLAY = "trusted.overlay."
# Of use to an upper layer alone, or names of what lies on this file system. See `merge`.
_NOT_CARRIED = tuple(
    f"{_OVERLAY}{name}" for name in ("impure", "nlink", "upper", "uuid", "protattr", "origin")
)
_ATTRIBUTES = ("user.", "trusted.", "security.capability", "system.posix_acl_")
# Whiteouts, and the devices that `rootfs` gives every guest, which it may have changed. No other can come from a guest.
_DEVICES = {os.makedev(0, 0), *(os.makedev(1, minor) for minor in (3, 5, 7, 8, 9))}
_DEVICES |= {os.makedev(5, minor) for minor in (0, 1, 2)}


# ---- writing -----------------------------------------------------------------------------------------------------


def pack(folder: str, target: BinaryIO) -> int:
    """Writes what is in `folder`, which nobody may change meanwhile. Returns how many files and folders that is.

    Raises: OSError; ValueError for a device.
    """
    packer = _Packer(folder, target)
    packer.run()
    return packer.count


class _Packer:
    def __init__(self, folder: str, target: BinaryIO) -> None:
        self.count = 0
        self._target = target
        self._numbers: dict[int, int] = {}  # of files with several names, by their inodes
        self._here = os.open(folder, FOLDER)

    def run(self) -> None:
        try:
            way = [self._enter("")]
            while way:
                _, below = way[-1]
                if below:
                    name = below.pop()
                    self._here = into(self._here, name)
                    way.append(self._enter(name))
                    continue
                self._put({"kind": "end"})
                way.pop()
                if way:
                    self._here = back(self._here, way[-1][0])
        finally:
            os.close(self._here)

    def _enter(self, name: str) -> tuple[int, list[str]]:
        """Writes a folder and all but the folders in it. Its inode, and the names of those, last one first."""
        status = os.fstat(self._here)
        self._put(_record("folder", name, status, _attributes(self._here, folder=True)))
        with os.scandir(self._here) as entries:
            below = sorted(entries, key=lambda entry: os.fsencode(entry.name))
        for entry in below:
            if not entry.is_dir(follow_symlinks=False):
                self._entry(entry.name, entry.stat(follow_symlinks=False))
        folders = [entry.name for entry in reversed(below) if entry.is_dir(follow_symlinks=False)]
        return status.st_ino, folders

    def _entry(self, name: str, status: os.stat_result) -> None:
        number = None
        if status.st_nlink > 1:
            if status.st_ino in self._numbers:
                self._put({"kind": "again", "name": _text(name), "number": self._numbers[status.st_ino]})
                return
            number = self._numbers[status.st_ino] = len(self._numbers)
        if stat.S_ISREG(status.st_mode):
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._here)
            try:
                self._put(_record("file", name, status, _attributes(fd), number=number))
                self._content(fd, status)
            finally:
                os.close(fd)
            return
        attributes = _attributes(f"/proc/self/fd/{self._here}/{name}")
        if stat.S_ISLNK(status.st_mode):
            target = _text(os.readlink(name, dir_fd=self._here))
            self._put(_record("link", name, status, attributes, number=number, target=target))
            return
        _check_node(status.st_mode, status.st_rdev)
        kind, device = stat.S_IFMT(status.st_mode), [os.major(status.st_rdev), os.minor(status.st_rdev)]
        self._put(_record("node", name, status, attributes, number=number, type=kind, device=device))

    def _content(self, fd: int, status: os.stat_result) -> None:
        size, place = status.st_size, 0
        whole = status.st_blocks * 512 >= size  # no holes: to look for them takes two calls
        while place < size:
            end = size
            if not whole:
                try:
                    place = os.lseek(fd, place, os.SEEK_DATA)
                except OSError as error:
                    if error.errno != errno.ENXIO:  # a hole up to the end
                        raise
                    break
                end = min(size, os.lseek(fd, place, os.SEEK_HOLE))
            self._target.write(_PIECE.pack(place, end - place))
            self._send(fd, place, end)
            place = end
        self._target.write(_PIECE.pack(size, 0))

    def _send(self, fd: int, start: int, end: int) -> None:
        if end - start <= _SMALL:
            block = os.pread(fd, end - start, start)
            if len(block) != end - start:
                raise OSError(errno.EIO, "a file became shorter while it was packed")
            self._target.write(block)
            return
        self._target.flush()
        while start < end:
            sent = os.sendfile(self._target.fileno(), fd, start, min(end - start, 1 << 30))
            if not sent:
                raise OSError(errno.EIO, "a file became shorter while it was packed")
            start += sent

    def _put(self, record: dict[str, Any]) -> None:
        block = _encode(record).encode()
        if len(block) > _MOST_RECORD:
            raise ValueError(f"a file with {len(block)} bytes of attributes")
        self._target.write(_LENGTH.pack(len(block)))
        self._target.write(block)
        self.count += record["kind"] not in ("end", "again")


def _record(
    kind: str, name: str, status: os.stat_result, attributes: dict[str, str], **more: Any
) -> dict[str, Any]:
    return {
        "kind": kind,
        "name": _text(name),
        "mode": stat.S_IMODE(status.st_mode),
        "owner": [status.st_uid, status.st_gid],
        "modified": status.st_mtime_ns,  # nobody keeps times of access on the disk that it comes from
        "attributes": attributes,
        **{key: value for key, value in more.items() if value is not None},
    }


def _attributes(file: int | str, *, folder: bool = False) -> dict[str, str]:
    """The extended attributes that go along, by name."""
    names = os.listxattr(file, follow_symlinks=False) if isinstance(file, str) else os.listxattr(file)
    found = {}
    for name in sorted(names):
        if name.startswith(_ATTRIBUTES) and name not in _NOT_CARRIED:
            if isinstance(file, str):
                found[_text(name)] = os.getxattr(file, name, follow_symlinks=False).decode("latin-1")
            else:
                found[_text(name)] = os.getxattr(file, name).decode("latin-1")
    if folder and f"{_OVERLAY}origin" in names:
        # Its place is another's business, but a folder without any shows its whiteouts as files.
        found[f"{_OVERLAY}origin"] = ""
    return found


def _check_node(mode: int, device: int) -> None:
    """Raises ValueError for what is no socket, pipe, whiteout or harmless device."""
    if stat.S_ISSOCK(mode) or stat.S_ISFIFO(mode) or (stat.S_ISCHR(mode) and device in _DEVICES):
        return
    raise ValueError(
        f"a device ({stat.filemode(mode)} {os.major(device)}:{os.minor(device)}) is no part of a guest"
    )


def _text(name: str) -> str:
    return os.fsencode(name).decode("latin-1")


# ---- reading -----------------------------------------------------------------------------------------------------


def unpack(source: BinaryIO, folder: str) -> None:
    """Fills an empty folder from one stream of `source`, and reads no further. On failure it is left half filled.

    Raises: OSError, as when the disk is full; ValueError for what no `pack` writes.
    """
    unpacker = _Unpacker(source, folder)
    try:
        unpacker.run()
    except (KeyError, TypeError, IndexError, RecursionError, UnicodeError, struct.error) as error:
        raise ValueError(f"a stream that is none ({type(error).__name__}: {error})") from None
    finally:
        unpacker.close()


@dataclass
class _Folder:
    inode: int
    record: dict[str, Any]
    numbers: list[int] = field(default_factory=list)


class _Unpacker:
    def __init__(self, source: BinaryIO, folder: str) -> None:
        self._source = source
        self._buffer = memoryview(bytearray(_BLOCK))
        self._staging = -1  # where files with several names are kept by their numbers, until all is there
        self._staging_name = f".unpack-{os.urandom(8).hex()}"
        self._root = os.open(folder, FOLDER)
        self._here = os.dup(self._root)

    def close(self) -> None:
        for fd in (self._here, self._root, self._staging):
            if fd >= 0:
                os.close(fd)

    def run(self) -> None:
        way = [self._open(self._next())]
        while way:
            record = self._next()
            if record["kind"] == "folder":
                os.mkdir(self._name(record), 0o700, dir_fd=self._here)
                self._here = into(self._here, self._name(record))
                way.append(self._open(record))
            elif record["kind"] == "end":
                if len(way) == 1:
                    self._unstage()
                _adorn(
                    self._here, way.pop().record
                )  # last, since every name made in it has changed its times
                if way:
                    self._here = back(self._here, way[-1].inode)
            else:
                self._make(record)

    def _open(self, record: dict[str, Any]) -> _Folder:
        if record["kind"] != "folder":
            raise ValueError(f"a stream that begins with a {record['kind']}")
        return _Folder(os.fstat(self._here).st_ino, record)

    def _make(self, record: dict[str, Any]) -> None:
        name = self._name(record)
        if record["kind"] == "again":
            self._link(record["number"], name)
            return
        if record.get("number") is None:
            self._create(record, name, self._here)
            return
        if self._staging < 0:
            os.mkdir(self._staging_name, 0o700, dir_fd=self._root)
            self._staging = os.open(self._staging_name, FOLDER, dir_fd=self._root)
        self._create(record, str(int(record["number"])), self._staging)
        self._link(record["number"], name)

    def _link(self, number: int, name: str) -> None:
        if self._staging < 0:
            raise ValueError("another name of a file that is not there")
        staged = str(int(number))
        try:
            os.link(staged, name, src_dir_fd=self._staging, dst_dir_fd=self._here, follow_symlinks=False)
        except OSError as error:
            if error.errno != errno.EMLINK:
                raise
            # It has as many names as one may: the one in staging was one too many, and becomes the last.
            os.rename(staged, name, src_dir_fd=self._staging, dst_dir_fd=self._here)

    def _unstage(self) -> None:
        if self._staging < 0:
            return
        # Opened anew: on btrfs a descriptor lists only what was there when it was opened.
        self._staging = into(self._staging, ".")
        for name in os.listdir(self._staging):
            os.unlink(name, dir_fd=self._staging)
        os.rmdir(self._staging_name, dir_fd=self._root)

    def _create(self, record: dict[str, Any], name: str, folder: int) -> None:
        """Makes what is no folder, under a name in an open folder."""
        if record["kind"] == "file":
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = os.open(name, flags, 0o600, dir_fd=folder)
            try:
                self._fill(fd)
                _adorn(fd, record)
            finally:
                os.close(fd)
            return
        if record["kind"] == "link":
            os.symlink(_name(record["target"]), name, dir_fd=folder)
        elif record["kind"] == "node":
            major, minor = record["device"]
            mode, device = stat.S_IFMT(record["type"]), os.makedev(major, minor)
            _check_node(mode, device)
            os.mknod(name, mode | 0o600, device, dir_fd=folder)
        else:
            raise ValueError(f"a record of kind {record['kind']!r}")
        _adorn_name(name, folder, record)

    def _fill(self, fd: int) -> None:
        while True:
            place, length = _PIECE.unpack(self._exactly(_PIECE.size))
            if not length:
                os.ftruncate(fd, place)
                return
            os.lseek(fd, place, os.SEEK_SET)
            while length:
                block = self._buffer[: min(length, _BLOCK)]
                count = self._source.readinto(block)  # type: ignore[attr-defined]  # every buffered reader has it
                if not count:
                    raise EOFError("the stream breaks off")
                _write(fd, block[:count])
                length -= count

    def _next(self) -> dict[str, Any]:
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        if length > _MOST_RECORD:
            raise ValueError(f"a record of {length} bytes")
        record = json.loads(self._exactly(length))
        if not isinstance(record, dict):
            raise ValueError("a record that is none")
        return record

    def _exactly(self, count: int) -> bytes:
        block = self._source.read(count)
        if len(block) != count:
            raise EOFError("the stream breaks off")
        return block

    def _name(self, record: dict[str, Any]) -> str:
        name = _name(record["name"])
        if name in ("", ".", "..", self._staging_name) or "/" in name:
            raise ValueError(f"a file that is named {name!r}")
        return name


def _name(text: str) -> str:
    """Raises ValueError for what is no name of a file, nor a link's target."""
    if "\0" in text:
        raise ValueError(f"a name with a null character: {text!r}")
    return os.fsdecode(text.encode("latin-1"))


def _adorn(fd: int, record: dict[str, Any]) -> None:
    """Gives a file its owner, mode, attributes and times: in this order, each of which takes away a later one's."""
    os.fchown(fd, *record["owner"])
    os.fchmod(fd, stat.S_IMODE(record["mode"]))
    for name, value in record["attributes"].items():
        os.setxattr(fd, _attribute(name), value.encode("latin-1"))
    os.utime(fd, ns=(record["modified"],) * 2)


def _adorn_name(name: str, folder: int, record: dict[str, Any]) -> None:
    """The same for what can't be opened, a link or a socket."""
    uid, gid = record["owner"]
    os.chown(name, uid, gid, dir_fd=folder, follow_symlinks=False)
    if record["kind"] != "link":
        os.chmod(name, stat.S_IMODE(record["mode"]), dir_fd=folder)
    for attribute, value in record["attributes"].items():
        path = f"/proc/self/fd/{folder}/{name}"
        os.setxattr(path, _attribute(attribute), value.encode("latin-1"), follow_symlinks=False)
    os.utime(name, ns=(record["modified"],) * 2, dir_fd=folder, follow_symlinks=False)


def _attribute(name: str) -> str:
    if not name.startswith(_ATTRIBUTES) or "\0" in name:
        raise ValueError(f"an attribute that is named {name!r}")
    return _name(name)


def _write(fd: int, block: memoryview) -> None:
    while block:
        block = block[os.write(fd, block) :]
