"""How a guest becomes two: it clones itself into new namespaces, and the copy moves onto its own disk.

The process that cloned goes on waiting at its old socket, where the supervisor keeps it as the snapshot; the copy
answers on the socket that came with the request. What the copy does between is the whole cost of a restore.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import gc
import os
import signal
import stat
from typing import Any, NamedTuple, NoReturn

from . import rebind, syscalls, wire
from .batch import Batch, BatchError
from .clocks import Clocks
from .syscalls import MNT_DETACH, MS_NODEV, MS_NOEXEC, MS_NOSUID, move_mount, pivot_root, umount2
from .wire import Connection, Frame, Op

_READY = wire.HEADER.pack(Op.READY, wire.Status.OK, 0, 0, 0)
_PROC_FLAGS = MS_NOSUID | MS_NODEV | MS_NOEXEC
_TERMINAL_FLAGS = MS_NOSUID | MS_NOEXEC
# Its own terminals, and not so many that none is left for others: the kernel counts them for all.
_TERMINALS = "newinstance,ptmxmode=0666,mode=0620,max=256"
_SYSV_IPC = {"shm": "shared memory segment", "sem": "semaphore set", "msg": "message queue"}
_SIG_IGN = (1).to_bytes(32, "little")  # a struct sigaction for the kernel, in the order of this machine
_SIGSET_BYTES = 8


class Copier:
    def __init__(self) -> None:
        self._frozen = False
        self._clocks: Clocks | None = None
        self._ready: tuple[Any, Batch] | None = None
        self._open_files: list[_File] = []
        self._devices: list[tuple[int, str, int]] = []  # open as standard streams
        self._cwd = ""
        self._on_child = ctypes.create_string_buffer(len(_SIG_IGN))  # what SIGCHLD does while not frozen

    def clone(self, connection: Connection, frame: Frame) -> None:
        """Returns in both; the copy's connection is then its own. Raises OSError where the kernel refuses."""
        first = not self._frozen
        try:
            if first:
                self._freeze({connection.sock.fileno(), *frame.fds})
            assert self._clocks is not None
            self._clocks.turn_back()
            copied = self._calls_for(connection.sock.fileno(), frame).run() == 0
        except OSError as error:
            if isinstance(error, BatchError) and error.index > 0:  # this is the copy, half moved
                _give_up(frame.fds[0], error)
            if first and self._frozen:
                self._thaw()
            raise
        if copied:
            self._arrive()
            if (
                b"variables" in frame.meta
            ):  # else nothing is decoded: each line here is page faults in every copy
                take_variables(frame)
        else:
            _close(frame.fds)

    def obstacle(self, connection: Connection) -> str | None:
        """Why `clone` would refuse, where only this process can see it."""
        try:
            self._look({connection.sock.fileno()})
        except OSError as error:
            return error.strerror or str(error)
        return None

    def _calls_for(self, connection_fd: int, frame: Frame) -> Batch:
        """As a rule the descriptors come under the same numbers each time, and the list is there already."""
        key = (connection_fd, *frame.fds, frame.meta)
        if self._ready is None or self._ready[0] != key:
            self._ready = key, self._calls(connection_fd, frame)
        return self._ready[1]

    def _calls(self, connection_fd: int, frame: Frame) -> Batch:
        """The clone, and all that the copy does before it runs a line of Python."""
        control, root, netns, *others = frame.fds
        value = wire.decode(frame.meta, frame.data)
        joins, attached, targets = others[: value["joins"]], others[value["joins"] :], value["attach"]
        batch = Batch()
        batch.add(syscalls.NR_CLONE, syscalls.CLONE_SANDBOX | signal.SIGCHLD)
        for fd in joins:  # the control group: first of all, so that nothing a copy does goes uncounted
            batch.add(syscalls.NR_WRITE, fd, b"0", 1)
        batch.add(syscalls.NR_UNSHARE, syscalls.CLONE_NEWCGROUP)  # with that group as its root
        # Announced early: the supervisor and the client do their part while this process moves in.
        batch.add(syscalls.NR_WRITE, control, _READY, len(_READY))
        batch.add(
            syscalls.NR_RT_SIGACTION, signal.SIGCHLD, ctypes.addressof(self._on_child), 0, _SIGSET_BYTES
        )
        batch.add(syscalls.NR_SETSID)  # the session's leader would be outside, where criu finds none
        batch.add(syscalls.NR_SETNS, netns, syscalls.CLONE_NEWNET)
        batch.add(*syscalls.move_mount_call(root, "/"))
        batch.add(syscalls.NR_FCHDIR, root)
        for fd, target in zip(attached, targets):
            batch.add(*syscalls.move_mount_call(fd, target.lstrip("/")))
        batch.add(syscalls.NR_MOUNT, b"proc", b"proc", b"proc", _PROC_FLAGS)
        devpts = b"devpts"
        batch.add(syscalls.NR_MOUNT, devpts, b"dev/pts", devpts, _TERMINAL_FLAGS, _TERMINALS.encode())
        batch.add(syscalls.NR_PIVOT_ROOT, b".", b".")
        batch.add(syscalls.NR_UMOUNT2, b".", MNT_DETACH)
        batch.add(syscalls.NR_CHDIR, os.fsencode(self._cwd))
        opened: dict[tuple[str, int], int] = {}
        for fd, path, flags in self._devices:
            first = opened.setdefault((path, flags), fd)
            if first != fd:
                batch.add(syscalls.NR_DUP3, first, fd, flags & os.O_CLOEXEC)
                continue
            batch.add(syscalls.NR_CLOSE, fd)  # the lowest that is free then, and so what the next call opens
            batch.add(syscalls.NR_OPENAT, syscalls.AT_FDCWD, os.fsencode(path), flags)
        # The connection goes on under its old number.
        batch.add(syscalls.NR_DUP3, control, connection_fd, os.O_CLOEXEC)
        for fd in frame.fds:
            batch.add(syscalls.NR_CLOSE, fd)
        return batch

    def _arrive(self) -> None:
        """In the copy: opens again what was open, on its own disk."""
        self._frozen = False
        for file in self._open_files:
            reopened = os.open(file.path, file.flags & ~(os.O_CREAT | os.O_EXCL | os.O_TRUNC))
            if not file.flags & os.O_PATH:
                os.lseek(reopened, file.offset, os.SEEK_SET)
            for fd, inheritable in file.fds:
                os.dup2(reopened, fd, inheritable)
            os.close(reopened)

    def _freeze(self, ours: set[int]) -> None:
        """Before the first copy: from now on this process never changes again, unless the clone fails."""
        self._look(ours)
        self._ready = None
        self._clocks = Clocks()
        gc.freeze()  # a collection in a copy would otherwise write to, and so duplicate, every page
        # Copies that end are this process's children: ignored, so that none stays as a zombie.
        self._set_on_child(_SIG_IGN, self._on_child)
        rebind.mark_stale()
        self._frozen = True

    def _thaw(self) -> None:
        self._frozen = False
        self._set_on_child(self._on_child.raw, None)

    def _set_on_child(self, action: bytes, before: ctypes.Array[ctypes.c_char] | None) -> None:
        batch = Batch()
        address = ctypes.addressof(before) if before is not None else 0
        batch.add(syscalls.NR_RT_SIGACTION, signal.SIGCHLD, action, address, _SIGSET_BYTES)
        batch.run()

    def _look(self, ours: set[int]) -> None:
        """Every file and folder that is open on the disk, and devices where all children inherit them: these have no
        state, but criu finds none that was opened in another mount namespace. Raises OSError for what a copy would
        lose and the planner can't see.
        """
        _refuse_timers()
        _refuse_sysv_ipc()
        self._open_files = []
        devices = []
        for name in os.listdir("/proc/self/fd"):
            fd = int(name)
            if fd in ours:
                continue
            try:
                path = os.readlink(f"/proc/self/fd/{fd}")
                status = os.fstat(fd)
            except OSError:  # the descriptor of this very listing
                continue
            if stat.S_IFMT(status.st_mode) not in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFCHR):
                continue
            flags = fcntl.fcntl(fd, fcntl.F_GETFL)
            if fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC:
                flags |= os.O_CLOEXEC
            if not stat.S_ISCHR(status.st_mode):
                offset = os.lseek(fd, 0, os.SEEK_CUR) if not flags & os.O_PATH else 0
                self._add_file(fd, path, flags, offset, status)
            elif _is_device(path, status.st_rdev):
                devices.append((fd, path, flags))
        # By the batch, without Python, only where each is the lowest free number once it is closed.
        devices.sort()
        self._devices = [device for i, device in enumerate(devices) if device[0] == i]
        for fd, path, flags in devices[len(self._devices) :]:
            self._open_files.append(_File([(fd, not flags & os.O_CLOEXEC)], path, flags, 0))
        self._cwd = os.getcwd()

    def _add_file(self, fd: int, path: str, flags: int, offset: int, status: os.stat_result) -> None:
        entry = fd, not flags & os.O_CLOEXEC
        flags &= ~os.O_CLOEXEC
        for file in self._open_files:
            if (file.path, file.flags, file.offset) == (path, flags, offset) and _is_same(file.fds[0][0], fd):
                file.fds.append(entry)
                return
        try:
            there = os.stat(path, follow_symlinks=False)
        except OSError as error:
            raise OSError(
                error.errno, f"descriptor {fd} can't be opened again: {path}: {error.strerror}"
            ) from None
        if not os.path.samestat(there, status):
            raise OSError(errno.ESTALE, f"descriptor {fd}: at {path} is another file by now")
        self._open_files.append(_File([entry], path, flags, offset))


