"""Restores whose memory comes when it is touched: what criu needs for them here, and each one's pager.

criu's tasks open their userfaultfd themselves, in the sandbox's user namespace. With the system call, the kernel allows
that only where the sysctl vm.unprivileged_userfaultfd does, for every user of the machine. Who can open the device
/dev/userfaultfd is asked for nothing: where the sysctl is off, a library of 1000 bytes (uffd.c), which is loaded into
criu before the C library, takes that way. The guest's own code has neither: its seccomp filter, and no such device.
"""

from __future__ import annotations

import binascii
import contextlib
import fcntl
import os
import platform
import select
import signal
import socket
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

from sandbox_gym.backends.shared.jobs import TIMED_OUT, Jobs

from . import pager

# Below, criu copies all of it in less time than the pager takes to start and to bring what is touched at once.
FROM_BYTES = 32 << 20
# Only where the memory limit is that many times the image. What has not come when a process forks comes to both on its
# own, where in the origin they share it: a first child may need as much again, and its first child, and none is to be
# killed for that.
ROOM = 4
_DEVICE = "userfaultfd"
_LIBRARY = "uffd.so"
_USERFAULTFD_IOC_NEW, _UFFDIO_API = 0xAA00, 0xC018AA3F
_API = struct.Struct("3Q")
_FEATURES = 0x2 | 0x4 | 0x8 | 0x40  # events: fork, remap, remove, unmap
_SYSCTL = Path("/proc/sys/vm/unprivileged_userfaultfd")


def prepare(folder: Path, run_fd: int) -> dict[str, str] | None:
    """The environment for a criu that restores lazily; None where that can't be. `folder`: where those of images lie.
    `run_fd`: what is /run for criu.
    """
    try:
        device = os.stat("/dev/userfaultfd").st_rdev
        os.mknod(folder / _DEVICE, 0o20600, device)
        os.chmod(
            folder / _DEVICE, 0o666
        )  # for the tasks' root, who is nobody here; the folder is for ours alone
        with open(folder / _DEVICE, "rb") as file:
            fd = fcntl.ioctl(file, _USERFAULTFD_IOC_NEW, os.O_CLOEXEC)
        try:
            fcntl.ioctl(fd, _UFFDIO_API, _API.pack(0xAA, _FEATURES, 0))
        finally:
            os.close(fd)
        if _SYSCTL.read_text().strip() == "1":
            return {}
    except OSError:
        return None
    if platform.machine() != "x86_64":
        return None
    library = os.open(_LIBRARY, os.O_WRONLY | os.O_CREAT, 0o644, dir_fd=run_fd)
    with open(library, "wb") as file:
        file.write(zlib.decompress(_CODE))
    return {"LD_PRELOAD": f"/run/{_LIBRARY}"}


