"""`exec` and `shell`: one command at a time, drained and bounded, ended in time with all that it started."""

from __future__ import annotations

import fcntl
import os
import selectors
import signal
import socket
import subprocess
import time
from typing import Any

MAX_OUTPUT = 1 << 20  # bytes kept of each stream
_CHUNK = 1 << 16

# Pipes whose command has ended while something it left behind still writes: emptied for ever, so that a server in the
# background neither blocks on a full pipe nor dies of SIGPIPE. Between calls by waiting on them; while a cell or
# another command runs, which may itself wait for that server, by a signal (O_ASYNC: this process has no second thread).
_leftovers: list[int] = []
_draining = False
_adopted: set[int] = (
    set()
)  # what commands have left behind: process 1's to reap, and nobody else's to wait for


def run(
    argv: list[str], timeout: float, cwd: str | None, env: dict[str, str] | None, stdin: bytes
) -> dict[str, Any]:
    """The fields of `ExecResult`, as a dict. A program that can't be started is exit code 127 or 126, as in a shell."""
    before = pids()
    started = time.perf_counter()
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=cwd,
            env={**os.environ, **env} if env else None,
            start_new_session=True,
        )
    except OSError as error:
        code = 126 if isinstance(error, PermissionError) else 127
        text = f"{error.filename or argv[0]}: {error.strerror}\n"
        return _result(code, [_Stream(), _Stream(text.encode())], False, started)
    _kill_first(process.pid)
    streams = [_Stream(), _Stream()]
    timed_out = not _pump(process, streams, stdin, started + timeout)
    if timed_out:
        kill_started(before)
        process.wait()
    _adopted.update(pids() - before - {os.getpid()})
    for pipe, stream in zip((process.stdout, process.stderr), streams):
        assert pipe is not None
        fd = os.dup(pipe.fileno())
        pipe.close()
        if stream.drain(fd) or timed_out:
            os.close(fd)
        else:
            _leave(fd)
    reap_orphans()
    code = process.returncode if process.returncode >= 0 else 128 - process.returncode
    return _result(code, streams, timed_out, started)


def _kill_first(pid: int) -> None:
    """Where memory runs out, a command goes before the interpreter, whose state is worth more."""
    try:
        with open(f"/proc/{pid}/oom_score_adj", "w") as file:
            file.write("500")
    except OSError:  # it has already ended
        pass


def _result(code: int, streams: list[_Stream], timed_out: bool, started: float) -> dict[str, Any]:
    out, err = streams
    return {
        "exit_code": code,
        "stdout": out.kept.decode("utf-8", "replace"),
        "stderr": err.kept.decode("utf-8", "replace"),
        "stdout_cut": out.cut,
        "stderr_cut": err.cut,
        "timed_out": timed_out,
        "duration": time.perf_counter() - started,
    }


class _Stream:
    def __init__(self, kept: bytes = b"") -> None:
        self.kept = bytearray(kept)
        self.cut = 0

    def take(self, block: bytes) -> None:
        room = MAX_OUTPUT - len(self.kept)
        self.kept += block[:room]
        self.cut += max(0, len(block) - room)

    def drain(self, fd: int) -> bool:
        """Takes what is there now. True at the end of the stream, False when a writer is left."""
        os.set_blocking(fd, False)
        for _ in range(64):  # bounded: something in the background may write faster than this reads
            try:
                block = os.read(fd, _CHUNK)
            except BlockingIOError:
                return False
            if not block:
                return True
            self.take(block)
        return False


