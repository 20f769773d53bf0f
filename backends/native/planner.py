"""Whether forking a guest captures all of it. Read from /proc by the supervisor: the guest's own word counts nothing.

fork(2) copies one thread and its private memory. A second thread or process, shared memory, or a descriptor whose
state lives in the kernel would be lost or, worse, shared between copies; each of them is a refusal with its name. What
/proc tells to a process of itself alone, such as its interval timers, the guest adds (`Copier.obstacle`).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import stat
import struct
from collections.abc import Iterator, Sequence

from sandbox_gym.guest import syscalls

_STATELESS = {os.makedev(1, minor) for minor in (3, 5, 7, 8, 9)}  # null, zero, full, random, urandom
_SHARED = re.compile(rb"^(\w+)-(\w+) (...)s \S+ \S+ \d+ *(.*)$", re.MULTILINE)
_QUERY = struct.Struct("9Q4I2Q")  # struct procmap_query: size, flags, address, then what the kernel fills in
_PROCMAP_QUERY = 3 << 30 | _QUERY.size << 16 | ord("f") << 8 | 17
_QUERY_WRITABLE = 0x02
_QUERY_SHARED_FROM = 0x08 | 0x10  # shared ones only; the one at the address or the next
_MOST_DESCRIPTORS = (
    4096  # of a guest that has more, looking at each would hold up this client's other sandboxes
)
_OWN_MOUNTS = {"/": "overlay", "/proc": "proc", "/dev/pts": "devpts"}  # that every copy gets anew
_PENDING = re.compile(rb"^(SigPnd|ShdPnd):\t(?!0+$)", re.MULTILINE)
_LOCKED = re.compile(rb"^VmLck:\t +[1-9]", re.MULTILINE)
_F_GETOWN = 9
_NR_PIDFD_GETFD = 438


def refusal(pid: int, control_inode: int, members: list[int], attached: Sequence[str]) -> str | None:
    """The first thing that a fork would not carry along; None when there is none.

    `pid` and `members` (the processes of its control group) as this process's pid namespace numbers them. `attached`:
    where mounts lie that every copy gets.
    """
    try:
        return _refusal(pid, control_inode, members, attached)
    except (FileNotFoundError, ProcessLookupError):  # a copy that still moves in, a process that ends
        return "it was changing while it was looked at"
    except OSError as error:  # a working folder whose path is too long to be read, for one
        return f"it can't be looked at: {error.strerror}"


def _refusal(pid: int, control_inode: int, members: list[int], attached: Sequence[str]) -> str | None:
    others = [member for member in members if member != pid] or _children(pid)
    if others:
        return f"{len(others)} more process(es) run beside the interpreter: {_names(others)}"
    threads = os.listdir(f"/proc/{pid}/task")
    if len(threads) > 1:
        return f"the interpreter has {len(threads)} threads"
    return (
        _descriptors(pid, control_inode)
        or _shared_memory(pid)
        or _timers(pid)
        or _signals_and_locks(pid)
        or _places(pid)
        or _mounts(pid, attached)
    )


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
    names = os.listdir(folder)
    if len(names) > _MOST_DESCRIPTORS:
        return f"{len(names)} descriptors are open: a fork is planned for at most {_MOST_DESCRIPTORS}"
    for name in names:
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
    if stat.S_ISDIR(status.st_mode) and tells_of_changes(pid, int(fd)):
        return f"descriptor {fd} is a folder that signals its changes ({target}, F_NOTIFY)"
    return None


def tells_of_changes(pid: int, fd: int) -> bool:
    """Whether a folder's open file has an owner to be signalled (fcntl(2), F_NOTIFY): /proc shows no more of it."""
    try:
        ours = get_descriptor(pid, fd)
    except OSError:  # closed meanwhile, or nobody that may look
        return False
    try:
        return fcntl.fcntl(ours, _F_GETOWN) != 0
    except OSError:  # opened as a mere path
        return False
    finally:
        os.close(ours)


def get_descriptor(pid: int, fd: int) -> int:
    """A duplicate of another process's descriptor (pidfd_getfd(2)). Raises OSError."""
    pidfd = os.pidfd_open(pid)
    try:
        ours: int = syscalls.libc.syscall(_NR_PIDFD_GETFD, pidfd, fd, 0)
        if ours < 0:
            raise OSError(ctypes.get_errno(), "pidfd_getfd")
        return ours
    finally:
        os.close(pidfd)


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


def _signals_and_locks(pid: int) -> str | None:
    with open(f"/proc/{pid}/status", "rb") as file:
        status = file.read()
    if _PENDING.search(status):
        return "a signal is pending"
    return "memory is locked (mlock)" if _LOCKED.search(status) else None


def _places(pid: int) -> str | None:
    if os.readlink(f"/proc/{pid}/cwd").endswith(" (deleted)"):
        return "its working folder is deleted, which a copy could not enter again"
    if os.readlink(f"/proc/{pid}/root") != "/":
        return "its root folder is not the sandbox's (chroot)"
    try:
        children = os.readlink(f"/proc/{pid}/ns/pid_for_children")
    except FileNotFoundError:  # one that has no process yet
        children = ""
    if children != os.readlink(f"/proc/{pid}/ns/pid"):
        return "its children are to be in another pid namespace (unshare)"
    return None


def _mounts(pid: int, attached: Sequence[str]) -> str | None:
    """What the guest itself has mounted: a copy would not have it."""
    seen = set()
    with open(f"/proc/{pid}/mountinfo") as mounts:
        for mount in mounts:
            fields = mount.split()
            place, kind = fields[4], fields[fields.index("-") + 1]
            ours = kind == _OWN_MOUNTS.get(place) or any(
                place == target or place.startswith(f"{target}/") for target in attached
            )
            if not ours or place in seen:
                return f"{place} is a mount that was made inside ({kind})"
            seen.add(place)
    return None
