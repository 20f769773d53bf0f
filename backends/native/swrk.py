"""Runs of criu(8): `criu swrk`, spoken with over a socket, each as a job of the supervisor.

A run has a mount namespace of its own, whose /run is a tmpfs that all runs share: there criu keeps what it found out
about the kernel, which takes it 40 ms otherwise, and there a restored root is mounted.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import signal
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from sandbox_gym.backends.shared.jobs import TIMED_OUT, Jobs
from sandbox_gym.errors import SandboxError
from sandbox_gym.guest import syscalls

from . import criu, rpc

RUN = "/run"
ROOT = f"{RUN}/root"  # where a restored tree's root is mounted, for criu alone
CONTROL_FD = 100  # what `begin` may put something at
_PID = "pid"  # in its work folder
_NEVER_BEGAN = 127  # exit code of a job
_COMMON: dict[str, rpc.Value] = {
    "log_level": 2,  # warnings: of what it leaves out
    "log_file": "log",
    "notify_scripts": 1,
    "manage_cgroups_mode": 0,  # ignore: a restored tree stays in the group that its criu joined
    "network_lock": 3,  # none
    "empty_ns": syscalls.CLONE_NEWNET,
    "tcp_established": 1,
    "file_locks": 1,
    "ghost_limit": 1 << 30,  # bytes of a file that is open but deleted
    "link_remap": 1,  # for one that has another name, or lies below
}


def _nothing() -> None:
    pass


@dataclass
class Task:
    """What a run of criu is to do."""

    kind: int  # rpc.DUMP or rpc.RESTORE
    folder: Path  # of the images
    options: Mapping[str, rpc.Value]
    timeout: float
    stage: Callable[
        [str, int, Path], None
    ]  # at each stage, while criu waits: the tree's first pid, and criu's log
    done: Callable[[str, int], None]  # once: why it failed, or "" and the tree's first pid
    broken: Callable[[], object] = (
        _nothing  # before `done`, when it ended without a last word, in the middle of it all
    )
    begin: Callable[[], None] = _nothing  # in its process before it becomes criu, and in its working folder
    environment: Mapping[str, str] | None = None


class Workplace:
    """What all runs of criu have in common."""

    def __init__(self, jobs: Jobs, run_folder: Path) -> None:
        self.jobs = jobs
        self.program = ""
        self.run_fd = -1  # of the tmpfs
        self._run_folder = run_folder
        self._count = 0

    def prepare(self) -> bool:
        """True the first time. Raises BackendUnavailable where there is no criu, OSError."""
        self.program = criu.find().path
        if self.run_fd >= 0:
            return False
        context = syscalls.fsopen("tmpfs")
        try:
            syscalls.fsconfig_string(context, "mode", "755")
            syscalls.fsconfig_create(context)
            self.run_fd = syscalls.fsmount(context)
        finally:
            os.close(context)
        for name in ("root", "tmp"):
            os.mkdir(name, dir_fd=self.run_fd)
        return True

    def start(
        self, task: Task, meanwhile: Callable[[Path, int], None] | None = None
    ) -> Callable[[str], None]:
        """`meanwhile` is called when criu's process is there, and waits: with its work folder, and the images' as a
        descriptor. What is returned ends the run, for a reason, if it still goes on. Raises OSError.
        """
        self._count += 1
        run = _Run(self, task, f"w{self._count}")
        try:
            run.start()
            if meanwhile is not None:
                meanwhile(run.place, run.folder)
            run.ask()
        except BaseException:
            run.close()
            raise
        return run.abandon

    def enter(self) -> None:
        """In a job's process: a mount namespace with that /run, where only our own folder is as it was."""
        ours = syscalls.open_tree(str(self._run_folder), recursive=True)
        run = syscalls.open_tree("", dfd=self.run_fd)
        syscalls.unshare(syscalls.CLONE_NEWNS)
        # criu leaves folders in /tmp when it is killed.
        syscalls.move_mount(syscalls.open_tree("tmp", dfd=run), "/tmp")
        syscalls.move_mount(run, RUN)
        self._run_folder.mkdir(parents=True, exist_ok=True)
        syscalls.move_mount(ours, str(self._run_folder))
        null = os.open("/dev/null", os.O_RDWR)
        for fd in (0, 1):
            os.dup2(null, fd)


