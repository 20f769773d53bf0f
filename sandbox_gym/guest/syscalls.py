"""One function per system call, named as in its man page; failures raise OSError with the call's name.

Python's os module has no mount API, no clone flags and no capabilities; everything it does have is used from there.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import socket
import struct
import sys

CLONE_NEWTIME = 0x00000080  # for unshare, whose next child it is that gets one
CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
# What a guest makes anew for a copy at once. The control group's namespace follows when the group is joined, the
# network's comes ready made, and the user namespace is its origin's.
CLONE_SANDBOX = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWUTS
SIGCHLD = 17

MS_NOSUID, MS_NODEV, MS_NOEXEC = 2, 4, 8
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 1 << 18
MNT_DETACH = 2
AT_FDCWD = -100
AT_EMPTY_PATH, AT_RECURSIVE = 0x1000, 0x8000
OPEN_TREE_CLONE = 1
MOVE_MOUNT_F_EMPTY_PATH = 4
FSCONFIG_SET_FLAG, FSCONFIG_SET_STRING, FSCONFIG_CMD_CREATE, FSCONFIG_CMD_RECONFIGURE = 0, 1, 6, 7
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID = 1, 2
MOUNT_ATTR_IDMAP = 0x00100000

PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 24, 38
SECCOMP_SET_MODE_FILTER = 1

_NUMBERS = {
    #   clone pivot_root seccomp setns umount2 mount chdir fchdir close dup3 write rt_sigaction unshare setsid openat
    #   timer_create timer_settime timer_delete
    "x86_64": (56, 155, 317, 308, 166, 165, 80, 81, 3, 292, 1, 13, 272, 112, 257, 222, 223, 226),
    "aarch64": (220, 41, 277, 268, 39, 40, 49, 50, 57, 24, 64, 134, 97, 157, 56, 107, 110, 111),
}
# These numbers are the same on every architecture: calls added after 2019 share one table.
_OPEN_TREE, NR_MOVE_MOUNT, _FSOPEN, _FSCONFIG, _FSMOUNT, _FSPICK, _MOUNT_SETATTR = (
    428,
    429,
    430,
    431,
    432,
    433,
    442,
)

try:
    (
        NR_CLONE,
        NR_PIVOT_ROOT,
        _SECCOMP,
        NR_SETNS,
        NR_UMOUNT2,
        NR_MOUNT,
        NR_CHDIR,
        NR_FCHDIR,
        NR_CLOSE,
        NR_DUP3,
        NR_WRITE,
        NR_RT_SIGACTION,
        NR_UNSHARE,
        NR_SETSID,
        NR_OPENAT,
        _TIMER_CREATE,
        _TIMER_SETTIME,
        _TIMER_DELETE,
    ) = _NUMBERS[platform.machine()]
except KeyError:
    raise ImportError(f"sandbox_gym knows x86_64 and aarch64, not {platform.machine()}") from None

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
libc.mount.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p)
libc.umount2.argtypes = (ctypes.c_char_p, ctypes.c_int)
libc.unshare.argtypes = (ctypes.c_int,)
libc.setns.argtypes = (ctypes.c_int, ctypes.c_int)
libc.prctl.argtypes = (ctypes.c_int, *(ctypes.c_ulong,) * 4)


def _check(result: int, call: str) -> int:
    if result < 0:
        errno = ctypes.get_errno()
        raise OSError(errno, f"{call}: {os.strerror(errno)}")
    return result


def _syscall(name: str, number: int, *arguments: int | bytes | ctypes.Array[ctypes.c_char] | None) -> int:
    converted = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    return _check(libc.syscall(ctypes.c_long(number), *converted), name)


def clone(flags: int) -> int:
    """fork(2) into new namespaces: 0 in the child. No atfork handler runs, so a copy keeps its random state."""
    return _syscall("clone", NR_CLONE, flags | SIGCHLD, 0, 0, 0, 0)


def unshare(flags: int) -> None:
    _check(libc.unshare(flags), "unshare")


def setns(fd: int, nstype: int) -> None:
    _check(libc.setns(fd, nstype), "setns")


def mount(
    source: str | None, target: str, fstype: str | None = None, flags: int = 0, data: str | None = None
) -> None:
    encode = [None if text is None else os.fsencode(text) for text in (source, target, fstype, data)]
    _check(libc.mount(encode[0], encode[1], encode[2], flags, encode[3]), f"mount {target}")


def umount2(target: str, flags: int = 0) -> None:
    _check(libc.umount2(os.fsencode(target), flags), f"umount2 {target}")


def pivot_root(new_root: str, put_old: str) -> None:
    _syscall("pivot_root", NR_PIVOT_ROOT, os.fsencode(new_root), os.fsencode(put_old))


def open_tree(path: str, *, dfd: int = AT_FDCWD, recursive: bool = False) -> int:
    """A detached copy of the mount at `path` (a bind mount that hangs nowhere), as a descriptor; "" is `dfd` itself."""
    flags = (
        OPEN_TREE_CLONE | os.O_CLOEXEC | (AT_RECURSIVE if recursive else 0) | (0 if path else AT_EMPTY_PATH)
    )
    return _syscall(f"open_tree {path}", _OPEN_TREE, dfd, os.fsencode(path), flags)


def move_mount(fd: int, target: str) -> None:
    """Attaches the detached mount `fd` at a path."""
    _syscall(f"move_mount {target}", *move_mount_call(fd, target))


def move_mount_call(fd: int, target: str) -> tuple[int, int, bytes, int, bytes, int]:
    """Its number and arguments, for a `Batch`."""
    return NR_MOVE_MOUNT, fd, b"", AT_FDCWD, os.fsencode(target), MOVE_MOUNT_F_EMPTY_PATH


def fsopen(fstype: str) -> int:
    return _syscall(f"fsopen {fstype}", _FSOPEN, fstype.encode(), 1)


def fsconfig_string(fd: int, key: str, value: str) -> None:
    _syscall(
        f"fsconfig {key}={value}", _FSCONFIG, fd, FSCONFIG_SET_STRING, key.encode(), os.fsencode(value), 0
    )


def fsconfig_flag(fd: int, key: str) -> None:
    _syscall(f"fsconfig {key}", _FSCONFIG, fd, FSCONFIG_SET_FLAG, key.encode(), None, 0)


def fsconfig_create(fd: int) -> None:
    _syscall("fsconfig create", _FSCONFIG, fd, FSCONFIG_CMD_CREATE, None, None, 0)


def fspick(fd: int) -> int:
    """A context to reconfigure the file system of a mount."""
    return _syscall("fspick", _FSPICK, fd, b"", 1 | 8)  # FSPICK_CLOEXEC, FSPICK_EMPTY_PATH


def fsconfig_reconfigure(fd: int) -> None:
    _syscall("fsconfig reconfigure", _FSCONFIG, fd, FSCONFIG_CMD_RECONFIGURE, None, None, 0)


def fsmount(fd: int, attributes: int = 0) -> int:
    return _syscall("fsmount", _FSMOUNT, fd, 1, attributes)


def mount_setattr(fd: int, attr_set: int, *, userns_fd: int = 0, recursive: bool = False) -> None:
    """Changes a detached mount: read-only, nosuid, or id-mapped into the user namespace `userns_fd`."""
    attributes = ctypes.create_string_buffer(struct.pack("QQQQ", attr_set, 0, 0, userns_fd), 32)
    flags = AT_EMPTY_PATH | (AT_RECURSIVE if recursive else 0)
    _syscall("mount_setattr", _MOUNT_SETATTR, fd, b"", flags, attributes, 32)


def prctl(option: int, argument: int = 0) -> None:
    _check(libc.prctl(option, argument, 0, 0, 0), f"prctl {option}")


def capset(capabilities: set[int]) -> None:
    """Effective and permitted capabilities of this process become these, inheritable none (version 3: 64 bits)."""
    low = sum(1 << number for number in capabilities if number < 32)
    high = sum(1 << number - 32 for number in capabilities if number >= 32)
    header = ctypes.create_string_buffer(struct.pack("Ii", 0x20080522, 0), 8)
    data = ctypes.create_string_buffer(struct.pack("6I", low, low, 0, high, high, 0), 24)
    _check(libc.capset(header, data), "capset")


def seccomp_filter(program: bytes) -> None:
    """Installs a BPF program (8 bytes an instruction) on this process and all it starts."""
    instructions = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(instructions))
    _syscall(
        "seccomp", _SECCOMP, SECCOMP_SET_MODE_FILTER, 0, ctypes.create_string_buffer(header, len(header))
    )


def timer_create(signal: int) -> int:
    """A timer of the monotonic clock that sends this process a signal."""
    event = ctypes.create_string_buffer(struct.pack("qii48x", 0, signal, 0), 64)  # SIGEV_SIGNAL
    timer = ctypes.create_string_buffer(4)
    _syscall("timer_create", _TIMER_CREATE, 1, event, timer)  # CLOCK_MONOTONIC
    return int.from_bytes(timer.raw, sys.byteorder)


def timer_settime(timer: int, first: float, interval: float) -> None:
    """Goes off in `first` seconds, and every `interval` seconds after that."""
    spec = struct.pack("4q", *divmod(int(interval * 1e9), 10**9), *divmod(max(1, int(first * 1e9)), 10**9))
    _syscall("timer_settime", _TIMER_SETTIME, timer, 0, ctypes.create_string_buffer(spec, len(spec)), None)


def timer_delete(timer: int) -> None:
    _syscall("timer_delete", _TIMER_DELETE, timer)


def loopback_up() -> None:
    """Brings `lo` up in this network namespace (ioctl SIOCSIFFLAGS, netdevice(7))."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        fcntl.ioctl(probe, 0x8914, struct.pack("16sh14x", b"lo", 1 | 64))
