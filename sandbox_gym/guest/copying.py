"""How a guest becomes two: it clones itself into new namespaces, and the copy moves onto its own disk.

The process that cloned goes on waiting at its old socket, where the supervisor keeps it as the snapshot; the copy
answers on the socket that came with the request. What the copy does between is the whole cost of a restore.
"""

from __future__ import annotations

import errno
import gc
import os
import signal
import socket
import stat
from typing import Any

from . import wire
from .syscalls import (
    CLONE_NEWNET,
    CLONE_SANDBOX,
    MNT_DETACH,
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    clone,
    mount,
    move_mount,
    pivot_root,
    setns,
    umount2,
)
from .wire import Connection, Frame, Op


_READY = wire.HEADER.pack(Op.READY, wire.Status.OK, 0, 0, 0)


class Copier:
    def __init__(self) -> None:
        self._open_files: list[tuple[int, str, int, int, bool]] | None = None
        self._cwd = "/"
        self._on_child: Any = signal.SIG_DFL

    def clone(self, connection: Connection, frame: Frame) -> None:
        """Returns in both; the copy's connection is then its own. Raises OSError where the kernel refuses."""
        control, root, netns, *attached = frame.fds
        try:
            if self._open_files is None:  # the first copy ever: from now on this process never changes again
                _refuse_timers()
                self._look_at_open_files({connection.sock.fileno(), *frame.fds})
                gc.freeze()  # a collection in a copy would otherwise write to, and so duplicate, every page
                # Copies that end are this process's children: ignored, so that none stays as a zombie.
                self._on_child = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
            pid = clone(CLONE_SANDBOX)
        except OSError:
            if self._open_files is not None:
                self._open_files = None
                signal.signal(signal.SIGCHLD, self._on_child)
            for fd in frame.fds:
                os.close(fd)
            raise
        if pid:
            for fd in frame.fds:
                os.close(fd)
            return
        # Announced first: the supervisor and the client do their part while this process moves in. By the plainest call
        # there is, since each page that a copy touches for the first time is a page fault.
        os.write(control, _READY)
        sock = socket.socket(fileno=control)
        try:
            self._move_in(root, netns, attached, wire.decode(frame.meta, frame.data))
        except BaseException as error:  # a half-made copy must never run on
            wire.send(sock, Op.READY, wire.Status.ERROR, 0, f"{type(error).__name__}: {error}".encode())
            os._exit(1)
        connection.replace(sock)

    def _move_in(self, root: int, netns: int, attached: list[int], value: Any) -> None:
        setns(netns, CLONE_NEWNET)
        os.close(netns)
        enter_root(root, attached, value["attach"] if value else [])
        signal.signal(signal.SIGCHLD, self._on_child)
        for fd, path, flags, offset, seekable in self._open_files or ():
            reopened = os.open(path, flags & ~(os.O_CREAT | os.O_EXCL | os.O_TRUNC))
            if seekable:
                os.lseek(reopened, offset, os.SEEK_SET)
            os.dup2(reopened, fd, inheritable=not flags & os.O_CLOEXEC)
            os.close(reopened)
        os.chdir(self._cwd)
        self._open_files = None

    def _look_at_open_files(self, ours: set[int]) -> None:
        """Every descriptor on the disk: the copy opens it again at the same place, on its own disk."""
        found = []
        for name in os.listdir("/proc/self/fd"):
            fd = int(name)
            if fd in ours:
                continue
            try:
                path = os.readlink(f"/proc/self/fd/{fd}")
                mode = os.fstat(fd).st_mode
            except OSError:  # the descriptor of this very listing
                continue
            with open(f"/proc/self/fdinfo/{fd}") as info:
                fields = dict(line.split(":", 1) for line in info if ":" in line)
            seekable = stat.S_ISREG(mode) or stat.S_ISDIR(mode)
            found.append((fd, path, int(fields["flags"], 8), int(fields["pos"]), seekable))
        self._open_files = found
        self._cwd = os.getcwd()


def _refuse_timers() -> None:
    """/proc doesn't show these, so the planner can't: fork drops them, and here they would go off in the frozen origin."""
    for which in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
        if signal.getitimer(which)[0]:
            raise OSError(errno.EBUSY, "an interval timer is armed (alarm, setitimer)")


def enter_root(root: int, attached: list[int], targets: list[str]) -> None:
    """Makes the detached mount `root` this mount namespace's /, with its own /proc and the mounts that go on it."""
    move_mount(root, "/")
    os.fchdir(root)
    os.close(root)
    for fd, target in zip(attached, targets):
        move_mount(fd, target.lstrip("/"))
        os.close(fd)
    mount("proc", "proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    pivot_root(".", ".")
    umount2(".", MNT_DETACH)
    os.chdir("/")
