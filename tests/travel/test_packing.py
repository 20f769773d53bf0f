"""Folders as streams: all of one comes back, the same is always the same bytes, and no other stream passes."""

from __future__ import annotations

import hashlib
import io
import os
import random
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox_gym.backends.native.packing import _LENGTH, pack, unpack

Entry = tuple[object, ...]


def packed(folder: Path) -> bytes:
    """The stream, by way of a file: `pack` hands large contents to the kernel."""
    with open(folder.parent / "stream", "w+b") as file:
        pack(str(folder), file)
        file.seek(0)
        return file.read()


def unpacked(stream: bytes, folder: Path) -> Path:
    folder.mkdir()
    source = io.BytesIO(stream)
    unpack(source, str(folder))
    assert not source.read()
    return folder


def listing(folder: Path) -> dict[bytes, Entry]:
    """All that can be seen of a folder; inodes by the order in which they come."""
    found: dict[bytes, Entry] = {}
    inodes: dict[int, int] = {}
    for top, folders, files in os.walk(os.fsencode(folder)):
        for path in [top, *(os.path.join(top, name) for name in sorted(folders) + sorted(files))]:
            status = os.lstat(path)
            content: object = None
            if stat.S_ISREG(status.st_mode):
                content = _islands(path), status.st_size
            elif stat.S_ISLNK(status.st_mode):
                content = os.readlink(path)
            attributes = {
                name: os.getxattr(path, name, follow_symlinks=False)
                for name in os.listxattr(path, follow_symlinks=False)
            }
            number = inodes.setdefault(status.st_ino, len(inodes))
            owner = status.st_uid, status.st_gid
            found[os.path.relpath(path, os.fsencode(folder))] = (
                stat.filemode(status.st_mode),
                owner,
                status.st_rdev,
                status.st_mtime_ns,
                number if stat.S_ISREG(status.st_mode) else -1,
                content,
                attributes,
            )
    return found


def _islands(path: bytes) -> str:
    """The hash of a file's data, wherever it lies between holes."""
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        end, size = 0, os.fstat(file.fileno()).st_size
        while end < size:
            try:
                start = os.lseek(file.fileno(), end, os.SEEK_DATA)
            except OSError:
                break
            end = os.lseek(file.fileno(), start, os.SEEK_HOLE)
            digest.update(b"%d:" % start)
            digest.update(os.pread(file.fileno(), end - start, start))
    return digest.hexdigest()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """One of everything that a guest can make, and some that overlayfs makes of it."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "empty").touch()
    (folder / "small").write_bytes(b"1")
    (folder / "large").write_bytes(random.Random(0).randbytes(3 << 20))
    with open(folder / "sparse", "wb") as file:
        for place in (1 << 20, 5 << 30):
            file.seek(place)
            file.write(b"island")
        file.truncate(1 << 40)
    os.symlink("nowhere/at all", folder / "link")
    os.link(folder / "small", folder / "again")
    (folder / "b").mkdir(mode=0o700)
    os.link(folder / "small", folder / "b/once more")
    os.link(folder / "link", folder / "b/same link", follow_symlinks=False)
    os.mkfifo(folder / "pipe", 0o640)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "b/socket"))
    Path(os.fsdecode(os.fsencode(folder) + b'/\xff\n\\"')).write_text("odd name")
    os.mknod(folder / "gone", stat.S_IFCHR, os.makedev(0, 0))  # a whiteout
    os.mknod(folder / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    os.setxattr(folder / "b", "trusted.overlay.opaque", b"y")
    os.setxattr(folder / "small", "user.some", bytes(range(256)))
    os.chown(folder / "small", 1 << 30, (1 << 30) + 5)
    os.chmod(folder / "small", 0o6751)
    os.chown(folder / "link", 7, 8, follow_symlinks=False)
    os.setxattr(
        folder / "large", "security.capability", bytes.fromhex("0100000200200000000000000000000000000000")
    )
    os.utime(folder / "b/socket", ns=(1, 2))
    os.utime(folder / "link", ns=(3, 4), follow_symlinks=False)
    os.utime(folder / "b", ns=(123_456_789, 987_654_321))
    yield folder
    _remove_deep(folder)


def _remove_deep(folder: Path) -> None:
    """pytest's own removal of what is deeper than a path may be long fails."""
    for name in ("deep", "copy/deep"):
        top = folder / name if name == "deep" else folder.parent / name
        while top.exists():
            inner = top / ("n" * 200)
            if not inner.exists():
                top.rmdir()
                break
            os.rename(inner, top.parent / "next")
            top.rmdir()
            os.rename(top.parent / "next", top)


def test_all_of_it_comes_back(folder: Path, tmp_path: Path) -> None:
    before = listing(folder)
    assert len(before) == 15
    copy = unpacked(packed(folder), tmp_path / "copy")
    assert listing(copy) == before
    assert (copy / "sparse").stat().st_blocks * 512 < 1 << 20