class _Run:
    """One run of criu, from its process's start to its last word."""

    def __init__(self, workplace: Workplace, task: Task, name: str) -> None:
        self._workplace = workplace
        self._loop = workplace.jobs.loop
        self._task = task
        self._name = name
        os.mkdir(name, dir_fd=workplace.run_fd)
        # criu opens them by these numbers, as this process's.
        self.folder = os.open(task.folder, os.O_RDONLY)
        self._work = os.open(name, os.O_RDONLY, dir_fd=workplace.run_fd)
        self.place = Path(f"/proc/self/fd/{self._work}")
        self._log = self.place / "log"
        self._ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours.setblocking(False)
        self._failure = ""  # of ours, at a stage
        self._open = True

    def start(self) -> None:
        with self._theirs:
            self._workplace.jobs.start(self._become_criu, self._task.timeout, self._ended)
        self._loop.watch(self._ours.fileno(), self._heard)

    def ask(self) -> None:
        folders = {"images_dir_fd": self.folder, "work_dir_fd": self._work}
        self._ours.send(rpc.request(self._task.kind, {**_COMMON, **self._task.options, **folders}))

    def close(self) -> None:
        """Idempotent. A criu that was asked for nothing ends."""
        if not self._open:
            return
        self._open = False
        self._loop.unwatch(self._ours.fileno())
        self._ours.close()
        os.close(self.folder)
        os.close(self._work)
        shutil.rmtree(f"/proc/self/fd/{self._workplace.run_fd}/{self._name}", ignore_errors=True)

    def abandon(self, reason: str) -> None:
        """Kills criu and what is of its session; `done` hears the reason."""
        if not self._open or self._failure:
            return
        self._failure = reason
        with contextlib.suppress(OSError, ValueError):  # it has not come so far, and finds the socket closed
            os.killpg(int((self.place / _PID).read_text()), signal.SIGKILL)
        self._loop.unwatch(self._ours.fileno())
        self._ours.close()

    def _become_criu(self) -> None:
        (self.place / _PID).write_text(str(os.getpid()))
        # What goes wrong before there is a criu.
        os.dup2(os.open(self._log, os.O_WRONLY | os.O_CREAT, 0o600), 2)
        self._workplace.enter()
        spoken_over = fcntl.fcntl(self._theirs, fcntl.F_DUPFD, CONTROL_FD + 1)  # out of the way of `begin`
        os.chdir(self.place)
        self._task.begin()
        program = self._workplace.program
        environment = {"PATH": os.defpath, **(self._task.environment or {})}
        os.execve(program, [program, "swrk", str(spoken_over)], environment)

    def _heard(self) -> None:
        self._hear()

    def _hear(self) -> bool:
        """Takes in one message; False when there is none, or the last has been heard."""
        try:
            said = rpc.receive(self._ours)
        except BlockingIOError:
            return False
        except (EOFError, ValueError, OSError):
            self._loop.unwatch(self._ours.fileno())  # its exit code is on the way, and tells more
            return False
        pid = said.get("pid", 0)
        if said["kind"] == rpc.NOTIFY:
            self._attend(said["script"], pid)
            return True
        # A tree that ends at once is a success to criu, without a pid.
        good = said["success"] and (self._task.kind == rpc.DUMP or pid > 0)
        self._end("" if good else self._failure or f"criu failed: {_first_error(self._log)}", pid)
        return False

    def _attend(self, script: str, pid: int) -> None:
        """What is to be done at a stage."""
        try:
            self._task.stage(script, pid, self._log)
        except (OSError, SandboxError) as error:
            self._failure = str(error)
        with contextlib.suppress(OSError):  # it is gone, which its exit tells
            self._ours.send(rpc.notified(success=not self._failure))

    def _ended(self, code: int) -> None:
        while (
            self._open and code != TIMED_OUT and self._hear()
        ):  # what it said last may not have been read yet
            pass
        if self._open:
            if code != _NEVER_BEGAN:
                self._task.broken()
            if code == TIMED_OUT:  # what else broke since, its end did
                how, failure = f"did not end within {self._task.timeout:g} s", ""
            else:
                how, failure = f"ended with {code}", self._failure
            self._end(failure or f"criu {how}: {_first_error(self._log)}", 0)

    def _end(self, reason: str, pid: int) -> None:
        if self._open:
            self.close()
            self._task.done(reason, pid if not reason else 0)


def _first_error(log: Path) -> str:
    """Why criu gave up, by its log: the first error is the cause, later ones follow from it."""
    try:
        with open(log, errors="replace") as file:
            found = re.findall(r"Error(?: \([^)]*\))?: (.*)", file.read(1 << 20))
    except OSError:
        found = []
    # Not being allowed more descriptors than the hard limit is what it complains of at each start.
    return next((line for line in found if "RLIMIT_NOFILE" not in line), "it did not say why")