def take_variables(frame: Frame) -> None:
    """Environment variables that differ in this copy; None: one that is not there."""
    changed = wire.decode(frame.meta, frame.data).get("variables", {}) if frame.meta else {}
    for name, value in changed.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


class _File(NamedTuple):
    """An open file description. `fds`: the descriptors that share it, and whether a program that is run gets them."""

    fds: list[tuple[int, bool]]
    path: str
    flags: int
    offset: int


def _is_same(one: int, other: int) -> bool:
    """Whether two descriptors of a file, which are at the same place, share that place: one moves with the other."""
    try:
        here = os.lseek(one, 0, os.SEEK_CUR)
        os.lseek(one, here ^ 1, os.SEEK_SET)
        try:
            return os.lseek(other, 0, os.SEEK_CUR) != here
        finally:
            os.lseek(one, here, os.SEEK_SET)
    except OSError:  # opened as a mere path, or nothing that has a place
        return False


def _is_device(path: str, number: int) -> bool:
    try:
        return os.stat(path).st_rdev == number
    except OSError:
        return False


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def _give_up(control: int, error: BatchError) -> NoReturn:
    """A half-made copy must never run on."""
    meta = str(error).encode()
    os.write(control, wire.HEADER.pack(Op.READY, wire.Status.ERROR, 0, len(meta), 0) + meta)
    os._exit(1)


