"""What is one for a whole kernel: system calls that no namespace separates, settings, clocks."""

from __future__ import annotations

import ctypes
import errno
import glob
import os
import platform
import socket
import struct
import time
from typing import Any

from .words import (
    CONTAINED,
    DENIALS,
    POSSIBLE,
    REFUSED,
    Known,
    Outcome,
    attempt,
    libc,
    opening,
    shared,
    tried,
    writing,
)

# x86_64, aarch64; arguments that end in an error other than "not permitted" where the call is let through
_CALLS: dict[str, tuple[int, int, tuple[Any, ...]]] = {
    "bpf": (321, 280, (0, None, 0)),
    "perf events": (298, 241, (None, 0, -1, -1, 0)),
    "userfaultfd": (323, 282, (0xFFFF,)),
    "io_uring": (425, 425, (0, None)),
    "keyring: read": (250, 219, (0, -3, 0)),
    "keyring: add a key": (248, 217, (b"user", b"sandbox-gym-probe", b"x", 1, -2)),
    "load a kernel module": (175, 105, (None, 0, b"")),
    "unload a kernel module": (176, 106, (b"no-such-module", 0)),
    "kexec": (246, 104, (0, 99, None, 0)),
    "reboot": (169, 142, (0, 0, 0, None)),
    "swap": (167, 224, (b"/no-such-file", 0)),
    "process accounting": (163, 89, (b"/no-such-file",)),
    "kernel log": (103, 116, (3, ctypes.create_string_buffer(64), 64)),
    "fanotify": (300, 262, (0xFFFFFFFF, 0)),
    "quotas": (179, 60, (0x800002, b"/no-such-device", 0, None)),
    "open a file by its handle": (304, 265, (-100, struct.pack("IiQ", 8, 1, 2), 0)),
}


def call(name: str, known: Known) -> Outcome:
    """A system call that reaches state which no namespace separates: let through, it is possible, but in a kernel of
    the sandbox's own.
    """
    x86, arm, arguments = _CALLS[name]
    number = {"x86_64": x86, "aarch64": arm}[platform.machine()]
    result = libc.syscall(number, *arguments)
    problem = ctypes.get_errno()
    if result == -1 and problem in DENIALS:
        return REFUSED, errno.errorcode[problem]
    return shared(known), f"it returned {result}, {errno.errorcode.get(problem, problem)}"


for _name in _CALLS:
    attempt(_name)(lambda known, _name=_name: call(_name, known))  # type: ignore[misc]


@attempt("set the clock")
def _(known: Known) -> Outcome:
    return tried(lambda: time.clock_settime(time.CLOCK_REALTIME, time.time()), shared(known))


@attempt("set the host name")
def _(known: Known) -> Outcome:
    return tried(lambda: socket.sethostname(socket.gethostname()), CONTAINED)


@attempt("kernel settings in /proc/sys")
def _(known: Known) -> Outcome:
    names = ("kernel/core_pattern", "kernel/modprobe", "kernel/panic", "vm/overcommit_memory", "fs/file-max")
    return writing([f"/proc/sys/{name}" for name in names], known)


@attempt("kernel settings in /sys")
def _(known: Known) -> Outcome:
    names = (
        "kernel/uevent_helper",
        "kernel/mm/transparent_hugepage/enabled",
        "kernel/mm/ksm/run",
        "power/pm_async",
    )
    return writing([f"/sys/{name}" for name in names] + glob.glob("/sys/block/*/queue/nr_requests"), known)


@attempt("/proc/sysrq-trigger")
def _(known: Known) -> Outcome:
    return tried(lambda: os.close(os.open("/proc/sysrq-trigger", os.O_WRONLY)), shared(known))


@attempt("memory of the kernel and the machine")
def _(known: Known) -> Outcome:
    return opening(["/dev/mem", "/dev/kmem", "/dev/port", "/proc/kcore"], os.O_RDONLY, known)


@attempt("addresses in the kernel")
def _(known: Known) -> Outcome:
    try:
        with open("/proc/kallsyms") as file:
            found = [line for _, line in zip(range(200), file) if int(line.split()[0], 16)]
    except OSError as error:
        return REFUSED, str(error)
    return (shared(known), found[0]) if found else (REFUSED, "zeros only")


@attempt("messages of the kernel in /dev/kmsg")
def _(known: Known) -> Outcome:
    return opening(["/dev/kmsg"], os.O_RDONLY, known)


@attempt("the command line of the host's kernel")
def _(known: Known) -> Outcome:
    try:
        with open("/proc/cmdline") as file:
            return (POSSIBLE if file.read() == known["cmdline"] else CONTAINED), "/proc/cmdline"
    except OSError as error:
        return REFUSED, str(error)


@attempt("ports of the machine (iopl)")
def _(known: Known) -> Outcome:
    if platform.machine() != "x86_64":
        return REFUSED, "there are none"
    return (POSSIBLE, "iopl") if libc.iopl(3) == 0 else (REFUSED, os.strerror(ctypes.get_errno()))