def test_the_same_content_is_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    stream = packed(folder)
    assert packed(folder) == stream
    copy = unpacked(stream, tmp_path / "copy")
    assert packed(copy) == stream
    (copy / "small").write_bytes(b"2")
    assert packed(copy) != stream


def test_what_belongs_to_this_file_system_stays_here(folder: Path, tmp_path: Path) -> None:
    """Handles of other file systems' files; but a folder's must not vanish, or its whiteouts show as files."""
    stream = packed(folder)
    os.setxattr(folder / "large", "trusted.overlay.origin", b"a handle")
    os.setxattr(folder / "large", "trusted.overlay.impure", b"y")
    assert packed(folder) == stream
    os.setxattr(folder / "b", "trusted.overlay.origin", b"a handle")
    copy = unpacked(packed(folder), tmp_path / "copy")
    assert os.getxattr(copy / "b", "trusted.overlay.origin") == b""
    assert os.getxattr(copy / "b", "trusted.overlay.opaque") == b"y"


def test_deeper_than_a_path_is_long(folder: Path, tmp_path: Path) -> None:
    here = os.open(folder, os.O_RDONLY)
    for depth in range(60):
        name = "n" * 200 if depth else "deep"
        os.mkdir(name, dir_fd=here)
        below = os.open(name, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    stream = packed(folder)
    assert packed(unpacked(stream, tmp_path / "copy")) == stream


def test_a_device_is_no_part_of_a_guest(folder: Path) -> None:
    os.mknod(folder / "disk", stat.S_IFBLK, os.makedev(254, 0))
    with pytest.raises(ValueError, match="254:0"):
        packed(folder)


# ---- streams that are none ------------------------------------------------------------------------------------------

_FOLDER = '{"kind":"folder","name":"","mode":493,"owner":[0,0],"modified":0,"attributes":{}}'
_NODE = '{"kind":"node","name":"x","mode":0,"owner":[0,0],"modified":0,"attributes":{},"type":%d,"device":[%d,%d]}'
_NAMED = _FOLDER.replace('"name":""', '"name":"%s"')
_FORGED = {
    "a name with a slash": [_FOLDER, _NAMED % "../x"],
    "the folder above": [_FOLDER, _NAMED % ".."],
    "a name that is none": [_FOLDER, _NAMED % ""],
    "a null character": [_FOLDER, _NAMED % "a\\u0000b"],
    "a wide character": [_FOLDER, _NAMED % "\\u1234"],
    "a file's other name, but no file": [_FOLDER, '{"kind":"again","name":"x","number":0}'],
    "a path as a number": [_FOLDER, '{"kind":"again","name":"x","number":"../../etc/passwd"}'],
    "a disk": [_FOLDER, _NODE % (stat.S_IFBLK, 8, 0)],
    "memory": [_FOLDER, _NODE % (stat.S_IFCHR, 1, 1)],
    "a regular file as a node": [_FOLDER, _NODE % (stat.S_IFREG, 0, 0)],
    "a kind of none": [_FOLDER, '{"kind":"what","name":"x"}'],
    "no folder first": ['{"kind":"end"}'],
    "no object": [_FOLDER, "[]"],
    "no JSON": [_FOLDER, "{"],
    "nested": [_FOLDER, "[" * 100_000],
    "the host's attribute": [
        _FOLDER.replace('"attributes":{}', '"attributes":{"security.selinux":"x"}'),
        '{"kind":"end"}',
    ],
}


@pytest.mark.parametrize("what", _FORGED)
def test_a_forged_stream_is_refused(what: str, tmp_path: Path) -> None:
    stream = b"".join(_LENGTH.pack(len(text)) + text.encode() for text in _FORGED[what])
    with pytest.raises((ValueError, EOFError)):
        unpacked(stream, tmp_path / "copy")
    assert sorted(os.listdir(tmp_path)) == ["copy", "home"] or sorted(os.listdir(tmp_path)) == ["copy"]


def test_a_record_of_any_length_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="bytes"):
        unpacked(_LENGTH.pack(0xFFFFFFFF) + b"{" * 100, tmp_path / "copy")


def test_damage_never_leaves_the_folder(folder: Path, tmp_path: Path) -> None:
    """A stream whose bytes were changed or cut is refused, or is another folder's: nothing outside is touched."""
    (folder / "large").unlink()
    stream = packed(folder)
    chance = random.Random(1)
    outside = listing(folder)
    refused = 0
    for number in range(150):
        damaged = bytearray(stream)
        if number % 3:
            damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
        else:
            del damaged[chance.randrange(len(damaged)) :]
        try:
            unpacked(bytes(damaged), tmp_path / f"copy-{number}")
        except (ValueError, OSError, EOFError):
            refused += 1
        else:
            assert number % 3
    assert refused > 50
    assert listing(folder) == outside
    expected = {"folder", "stream", *(f"copy-{number}" for number in range(150))}
    assert set(os.listdir(tmp_path)) - {"home"} == expected