def _refuse_timers() -> None:
    """/proc doesn't show these, so the planner can't: fork drops them, and the frozen origin's would go off."""
    for which in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
        if signal.getitimer(which)[0]:
            raise OSError(errno.EBUSY, "an interval timer is armed (alarm, setitimer)")


def _refuse_sysv_ipc() -> None:
    """What sysvipc(7) keeps without a process that holds it. /proc shows it inside its namespace only."""
    for name, what in _SYSV_IPC.items():
        try:
            fd = os.open(f"/proc/sysvipc/{name}", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:  # a kernel without it
            return
        try:
            if os.read(fd, 4096).count(b"\n") > 1:  # one is the heading
                raise OSError(errno.EBUSY, f"a System V {what} exists")
        finally:
            os.close(fd)


def enter_root(root: int, attached: list[int], targets: list[str]) -> None:
    """Makes the detached mount `root` this mount namespace's /, with its own /proc and terminals and the mounts that go
    on it: for a first guest, what `_calls` lists for a copy.
    """
    move_mount(root, "/")
    os.fchdir(root)
    for fd, target in zip(attached, targets):
        move_mount(fd, target.lstrip("/"))
    syscalls.mount("proc", "proc", "proc", _PROC_FLAGS)
    syscalls.mount("devpts", "dev/pts", "devpts", _TERMINAL_FLAGS, _TERMINALS)
    pivot_root(".", ".")
    umount2(".", MNT_DETACH)
    os.chdir("/")
