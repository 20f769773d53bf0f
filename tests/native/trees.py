"""Random changes to a tree of files, and all that can be seen of one."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from sandbox_gym.api import Limits
from sandbox_gym.backends.native import overlay
from sandbox_gym.backends.native.disk import BtrfsStore, Layer

Change = tuple[str, bytes, Any]

_NAMES = [b"a", b"\xff\n"]
_PATHS = st.lists(st.sampled_from(_NAMES), min_size=1, max_size=3).map(b"/".join)
# For user 7, that the folder's new files inherit.
ACL = struct.pack("<I", 2) + b"".join(
    struct.pack("<HHI", tag, rights, who)
    for tag, rights, who in (
        (1, 7, 2**32 - 1),
        (2, 5, 7),
        (4, 5, 2**32 - 1),
        (16, 7, 2**32 - 1),
        (32, 5, 2**32 - 1),
    )
)
_ATTRIBUTES = st.sampled_from(
    [
        ("user.x", b"1"),
        ("user.x", b"22"),
        ("user.overlay.opaque", b"y"),  # a guest's own, under a mount that uses trusted.overlay
        ("trusted.overlay.opaque", b"y"),  # as if of an overlay in the overlay: the kernel escapes it
        ("system.posix_acl_access", ACL),
        ("system.posix_acl_default", ACL),
    ]
)
_WHOLE = st.sampled_from([b"", b"short", b"0123456789" * 4000])
CHANGES = st.one_of(
    st.tuples(
        st.sampled_from(["mkdir", "rmtree", "unlink", "rmdir", "fifo", "to folder", "to file"]),
        _PATHS,
        st.none(),
    ),
    st.tuples(st.sampled_from(["write", "append"]), _PATHS, _WHOLE),
    st.tuples(st.sampled_from(["rename", "link", "twins", "symlink"]), _PATHS, _PATHS),
    st.tuples(st.just("truncate"), _PATHS, st.sampled_from([0, 3, 70_000])),
    st.tuples(st.just("chmod"), _PATHS, st.sampled_from([0o700, 0o4755, 0o2775, 0o1777, 0])),
    st.tuples(st.just("chown"), _PATHS, st.sampled_from([0, 7])),
    st.tuples(st.just("utime"), _PATHS, st.sampled_from([1, 10**18 + 1])),
    st.tuples(st.just("setxattr"), _PATHS, _ATTRIBUTES),
    st.tuples(st.just("removexattr"), _PATHS, _ATTRIBUTES),
)


def apply(root: str, changes: Sequence[Change]) -> list[int]:
    """Makes each change below `root`, where it can be made. The errno of each, 0 for none."""
    outcomes = []
    for kind, path, argument in changes:
        try:
            _apply(kind, os.fsencode(root) + b"/", path, argument)
            outcomes.append(0)
        except OSError as error:
            outcomes.append(error.errno or -1)
    return outcomes


def _apply(kind: str, root: bytes, name: bytes, argument: Any) -> None:
    path = root + name
    if kind in _TWO_NAMES:
        argument = root + argument
    if kind in (*_CREATING, *_TWO_NAMES):  # else hardly anything would ever be deep
        os.makedirs(os.path.dirname(argument if kind in _TWO_NAMES else path), exist_ok=True)
    if kind in _FOLLOWING and stat.S_ISLNK(os.lstat(path).st_mode):
        return
    _DO[kind](path, argument)


def _write(path: bytes, flags: int, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | flags, 0o640)
    try:
        os.write(fd, data)
    finally:
        os.close(fd)


def _to_folder(path: bytes, _: object) -> None:
    os.unlink(path)
    os.mkdir(path)


def _to_file(path: bytes, _: object) -> None:
    _remove(path)
    _write(path, os.O_CREAT, b"was a folder")


def _twins(path: bytes, other: bytes) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    _write(path, os.O_CREAT, b"twin")
    os.link(path, other, follow_symlinks=False)


def _remove(path: bytes) -> None:
    if not stat.S_ISDIR(os.lstat(path).st_mode):  # rmtree opens what it gets, and waits at a fifo
        raise NotADirectoryError(errno.ENOTDIR, "no folder")
    shutil.rmtree(path)


_CREATING = ("mkdir", "write", "fifo", "symlink")
_TWO_NAMES = ("rename", "link", "twins")
_FOLLOWING = ("chmod", "truncate")
_DO: dict[str, Callable[[bytes, Any], object]] = {
    "mkdir": lambda path, _: os.mkdir(path),
    "rmdir": lambda path, _: os.rmdir(path),
    "unlink": lambda path, _: os.unlink(path),
    "rmtree": lambda path, _: _remove(path),
    "to folder": _to_folder,
    "to file": _to_file,
    "fifo": lambda path, _: os.mkfifo(path),
    "write": lambda path, data: _write(path, os.O_CREAT | os.O_TRUNC, data),
    "append": lambda path, data: _write(path, os.O_APPEND, data),
    "rename": os.rename,
    "link": lambda path, new: os.link(path, new, follow_symlinks=False),
    "twins": _twins,
    "symlink": lambda path, target: os.symlink(target, path),
    "truncate": os.truncate,
    "chmod": os.chmod,
    "chown": lambda path, who: os.chown(path, who, who, follow_symlinks=False),
    "utime": lambda path, time: os.utime(path, ns=(time, time), follow_symlinks=False),
    "setxattr": lambda path, attribute: os.setxattr(path, *attribute, follow_symlinks=False),
    "removexattr": lambda path, attribute: os.removexattr(path, attribute[0], follow_symlinks=False),
}


@dataclass(frozen=True)
class Seen:
    kind: int
    mode: int
    owner: tuple[int, int]
    device: int
    modified: int
    content: bytes  # what is long as its hash; of a link, where it points
    attributes: dict[str, bytes]


def tree(root: str, *, times: bool = True) -> dict[bytes, Seen]:
    """All that can be seen below `root` and of itself, by path. Whatever is listed must be there."""
    found: dict[bytes, Seen] = {}
    top = os.fsencode(root) + b"/"
    waiting = [b""]
    while waiting:
        name = waiting.pop()
        path = top + name
        status = os.stat(path) if not name else os.lstat(path)
        kind = stat.S_IFMT(status.st_mode)
        content = b""
        if kind == stat.S_IFDIR:
            below = sorted(os.listdir(path), reverse=True)
            waiting += [os.path.join(name, entry) for entry in below]
        elif kind == stat.S_IFREG:
            with open(path, "rb") as file:
                content = file.read()
            content = hashlib.sha256(content).digest() if len(content) > 32 else content
        elif kind == stat.S_IFLNK:
            content = os.readlink(path)
        attributes = {
            x: os.getxattr(path, x, follow_symlinks=not name)
            for x in os.listxattr(path, follow_symlinks=not name)
        }
        found[name] = Seen(
            kind,
            stat.S_IMODE(status.st_mode),
            (status.st_uid, status.st_gid),
            status.st_rdev,
            status.st_mtime_ns if times else 0,
            content,
            attributes,
        )
    return found


def links(layers: Sequence[str], merged: str) -> tuple[set[frozenset[bytes]], set[frozenset[bytes]]]:
    """The names of each file of several names in `merged`, as the layers have them and as it has."""
    expected: dict[tuple[int, int], set[bytes]] = {}
    found: dict[int, set[bytes]] = {}
    for name, seen in tree(merged).items():
        if seen.kind == stat.S_IFDIR or (seen.kind == stat.S_IFCHR and not seen.device):
            continue
        path = os.fsencode(merged) + b"/" + name
        found.setdefault(os.lstat(path).st_ino, set()).add(name)
        number = next(
            n for n, layer in enumerate(layers) if os.path.lexists(os.fsencode(layer) + b"/" + name)
        )
        inode = os.lstat(os.fsencode(layers[number]) + b"/" + name).st_ino
        expected.setdefault((number, inode), set()).add(name)
    return {frozenset(names) for names in expected.values()}, {frozenset(names) for names in found.values()}


@contextmanager
def mounted(layer: Layer, lowers: Sequence[str], base: str) -> Iterator[str]:
    """The root that a sandbox with this writable layer would have."""
    root, whole = overlay.mount(layer.upper, layer.work, lowers, overlay.Base((base,), (), True))
    try:
        yield f"/proc/self/fd/{root}"
    finally:
        os.close(root)
        os.close(whole)


@contextmanager
def writable(store: BtrfsStore) -> Iterator[Layer]:
    layer = store.make(Limits(), 0)
    try:
        yield layer
    finally:
        layer.release()
