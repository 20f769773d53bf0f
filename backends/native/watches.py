"""Which folders a guest watches by inotify(7): the kernel tells their inodes only, and criu wants paths.

A watch's file handle is overlayfs's own, with that of the real folder inside (fs/overlayfs/export.c), which opens. For
files criu can't go on: overlayfs shows others of their numbers than inotify does.
"""

from __future__ import annotations

import ctypes
import os
import re
import stat
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from sandbox_gym.guest import syscalls

from . import rpc
from .node import Node
from .overlay import SUBDIR

_WATCH = re.compile(
    rb"^inotify wd:\w+ ino:(\w+) sdev:(\w+) .*fhandle-type:f8 f_handle:((?:\w\w)+)", re.MULTILINE
)
NAME = "irmap-cache"  # of a file in its working folder, where criu looks first
_MAGIC = struct.Struct("<II")  # of a service image (criu/include/magic.h), and of this one
_HEADER = struct.Struct(
    "<3x5B16x"
)  # struct ovl_fh: version, magic, length, flags, the real handle's type; a UUID
_LENGTH_BEFORE = 21  # bytes of what `length` counts that come before the real handle


class UnknownWatchError(Exception):
    """Says what is watched."""


@dataclass(frozen=True)
class Watched:
    """`device`: in the kernel's own encoding."""

    device: int
    inode: int
    path: str  # inside


def find(node: Node, info: bytes) -> list[Watched]:
    """Of an inotify descriptor, by its /proc/PID/fdinfo. Raises UnknownWatchError."""
    found = []
    for inode, device, handle in _WATCH.findall(info):
        path = _inside(node, _open_real(node, bytes.fromhex(handle.decode())))
        watched = Watched(int(device, 16), int(inode, 16), path)
        if not _is_there(node, watched):
            raise UnknownWatchError(f"{path}, which is no folder or has gone")
        found.append(watched)
    return found


def image(watches: Sequence[Watched]) -> bytes:
    """What the file has (criu's images/fh.proto)."""
    entries = [rpc.message({1: w.device, 2: w.inode, 3: w.path}) for w in watches]
    body = b"".join(struct.pack("<I", len(entry)) + entry for entry in entries)
    return _MAGIC.pack(0x55105940, 0x57004059) + body


def _open_real(node: Node, handle: bytes) -> str:
    """The host's path of what an overlay's file handle stands for; its name only, where that can't be told."""
    *_, length, _, kind = _HEADER.unpack_from(handle)
    fid = handle[_HEADER.size :][: length - _LENGTH_BEFORE]
    block = ctypes.create_string_buffer(struct.pack("<Ii", len(fid), kind) + fid)
    for place in (node.layer.folder, str(node.family.rootfs.skeleton), "/"):
        mount = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fd = syscalls.libc.open_by_handle_at(mount, block, os.O_PATH | os.O_CLOEXEC)
        finally:
            os.close(mount)
        if fd >= 0:
            try:
                return os.readlink(f"/proc/self/fd/{fd}")
            finally:
                os.close(fd)
    raise UnknownWatchError("something that has gone")


def _inside(node: Node, path: str) -> str:
    """A host path as the sandbox sees it."""
    roots = [folder for layer in node.layers for folder in (layer.upper, layer.frozen)]
    for root in (*roots, str(node.family.rootfs.skeleton)):
        inside = path.removeprefix(f"{root}/{SUBDIR}")
        if inside != path:
            return inside or "/"
    return path


def _is_there(node: Node, watched: Watched) -> bool:
    try:
        status = os.stat(f"/proc/{node.pid}/root{watched.path}", follow_symlinks=False)
    except OSError:
        return False
    device = os.major(status.st_dev) << 20 | os.minor(status.st_dev)
    return stat.S_ISDIR(status.st_mode) and (device, status.st_ino) == (watched.device, watched.inode)