class Pager:
    """The supervisor's hold on the pager of one restored sandbox: it ends with that, or when all memory has come.
    `ended` is called once, then, with "" or why it has not brought all.
    """

    def __init__(self, jobs: Jobs, work: Path, folder: int, ended: Callable[[str], object]) -> None:
        """`work`: where criu will look for it. `folder`: of the images, open. Raises OSError."""
        self._jobs = jobs
        self._ended = ended
        self._lost: Callable[[str], object] | None = None
        self._root = -1
        self._complete = False
        self._short = ""  # why the last order was refused
        self._failure = ""
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with listener, theirs:
            listener.bind(str(work / pager.SOCKET))
            listener.listen()
            self._pid = os.fork()
            if self._pid == 0:
                pager.serve(listener, theirs, folder)
        self._pidfd = os.pidfd_open(self._pid)
        self._jobs.loop.watch(self._pidfd, self._look)

    @property
    def over(self) -> bool:
        return self._pidfd < 0

    def guard(self, pid: int, lost: Callable[[str], object] | None) -> None:
        """The sandbox that it serves, by its first process. `lost` hears why that can't go on, should the pager fail.

        Raises ProcessLookupError when it has ended already.
        """
        if self._complete:
            return
        self._root = os.pidfd_open(pid)
        self._lost = lost
        self._jobs.loop.watch(self._root, self._orphaned)
        if self._pidfd >= 0:
            with contextlib.suppress(OSError):  # it is ending
                self._orders.send(b"%s %d" % (pager.ROOT, pid))
        if self._failure:  # since criu's last word
            self._lose()

    def complete(self, room: int, timeout: float, done: Callable[[str], object]) -> None:
        """All memory comes, if that is no more than `room` bytes, else none; `done` hears "", or why it has not.

        Raises OSError.
        """
        self._short = ""
        if self._pidfd >= 0:
            with contextlib.suppress(OSError):  # it is ending
                self._hear(room)  # an answer that came too late
                self._short = ""
                self._orders.send(b"%s %d" % (pager.FINISH, room))
        pidfd, orders = self._pidfd, self._orders

        def waited(code: int) -> None:
            if code == TIMED_OUT:
                done(f"its memory was not all there within {timeout:g} s")
                return
            self._look()
            if self._pidfd >= 0:
                self._hear(room)
                done(self._short or "it is not known whether its memory is all there")
            else:
                done("" if self._complete else "the process that brings its memory has ended")

        def wait() -> None:
            if pidfd >= 0:
                select.select([pidfd, orders.fileno()], [], [], timeout)
                with contextlib.suppress(BlockingIOError):
                    if orders.recv(64, socket.MSG_PEEK | socket.MSG_DONTWAIT).startswith(pager.SHORT):
                        return
                _has_ended(pidfd, timeout)  # its last word comes right before

        self._jobs.start(wait, timeout, waited)

    def _hear(self, room: int) -> None:
        """Whether it has refused an order."""
        with contextlib.suppress(BlockingIOError):  # another, which was waited for too, has heard it
            word, _, missing = self._orders.recv(64, socket.MSG_DONTWAIT).partition(b" ")
            if word == pager.SHORT:
                self._short = (
                    f"{int(missing)} bytes of its processes' memory have not come yet, since it was restored, and its "
                    f"memory limit leaves room for {room}: end some of the processes, or use a larger limit"
                )

    def stop(self) -> None:
        """Kills it. Idempotent."""
        if self._pidfd >= 0:
            with contextlib.suppress(
                ProcessLookupError
            ):  # it has been waited for, and the loop tells so next
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)  # the keeper, which is of its group

    def _orphaned(self) -> None:
        if _has_ended(self._root):
            self._unguard()
            self.stop()

    def _unguard(self) -> None:
        if self._root >= 0:
            self._jobs.loop.unwatch(self._root)
            os.close(self._root)
            self._root = -1

    def _look(self) -> None:
        """Whether it has ended, and how."""
        if self._pidfd < 0 or not _has_ended(self._pidfd):
            return
        self._jobs.loop.unwatch(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = -1
        with self._orders as orders:
            orders.setblocking(False)
            word = b""
            with contextlib.suppress(OSError):
                while block := orders.recv(4096):
                    word = block  # the last
        self._complete = word == pager.DONE
        if self._complete:
            self._unguard()
        else:
            why = f": {word.decode(errors='replace')}" if word else ""
            self._failure = f"the process that brings its memory has ended{why}"
            if self._root >= 0:
                self._lose()
        self._jobs.reap()
        self._ended(self._failure)

    def _lose(self) -> None:
        """The sandbox can't go on. It stays guarded: the keeper has to end with it."""
        if self._lost is not None:
            self._lost(self._failure)
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._root, signal.SIGKILL)


def _has_ended(pidfd: int, patience: float = 0.0) -> bool:
    """An event that the loop tells of may be another's, whose descriptor had this number before."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(patience * 1000))


_CODE = binascii.a2b_base64(
    "eNqrd/VxY2JkZIABZgY7BgSPgcGBARM4MFgwsEDZILWsDLjBDSZUmkEAoY8NWV4IlRZgRKVh+pgI6PvAgEpzQOnApyUpbAzEAwEk/zFD"
    "7WVAEsMFQHJCQBc+gCp6DBXnRDITBRRXFicn5uQwxMenFhXl5cfn5CcnlmTm50GlHwhDaHY0N8DAf1MuoM//q/IASX55ByALxM8ASb18"
    "8P//f8dw385DHp0/fDtPOIZ5dv5zDHUMCQ32aH4j4dFZosLh0+2jEuDRec2j85RHd40KBz+rq+Fbz84jjvtBacKz8Z8zkOKfcsiz+c9/"
    "/ikHWg6VpDk2/gV5pSTW1fCSq+EBV8OTPp0/fDrfe/SaFgFt3cXAwcXAz+rRedSj9UAlq+f/o693eHSHqHDAle8AhYNH5/t9DKuAZrMa"
    "XvLoPLyDGSx2Daix9XbFqdeSPp2PPRv/MH74/7+I94U60CPfb3dKeDSf/u/RfATo9BvRsY4xjrGOcY7xh/X09EuLU4vSEktzStJSoOEC"
    "S58K0HiApdEGKB+WFiygfC4oXwpKc0NpCXi+gIATwoh0iCwvwoCIJxAQh9ILGBnoAmDpHx1cg9oPAJIGi9U="
)
