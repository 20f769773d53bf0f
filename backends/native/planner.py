"""Whether forking a guest captures all of it. Read from /proc by the supervisor: the guest's own word counts nothing.

fork(2) copies one thread and its private memory. A second thread or process, shared memory, or a descriptor whose
state lives in the kernel would be lost or, worse, shared between copies; each of them is a refusal with its name.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import stat
import struct
from collections.abc import Iterator

_STATELESS = {os.makedev(1, minor) for minor in (3, 5, 7, 8, 9)}  # null, zero, full, random, urandom
_SHARED = re.compile(rb"^(\w+)-(\w+) (...)s \S+ \S+ \d+ *(.*)$", re.MULTILINE)
_QUERY = struct.Struct("9Q4I2Q")  # struct procmap_query: size, flags, address, then what the kernel fills in
_PROCMAP_QUERY = 3 << 30 | _QUERY.size << 16 | ord("f") << 8 | 17
_QUERY_WRITABLE = 0x02
_QUERY_SHARED_FROM = 0x08 | 0x10  # shared ones only; the one at the address or the next


def refusal(pid: int, control_inode: int, members: list[int]) -> str | None:
    """The first thing that a fork would not carry along; None when there is none.

    `pid` and `members` (the processes of its control group) as this process's pid namespace numbers them.
    """
    try:
        return _refusal(pid, control_inode, members)
    except (FileNotFoundError, ProcessLookupError):  # a copy that still moves in, a process that ends
        return "it was changing while it was looked at"


def _refusal(pid: int, control_inode: int, members: list[int]) -> str | None:
    others = [member for member in members if member != pid] or _children(pid)
    if others:
        return f"{len(others)} more process(es) run beside the interpreter: {_names(others)}"
    threads = os.listdir(f"/proc/{pid}/task")
    if len(threads) > 1:
        return f"the interpreter has {len(threads)} threads"
    return _descriptors(pid, control_inode) or _shared_memory(pid) or _timers(pid)


def _children(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]


def _names(pids: list[int]) -> str:
    names = []
    for pid in pids[:5]:
        try:
            with open(f"/proc/{pid}/comm") as comm:
                names.append(f"{comm.read().strip()}")
        except OSError:
            continue
    return ", ".join(names) or "already ending"


def _descriptors(pid: int, control_inode: int) -> str | None:
    folder = f"/proc/{pid}/fd"
    for name in os.listdir(folder):
        target = os.readlink(f"{folder}/{name}")
        if target.startswith("/"):
            problem = _file_problem(pid, name, target)
            if problem:
                return problem
        elif target != f"socket:[{control_inode}]":
            return f"descriptor {name} is {target}, whose state a fork would share between copies"
    return None


def _file_problem(pid: int, fd: str, target: str) -> str | None:
    status = os.stat(f"/proc/{pid}/fd/{fd}")
    if stat.S_ISCHR(status.st_mode) and status.st_rdev in _STATELESS:
        return None
    if target.startswith(("/dev/pts", "/dev/ptmx", "/dev/tty")):
        return f"descriptor {fd} is a terminal ({target})"
    if target.endswith(" (deleted)"):
        return f"descriptor {fd} is a deleted file ({target}), which a copy could not open again"
    if target.startswith("/memfd:"):
        return f"descriptor {fd} is memory shared between copies ({target})"
    with open(f"/proc/{pid}/fdinfo/{fd}", "rb") as info:
        if b"lock:" in info.read():
            return f"descriptor {fd} holds a lock on {target}"
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        return f"descriptor {fd} is no regular file ({target}): a fork would share its state between copies"
    return None


def _shared_memory(pid: int) -> str | None:
    for start, end, writable, path in _shared_areas(pid):
        # A file that was opened read-only can never become writable there: its pages are the disk's, alike for all.
        # The mode of the map_files link is that of the open file, not of the mapping's present rights.
        link = f"/proc/{pid}/map_files/{start:x}-{end:x}"
        if writable or not path.startswith("/") or os.lstat(link).st_mode & 0o200:
            return f"memory is shared (MAP_SHARED): {path or 'anonymous'}"
    return None


def _shared_areas(pid: int) -> list[tuple[int, int, bool, str]]:
    """Start, end, whether it may be written, and path of each shared mapping."""
    with open(f"/proc/{pid}/maps", "rb") as maps:
        try:
            return list(_ask_kernel(maps.fileno()))
        except OSError as error:
            if error.errno not in (errno.ENOTTY, errno.EINVAL):  # before Linux 6.11
                raise
        found = _SHARED.findall(maps.read())
    return [
        (int(a, 16), int(b, 16), b"w" in rights, path.decode(errors="replace"))
        for a, b, rights, path in found
    ]


def _ask_kernel(maps: int) -> Iterator[tuple[int, int, bool, str]]:
    """The ioctl PROCMAP_QUERY, for shared areas alone: a process has hundreds, of which one or two are shared."""
    name = ctypes.create_string_buffer(4096)
    address = 0
    while True:
        query = bytearray(
            _QUERY.pack(_QUERY.size, _QUERY_SHARED_FROM, address, *(0,) * 8, len(name), 0, 0, 0)
        )
        struct.pack_into("Q", query, _QUERY.size - 16, ctypes.addressof(name))
        try:
            fcntl.ioctl(maps, _PROCMAP_QUERY, query)
        except FileNotFoundError:  # ENOENT: none from this address on
            return
        _, _, _, start, end, flags, *_ = _QUERY.unpack(query)
        yield start, end, bool(flags & _QUERY_WRITABLE), name.value.decode(errors="replace")
        address = end


def _timers(pid: int) -> str | None:
    try:
        with open(f"/proc/{pid}/timers") as timers:
            return "a POSIX timer is armed" if timers.read(1) else None
    except FileNotFoundError:  # a kernel without checkpoint support
        return None
