"""A process tree that stands still: a process of ours traces every thread (ptrace(2)), and its end lets all go on.
Nothing in the tree is changed, and no signal is lost.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterator
from types import TracebackType
from typing import NoReturn

from sandbox_gym.guest import syscalls

_PTRACE_SEIZE, _PTRACE_INTERRUPT = 0x4206, 0x4207
_FORKS = {56, 57, 220, 435}  # clone, fork; clone on aarch64; clone3

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


class Standstill:
    """Of the tree below `root`, from `with` on, as soon as each thread comes back from the kernel."""

    def __init__(self, root: int) -> None:
        self._root = root
        self._holder = -1

    def __enter__(self) -> Standstill:
        reader, writer = os.pipe()
        self._holder = os.fork()
        if self._holder == 0:
            _hold(self._root, writer)
        os.close(writer)
        os.read(reader, 1)  # or it has ended
        os.close(reader)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.kill(self._holder, signal.SIGKILL)
        os.waitpid(self._holder, 0)


def is_forking(root: int) -> bool:
    """Whether a thread of the tree is in a system call that forks, or makes a thread."""
    return any(_call(pid, tid) in _FORKS for pid, tid in _threads(root))


def _hold(root: int, writer: int) -> NoReturn:
    try:
        syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
        held: set[int] = set()
        found = True
        while found:  # some may have been made meanwhile
            found = False
            for _, tid in _threads(root):
                if tid not in held:
                    held.add(tid)
                    found = True
                    # What has ended, or is traced by the guest itself, can't be.
                    if _libc.ptrace(_PTRACE_SEIZE, tid, None, None) == 0:
                        _libc.ptrace(_PTRACE_INTERRUPT, tid, None, None)
        os.write(writer, b"x")
        while True:
            signal.pause()
    finally:
        os._exit(1)


def _threads(root: int) -> Iterator[tuple[int, int]]:
    waiting = [root]
    while waiting:
        pid = waiting.pop()
        with contextlib.suppress(OSError):  # it has ended
            for name in os.listdir(f"/proc/{pid}/task"):
                yield pid, int(name)
                with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{name}/children") as file:
                    waiting += map(int, file.read().split())


def _call(pid: int, tid: int) -> int:
    try:
        with open(f"/proc/{pid}/task/{tid}/syscall") as file:
            first = file.read().split()[0]
    except (OSError, IndexError):
        return -1
    return int(first) if first.lstrip("-").isdigit() else -1
