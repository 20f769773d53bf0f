"""The system call filter that every guest runs under: a deny list, answered with EPERM as Docker does.

What is denied reaches state that namespaces don't separate (keyrings, kernel modules, the clock, performance
counters, sockets to the hypervisor), or has a long record of kernel bugs and no use in a sandbox (bpf, io_uring,
userfaultfd). clone3 answers ENOSYS, since a filter can't see its flags: C libraries then fall back on clone, whose
flags are checked. What no snapshot could hold, and none would notice, is answered as by a kernel that lacks it: POSIX
message queues (which live on where nobody sees them), and memory that a fork leaves out or wipes.
"""

from __future__ import annotations

import errno
import platform
import struct

from sandbox_gym.guest.syscalls import CLONE_NEWUSER, MS_NODEV, MS_NOEXEC, MS_NOSUID

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# name: (x86_64, aarch64); None where the architecture has no such call
_DENIED: dict[str, tuple[int | None, int | None]] = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "adjtimex": (159, 171),
    "bpf": (321, 280),
    "clock_adjtime": (305, 266),
    "clock_settime": (227, 112),
    "delete_module": (176, 106),
    "fanotify_init": (300, 262),
    # With mount below: no mount of the host's that is shown here may ever lose its read-only flag. The guest's own
    # process keeps CAP_SYS_ADMIN, since a copy mounts; the kernel locks such flags only across user namespaces.
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_tree": (428, 428),
    "open_tree_attr": (467, 467),
    "finit_module": (313, 273),
    "init_module": (175, 105),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "ioperm": (173, None),
    "iopl": (172, None),
    "kcmp": (312, 272),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "lookup_dcookie": (212, 18),
    "move_pages": (279, 239),
    "name_to_handle_at": (303, 264),
    "nfsservctl": (180, 42),
    "open_by_handle_at": (304, 265),
    "perf_event_open": (298, 241),
    "quotactl": (179, 60),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "settimeofday": (164, 170),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "uselib": (134, None),
    "userfaultfd": (323, 282),
    "vhangup": (153, 58),
    "vmsplice": (278, 75),
}
_CLONE = {"x86_64": 56, "aarch64": 220}
_UNSHARE = {"x86_64": 272, "aarch64": 97}
_MOUNT = {"x86_64": 165, "aarch64": 40}
_MADVISE = {"x86_64": 28, "aarch64": 233}
_MADV_DONTFORK, _MADV_WIPEONFORK = 10, 18
_SOCKET = {"x86_64": 41, "aarch64": 198}
_AF_VSOCK = 40
_MQ_OPEN = {"x86_64": 240, "aarch64": 180}
_CLONE3 = 435
_X32_BIT = 0x40000000

_LOAD, _JEQ, _JGE, _JSET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NR, _ARCH, _ARG0, _ARG2, _ARG3 = 0, 4, 16, 32, 40  # offsets in struct seccomp_data


def program() -> bytes:
    """The filter for this machine, for `syscalls.seccomp_filter`."""
    machine = platform.machine()
    column = 0 if machine == "x86_64" else 1
    eperm, enosys = _ERRNO | errno.EPERM, _ERRNO | errno.ENOSYS
    code = [
        _op(_LOAD, _ARCH),
        _op(_JEQ, _ARCHITECTURES[machine], 1, 0),
        _op(_RETURN, _KILL),  # 32-bit calls have other numbers: none of the checks below would mean anything
        _op(_LOAD, _NR),
        _op(_JGE, _X32_BIT, 0, 1),
        _op(_RETURN, enosys),
        _op(_JEQ, _CLONE3, 1, 0),
        _op(_JEQ, _MQ_OPEN[machine], 0, 1),
        _op(_RETURN, enosys),
    ]
    for numbers in _DENIED.values():
        number = numbers[column]
        if number is not None:
            code += [_op(_JEQ, number, 0, 1), _op(_RETURN, eperm)]
    for call in (_CLONE, _UNSHARE):  # no user namespace of its own: it would come with fresh capabilities
        code += [
            _op(_JEQ, call[machine], 0, 3),
            _op(_LOAD, _ARG0),
            _op(_JSET, CLONE_NEWUSER, 0, 1),
            _op(_RETURN, eperm),
            _op(_LOAD, _NR),
        ]
    code += [  # sockets to the hypervisor, which no network namespace separates
        _op(_JEQ, _SOCKET[machine], 0, 4),
        _op(_LOAD, _ARG0),
        _op(_JEQ, _AF_VSOCK, 0, 1),
        _op(_RETURN, eperm),
        _op(_LOAD, _NR),
    ]
    code += [
        _op(_JEQ, _MADVISE[machine], 0, 5),
        _op(_LOAD, _ARG2),
        _op(_JEQ, _MADV_DONTFORK, 1, 0),
        _op(_JEQ, _MADV_WIPEONFORK, 0, 1),
        _op(_RETURN, _ERRNO | errno.EINVAL),
        _op(_LOAD, _NR),
    ]
    code += [  # new mounts as a copy makes its /proc and terminals, and no other: no remount, bind, move, propagation
        _op(_JEQ, _MOUNT[machine], 0, 5),
        _op(_LOAD, _ARG3),
        _op(_JEQ, MS_NOSUID | MS_NODEV | MS_NOEXEC, 2, 0),
        _op(_JEQ, MS_NOSUID | MS_NOEXEC, 1, 0),
        _op(_RETURN, eperm),
        _op(_LOAD, _NR),
        _op(_RETURN, _ALLOW),
    ]
    return b"".join(code)


def _op(code: int, k: int, jump_true: int = 0, jump_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, jump_true, jump_false, k)