def _pump(process: subprocess.Popen[bytes], streams: list[_Stream], stdin: bytes, deadline: float) -> bool:
    """Feeds and drains until the process itself ends, whatever its children do. False when time ran out."""
    pidfd = os.pidfd_open(process.pid)
    waiting = memoryview(stdin)
    with selectors.DefaultSelector() as selector:
        selector.register(pidfd, selectors.EVENT_READ)
        for pipe, stream in zip((process.stdout, process.stderr), streams):
            assert pipe is not None
            selector.register(pipe, selectors.EVENT_READ, stream)
        if process.stdin is not None:
            os.set_blocking(process.stdin.fileno(), False)
            selector.register(process.stdin, selectors.EVENT_WRITE)
        try:
            while True:
                left = deadline - time.perf_counter()
                if left <= 0:
                    return False
                for key, _ in selector.select(left):
                    if key.fileobj == pidfd:
                        process.wait()
                        return True
                    if key.fileobj is process.stdin:
                        waiting = _feed(process.stdin, waiting)
                        if not waiting:
                            selector.unregister(process.stdin)
                            process.stdin.close()
                        continue
                    block = os.read(key.fd, _CHUNK)
                    if block:
                        key.data.take(block)
                    else:
                        selector.unregister(key.fileobj)
        finally:
            os.close(pidfd)
            if process.stdin is not None and not process.stdin.closed:
                process.stdin.close()


def _feed(pipe: Any, waiting: memoryview) -> memoryview:
    try:
        return waiting[os.write(pipe.fileno(), waiting[:_CHUNK]) :]
    except BrokenPipeError:
        return waiting[:0]


def have_leftovers() -> bool:
    return bool(_leftovers)


def _leave(fd: int) -> None:
    _leftovers.append(fd)
    signal.signal(signal.SIGIO, lambda signum, frame: _drain())
    fcntl.fcntl(fd, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC)
    _drain()  # what came before the signal was asked for


def _drain() -> None:
    global _draining
    if (
        _draining
    ):  # a signal in the middle of the same: the loop below sees what it announces, or the next one does
        return
    _draining = True
    try:
        for fd in list(_leftovers):
            try:
                ended = not os.read(fd, _CHUNK)
            except BlockingIOError:
                continue
            if ended:
                _leftovers.remove(fd)
                os.close(fd)
    finally:
        _draining = False


def drain_leftovers(control: socket.socket) -> None:
    """Waits for the next request while emptying the pipes of past commands. Returns at once when there are none."""
    while _leftovers:
        with selectors.DefaultSelector() as selector:
            selector.register(control, selectors.EVENT_READ)
            for fd in list(_leftovers):
                try:
                    selector.register(fd, selectors.EVENT_READ)
                except OSError:  # a signal has just ended it
                    continue
            ready = {key.fd for key, _ in selector.select()}
        _drain()
        if control.fileno() in ready:
            return


def pids() -> set[int]:
    return {int(name) for name in os.listdir("/proc") if name.isdigit()}


def kill_started(before: set[int], patience: float = 5.0) -> None:
    """Kills every process of this sandbox that was not there `before`, until none is left."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        started = pids() - before - {os.getpid()}
        started = {pid for pid in started if _state(pid)[0] not in "ZX"}
        if not started:
            return
        if before <= {os.getpid()}:
            _kill(-1, signal.SIGKILL)  # everything but process 1, under one lock: no fork bomb outruns it
            continue
        for sign in (signal.SIGSTOP, signal.SIGKILL):  # stopped first: what is stopped can't fork away
            for pid in started:
                _kill(pid, sign)
    _kill(
        -1, signal.SIGKILL
    )  # they multiply faster than they can be told apart: what was there before goes too


def _kill(pid: int, sign: signal.Signals) -> None:
    try:
        os.kill(pid, sign)
    except ProcessLookupError:
        pass


def _state(pid: int) -> tuple[str, int, int]:
    """State letter, parent and session of a process; ("X", 0, 0) when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
    except OSError:
        return "X", 0, 0
    return fields[0].decode(), int(fields[1]), int(fields[3])


def reap_orphans() -> None:
    """Waits for the dead that commands left to process 1. The interpreter's own children are its user's to wait for:
    taking them would steal their exit codes. They are in its session, or lead one of their own, as daemons do too: of
    those only the ones that a command is known to have left are taken.
    """
    me = os.getpid()
    _, _, ours = _state(me)  # not its number: a copy's session is one of a namespace that it can't see
    there = pids() - {me}
    _adopted.intersection_update(there)
    for pid in there:
        state, parent, session = _state(pid)
        if state == "Z" and parent == me and (pid in _adopted or session not in (ours, pid)):
            _reap(pid)


def _reap(pid: int) -> None:
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        pass
