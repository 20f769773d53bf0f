"""Processes that outlive the call that starts them: read, written to, waited for and ended by calls of their own."""

from __future__ import annotations

import errno
import fcntl
import os
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable
from typing import Any

from . import commands, pipes
from .wire import Op

MAX_RUNNING = 64
MAX_FINISHED = 256  # whose exit codes are kept
MAX_OUTPUT = 1 << 20  # bytes of a stream that wait to be read: past them the oldest go
MAX_UNREAD = 32 << 20  # bytes that wait, of all finished processes together
LOST = -1  # the exit code of a process that code in the sandbox has waited for itself
_SHOWN = 16, 256  # arguments, and characters of each, in a listing
_PATIENCE = 5.0  # seconds for what was killed to be gone


class TooManyProcesses(Exception):
    pass


class NoTerminal(Exception):
    pass


class Kept:
    """The newest MAX_OUTPUT bytes of a stream that nobody has read yet."""

    def __init__(self, block: bytes = b"") -> None:
        self.cut = 0
        self.waiting = bytearray(block)

    def take(self, block: bytes) -> None:
        self.waiting += block
        self.shorten(MAX_OUTPUT)

    def shorten(self, most: int) -> None:
        over = len(self.waiting) - most
        if over > 0:
            del self.waiting[:over]
            self.cut += over

    def pop(self, most: int) -> bytes:
        block = bytes(self.waiting[:most])
        del self.waiting[: len(block)]
        return block


class Process:
    """`pipes`: what comes of it; `stdin`: the descriptor that goes to it, -1 once closed."""

    def __init__(self, name: str, argv: list[str], pty: bool) -> None:
        self.name = name
        self.argv = [argument[: _SHOWN[1]] for argument in argv[: _SHOWN[0]]]
        self.pty = pty
        self.pid = 0
        self.code: int | None = None
        self.ended = 0.0  # on the monotonic clock, once it has
        self.kept = {"stdout": Kept(), "stderr": Kept()}
        self.pipes: dict[str, pipes.Pipe] = {}
        self._stdin = -1

    @property
    def stdin(self) -> int:
        return self.pipes["stdout"].fd if self.pty and self.pipes else self._stdin

    @property
    def over(self) -> bool:
        return self.code is not None and all(pipe.fd < 0 for pipe in self.pipes.values())

    def start(self, argv: list[str], cwd: str | None, env: dict[str, str] | None) -> None:
        """Raises OSError when the program can't be started, NoTerminal."""
        if self.pty:
            ours, theirs = _make_terminal()
            ends, outputs = [theirs] * 3, {"stdout": ours}
        else:
            read, self._stdin, out, write_out, err, write_err = make_pipes(3)
            ends, outputs = [read, write_out, write_err], {"stdout": out, "stderr": err}
            os.set_blocking(self._stdin, False)
        take_terminal = (lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0)) if self.pty else None
        try:
            variables = {**os.environ, **env} if env else None
            self.pid = spawn(argv, ends, cwd=cwd, env=variables, preexec_fn=take_terminal)
        except BaseException:
            self.close_stdin()
            for fd in outputs.values():
                os.close(fd)
            raise
        finally:
            for fd in set(ends):
                os.close(fd)
        self.pipes = {name: pipes.watch(fd, self.kept[name].take) for name, fd in outputs.items()}

    def look(self) -> int | None:
        """The exit code, once it has ended."""
        if self.code is None:
            self.code = reap(self.pid)
            if self.code is not None:
                self.ended = time.monotonic()
                self.close_stdin()
        return self.code

    def close_stdin(self) -> None:
        if self._stdin >= 0:
            os.close(self._stdin)
            self._stdin = -1

    def info(self) -> dict[str, Any]:
        self.look()
        return {
            "id": self.name,
            "argv": self.argv,
            "pid": self.pid,
            "pty": self.pty,
            "exit_code": self.code,
            "stdout_cut": self.kept["stdout"].cut,
            "stderr_cut": self.kept["stderr"].cut,
        }


_processes: dict[str, Process] = {}


def _make_terminal() -> tuple[int, int]:
    try:
        ours, theirs = os.openpty()
    except OSError as error:
        raise NoTerminal(f"no terminal can be made in here: {error}") from error
    set_size(ours, 24, 80)
    return ours, theirs


def make_pipes(count: int) -> list[int]:
    made: list[int] = []
    try:
        for _ in range(count):
            made += os.pipe()
    except OSError:
        for fd in made:
            os.close(fd)
        raise
    return made


def spawn(argv: list[str], ends: list[int], **options: Any) -> int:
    """Starts a program in a session of its own, on these descriptors; its process is for `reap` to wait for."""
    process = subprocess.Popen(
        argv,
        stdin=ends[0],
        stdout=ends[1],
        stderr=ends[2],
        start_new_session=True,
        **options,
    )
    process.returncode = 0  # else `subprocess` would wait for it as well, at a time of its choice
    commands.disown(process.pid)
    commands.kill_first(process.pid)
    return process.pid


def reap(pid: int) -> int | None:
    """The exit code of a child that has ended, None while it runs."""
    try:
        ended, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return LOST
    return commands.exit_code(os.waitstatus_to_exitcode(status)) if ended else None


def set_size(terminal: int, rows: int, columns: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))


def collect() -> None:
    """Takes the exit codes of what has ended, and gives up what is kept past the bounds."""
    finished = [process for process in _processes.values() if process.look() is not None]
    finished.sort(key=lambda process: process.ended)
    for process in finished[: max(0, len(finished) - MAX_FINISHED)]:
        del _processes[process.name]
        for pipe in process.pipes.values():
            pipe.leave()
    unread = 0
    with pipes.waiting():
        for process in reversed(finished):
            for kept in process.kept.values():
                kept.shorten(max(0, MAX_UNREAD - unread))
                unread += len(kept.waiting)


