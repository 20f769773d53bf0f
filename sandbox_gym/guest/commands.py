"""`exec` and `shell`: one command at a time, drained and bounded, ended in time with all that it started."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any

from . import pipes

MAX_OUTPUT = 1 << 20  # bytes kept of each stream

_adopted: set[int] = set()  # what commands have left: process 1's to reap, and nobody else's to wait for
before_reaping: list[Callable[[], None]] = []


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
        code, text = not_started(error, argv)
        return result(code, [Stream(), Stream(text)], False, started)
    kill_first(process.pid)
    streams = [Stream(), Stream()]
    outputs = []
    for end, stream in zip((process.stdout, process.stderr), streams):
        assert end is not None
        outputs.append(pipes.watch(os.dup(end.fileno()), stream.take))
        end.close()
    with pipes.waiting() as turn:
        timed_out = not _ends(process, stdin, time.monotonic() + timeout, turn)
        if timed_out:
            kill_started(before)
            process.wait()
        turn(0.0, {})  # what it has printed is in the pipes by now
        for pipe in outputs:
            pipe.leave()
    adopt(pids() - before)
    reap_orphans()
    return result(exit_code(process.returncode), streams, timed_out, started)


def not_started(error: OSError, argv: list[str]) -> tuple[int, bytes]:
    """Exit code and message of a program that could not be started, as in a shell."""
    text = f"{error.filename or argv[0]}: {error.strerror}\n"
    return 126 if isinstance(error, PermissionError) else 127, text.encode("utf-8", "surrogateescape")


def exit_code(returncode: int) -> int:
    """128 + the signal for a process that a signal has ended."""
    return returncode if returncode >= 0 else 128 - returncode


def kill_first(pid: int) -> None:
    """Where memory runs out, a command goes before the interpreter, whose state is worth more."""
    try:
        with open(f"/proc/{pid}/oom_score_adj", "w") as file:
            file.write("500")
    except OSError:  # it has already ended
        pass


def result(code: int, streams: list[Stream], timed_out: bool, started: float) -> dict[str, Any]:
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


class Stream:
    def __init__(self, kept: bytes = b"") -> None:
        self.kept = bytearray(kept)
        self.cut = 0

    def take(self, block: bytes) -> None:
        room = MAX_OUTPUT - len(self.kept)
        self.kept += block[:room]
        self.cut += max(0, len(block) - room)


def _ends(process: subprocess.Popen[bytes], stdin: bytes, deadline: float, turn: pipes.Turn) -> bool:
    """Feeds it until it ends itself, whatever its children do. False when time ran out."""
    waiting = memoryview(stdin)
    others: dict[int, int] = {}
    if process.stdin is not None:
        os.set_blocking(process.stdin.fileno(), False)
        others[process.stdin.fileno()] = select.POLLOUT
    try:
        with pipes.end_of(process.pid) as watch:
            others[watch] = select.POLLIN
            while time.monotonic() < deadline:
                ready = turn(deadline, others)
                if ready.pop(watch, None) and process.poll() is not None:
                    return True
                if process.stdin is not None and ready:
                    waiting = _feed(process.stdin, waiting)
                    if not waiting:
                        del others[process.stdin.fileno()]
                        process.stdin.close()
    finally:
        if process.stdin is not None:
            process.stdin.close()
    return False


def _feed(pipe: Any, waiting: memoryview) -> memoryview:
    try:
        return waiting[os.write(pipe.fileno(), waiting[: pipes.CHUNK]) :]
    except BrokenPipeError:
        return waiting[:0]


def pids() -> set[int]:
    return {int(name) for name in os.listdir("/proc") if name.isdigit()}


def kill_started(before: set[int], *, owner: int | None = None, patience: float = 5.0) -> None:
    """Kills every process of this sandbox that was not there `before`, until none is left. What those that were there
    have started by themselves in the meantime stays, but for the children of `owner`.
    """
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        started = _started(before, owner)
        if not started:
            return
        if before <= {os.getpid()}:
            kill(-1, signal.SIGKILL)  # everything but process 1, under one lock: no fork bomb outruns it
            continue
        for sign in (signal.SIGSTOP, signal.SIGKILL):  # stopped first: what is stopped can't fork away
            for pid in started:
                kill(pid, sign)
    # They multiply faster than they can be told apart: what was there before goes too.
    kill(-1, signal.SIGKILL)


def _started(before: set[int], owner: int | None) -> set[int]:
    states = {pid: state(pid) for pid in pids() - before - {os.getpid()}}
    others = before - {os.getpid(), owner}
    found = set()
    for pid, (letter, parent, session) in states.items():
        above = parent
        for _ in states:  # bounded: numbers that are used again may seem to go round in circles
            if above not in states:
                break
            above = states[above][1]
        if letter not in "ZX" and above not in others and session not in others:
            found.add(pid)
    return found


def kill(pid: int, sign: int) -> None:
    try:
        os.kill(pid, sign)
    except ProcessLookupError:
        pass


def state(pid: int) -> tuple[str, int, int]:
    """State letter, parent and session of a process; ("X", 0, 0) when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
    except OSError:
        return "X", 0, 0
    return fields[0].decode(), int(fields[1]), int(fields[3])


def adopt(left: set[int]) -> None:
    """What commands have left behind is reaped by `reap_orphans`, whatever its session."""
    _adopted.update(left - {os.getpid()})


def disown(pid: int) -> None:
    """A number that is used again, by a process that its starter waits for."""
    _adopted.discard(pid)


def reap_orphans() -> None:
    """Waits for the dead that commands left to process 1. The interpreter's own children are its user's to wait for:
    taking them would steal their exit codes. They are in its session, or lead one of their own, as daemons do too: of
    those only the ones that a command is known to have left are taken.
    """
    for collect in before_reaping:
        collect()
    me = os.getpid()
    _, _, ours = state(me)  # not its number: a copy's session is one of a namespace that it can't see
    there = pids() - {me}
    _adopted.intersection_update(there)
    for pid in there:
        letter, parent, session = state(pid)
        if letter == "Z" and parent == me and (pid in _adopted or session not in (ours, pid)):
            _reap(pid)


def _reap(pid: int) -> None:
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        pass