commands.before_reaping.append(collect)


# ---- requests --------------------------------------------------------------------------------------------------------


def start(id: str, argv: list[str], pty: bool, cwd: str | None, env: dict[str, str] | None) -> dict[str, Any]:
    """A program that can't be started has ended at once, with exit code 127 or 126 and the reason on its stderr."""
    collect()
    if id in _processes:
        raise ValueError(f"there is a process {id} already")
    if sum(not process.over for process in _processes.values()) >= MAX_RUNNING:
        raise TooManyProcesses(f"{MAX_RUNNING} started processes run already: end some")
    process = Process(id, argv, pty)
    try:
        process.start(argv, cwd, env)
    except OSError as error:
        process.code, text = commands.not_started(error, argv)
        process.ended = time.monotonic()
        process.kept["stdout" if pty else "stderr"].take(text)
    _processes[id] = process
    return process.info()


def wait(id: str, timeout: float) -> int | None:
    process, deadline = _find(id), time.monotonic() + timeout
    if process.look() is not None or timeout <= 0:
        return process.code
    with pipes.end_of(process.pid) as watch, pipes.waiting() as turn:
        while process.look() is None and time.monotonic() < deadline:
            turn(deadline, {watch: select.POLLIN})
    return process.code


def output(id: str, stream: str, timeout: float, most: int) -> dict[str, Any]:
    """What has come since the last time; `open`: whether more may come."""
    process, deadline = _find(id), time.monotonic() + timeout
    kept, pipe = process.kept[stream], process.pipes.get(stream)
    with pipes.waiting() as turn:
        turn(0.0, {})  # what is in the pipe by now
        while not kept.waiting and pipe is not None and pipe.fd >= 0 and time.monotonic() < deadline:
            turn(deadline, {})
        return {"data": kept.pop(most), "open": pipe is not None and pipe.fd >= 0}


def feed(id: str, data: bytes, timeout: float, end: bool) -> int:
    """Writes to its stdin as long as it takes something: how many bytes it took. `end`: closes it after."""
    process, deadline = _find(id), time.monotonic() + timeout
    process.look()
    taken = 0
    with pipes.waiting() as turn:  # a terminal's descriptor is closed by what reads from it
        if end and process.pty and process.stdin >= 0:
            data = data + termios.tcgetattr(process.stdin)[6][termios.VEOF]
        while taken < len(data):
            if process.stdin < 0:
                raise BrokenPipeError(errno.EPIPE, "its stdin is closed")
            try:
                taken += os.write(process.stdin, data[taken : taken + pipes.CHUNK])
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    break
                turn(deadline, {process.stdin: select.POLLOUT})
            except OSError as error:  # EPIPE; EIO where nothing has its terminal open
                process.close_stdin()
                raise BrokenPipeError(errno.EPIPE, "it has closed its stdin") from error
    if end and not process.pty:
        process.close_stdin()
    return taken


def send_signal(id: str, number: int) -> None:
    """To the process and all that it has started, as far as that can be told: its session, and their children."""
    process = _find(id)
    ended = process.look() is not None
    if not process.pid:  # it could not be started
        return
    if number == signal.SIGKILL:
        end(process.pid, ended)
        process.look()
        return
    for pid in members(process.pid, ended):
        commands.kill(pid, number)


def resize(id: str, rows: int, columns: int) -> None:
    process = _find(id)
    if not process.pty:
        raise ValueError("it has no terminal (pty=True)")
    with pipes.waiting():
        if process.stdin >= 0:
            set_size(process.stdin, rows, columns)


def listing(id: str | None) -> list[dict[str, Any]]:
    collect()
    return [process.info() for process in (_processes.values() if id is None else [_find(id)])]


def _find(id: str) -> Process:
    try:
        return _processes[id]
    except KeyError:
        raise LookupError(f"no process {id}") from None


HANDLERS: dict[Op, Callable[..., Any]] = {
    Op.START: start,
    Op.WAIT: wait,
    Op.OUTPUT: output,
    Op.FEED: feed,
    Op.SIGNAL: send_signal,
    Op.RESIZE: resize,
    Op.PROCESSES: listing,
}


# ---- a process and what it has started -------------------------------------------------------------------------------


def members(leader: int, reaped: bool) -> set[int]:
    """What lives of a session's leader, its session and their descendants."""
    states = {pid: commands.state(pid) for pid in commands.pids() - {os.getpid()}}
    if (
        reaped and leader in states
    ):  # another process has its number: of the first one's session nothing is left
        return set()
    found: set[int] = set()
    more = {pid for pid, (_, _, session) in states.items() if leader in (pid, session)}
    while more:
        found |= more
        more = {pid for pid, (_, parent, _) in states.items() if parent in found} - found
    return {pid for pid in found if states[pid][0] not in "ZX"}


def end(leader: int, reaped: bool) -> None:
    """Kills them until none is left. Raises TimeoutError."""
    deadline = time.monotonic() + _PATIENCE
    while found := members(leader, reaped):
        if time.monotonic() > deadline:
            raise TimeoutError(errno.ETIMEDOUT, f"{len(found)} of its processes did not end in {_PATIENCE} s")
        commands.adopt(found - {leader})
        try:
            os.killpg(leader, signal.SIGKILL)  # under one lock: a fork bomb can't outrun it
        except ProcessLookupError:
            pass
        for sign in (signal.SIGSTOP, signal.SIGKILL):  # stopped first: what is stopped can't fork away
            for pid in found:
                commands.kill(pid, sign)
    commands.reap_orphans()
