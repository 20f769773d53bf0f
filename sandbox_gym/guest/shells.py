"""Shells that live on between calls: folder, variables, functions and aliases carry over from command to command.

A shell reads its script from a pipe, a few lines for each command, and writes each command's exit code to another that
the command itself does not have: so nothing that a command prints is taken for its end. The command is run by `eval` in
a loop of one turn, without which a stray `break` would be an error and, above all, a time-out could not end it:

After a time-out everything that the command started is killed while the shell stands still; then a signal makes it
leave the command, before it begins another of the same line. The signal's trap may do so by `break` outside of
functions; inside of one it arms bash's debugger, which ends functions one after the other before their next step.
(`return` in a trap crashes bash 5.2 when functions are nested.) Other shells have no such way: they are replaced.
"""

from __future__ import annotations

import fcntl
import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any

from . import commands, pipes, processes
from .commands import Stream
from .processes import Kept
from .wire import Op

MAX_SHELLS = 16
_STOP = 60  # a real-time signal that no one else uses
# Where it has no end, bash 5.2 goes on with memory that it has already freed.
_SUBSTITUTION = re.compile(r"[$<>]\(")
_NO_END = b"unexpected EOF while looking for matching"
_REPLACED = b"sandbox-gym: the shell did not come back from this command, and was ended with all its state\n"
_PATIENCE = 2.0  # seconds for a shell to leave a command
_LOOK_AGAIN = 0.02


class TooManyShells(Exception):
    pass


def _bash_begins(status: int) -> str:
    """What bash reads before any command; `status`: the descriptor that takes exit codes."""
    in_function, leave_loops = "((${#FUNCNAME[@]}))", "builtin break 999 2>/dev/null"
    # Runs before each command, of which the first one outside of the loop is the report. A status of 2 (`test` with a
    # wrong operator) tells the debugger to leave this function, a status of 1 not to run this command.
    debugger = (
        f'case $BASH_COMMAND in *">&{status}") builtin trap - DEBUG; builtin set +T; builtin shopt -u extdebug;; '
        f"*) if {in_function}; then builtin test 1 -q 1 2>/dev/null; else ! {leave_loops}; fi;; esac"
    )
    arm = f"builtin shopt -s extdebug; builtin set -T; builtin trap {shlex.quote(debugger)} DEBUG"
    trap = f"if {in_function}; then {arm}; else {leave_loops}; fi"
    # The trap on ERR does nothing, but bash looks for signals before it: it would not after a subshell that failed.
    return f"shopt -s expand_aliases; trap : ERR; trap {shlex.quote(trap)} {_STOP}\n"


def _script(command: str, status: int) -> str:
    # `command` comes first: after a syntax error in `eval`, bash takes the next line's first word for no keyword.
    return (
        "\\command :\n"
        f"for _ in _; do eval {shlex.quote(command)} </dev/null {status}>&-; done; "
        f"{{ \\command printf '%d\\n' \"$?\" >&{status}; }} >/dev/null 2>&1\n"
    )


def _problem(bash: str, command: str) -> bytes:
    """What bash says of a command that has no end; empty for any other."""
    reader = subprocess.run(
        [bash, "--noprofile", "--norc", "-n"],
        input=command.encode("utf-8", "surrogateescape"),
        env={**os.environ, "LC_ALL": "C"},
        capture_output=True,
        check=False,
        timeout=10.0,
    )
    return reader.stderr if reader.returncode and _NO_END in reader.stderr else b""


class Shell:
    def __init__(self) -> None:
        """Raises OSError when there is no shell to start."""
        bash = shutil.which("bash")
        made = processes.make_pipes(4)
        read, self._commands, self._status, write_status, out, write_out, err, write_err = made
        given = -1
        try:
            # Only bash takes numbers of more than one digit. High ones are seldom a command's own.
            given = fcntl.fcntl(write_status, fcntl.F_DUPFD_CLOEXEC, 187 if bash else 9)
            self._number = given if bash else 9
            move = None if given == self._number else lambda: os.dup2(write_status, self._number)
            self.pid = processes.spawn(
                ["bash", "--noprofile", "--norc", "-s"] if bash else ["sh", "-s"],
                [read, write_out, write_err],
                executable=bash or "/bin/sh",
                pass_fds=(self._number,),
                preexec_fn=move,
            )
        except BaseException:
            for fd in (self._commands, self._status, out, err):
                os.close(fd)
            raise
        finally:
            for fd in (read, write_status, write_out, write_err, *([given] if given >= 0 else [])):
                os.close(fd)
        for fd in (self._commands, self._status):
            os.set_blocking(fd, False)
        self.code: int | None = None
        self._bash = bash
        self._mute = False  # it has closed what takes its exit codes
        self._kept = [Kept(), Kept()]
        self._pipes = [pipes.watch(fd, kept.take) for fd, kept in zip((out, err), self._kept)]
        self._waiting = b""  # of the script
        if bash:
            self._waiting = _bash_begins(self._number).encode()

    def look(self) -> int | None:
        """The exit code of a shell that has ended."""
        if self.code is None:
            self.code = processes.reap(self.pid)
        return self.code

    def run(self, command: str, timeout: float) -> dict[str, Any]:
        started = time.perf_counter()
        if self._bash and _SUBSTITUTION.search(command) and (problem := _problem(self._bash, command)):
            streams = [Stream(), Stream(problem)]
            return {**commands.result(2, streams, False, started), "ended": False}
        before = commands.pids()
        deadline = time.monotonic() + timeout
        self._waiting += _script(command, self._number).encode("utf-8", "surrogateescape")
        streams = [Stream(), Stream()]
        with pipes.waiting() as turn:
            for pipe, kept, stream in zip(self._pipes, self._kept, streams):
                stream.take(kept.pop(processes.MAX_OUTPUT))
                stream.cut, kept.cut = kept.cut, 0
                pipe.take = stream.take
            code = self._wait(turn, deadline)
            timed_out = code is None
            if timed_out:
                self._interrupt(turn, before)
                code = 128 + signal.SIGKILL  # as with a program that is out of time
            turn(0.0, {})  # what the command has printed is in the pipes by now
            for pipe, kept in zip(self._pipes, self._kept):
                pipe.take = kept.take
        commands.adopt(commands.pids() - before - {self.pid})
        commands.reap_orphans()
        if timed_out and self.code is not None:
            streams[1].take(_REPLACED)
        assert code is not None
        return {**commands.result(code, streams, timed_out, started), "ended": self.code is not None}

    def _wait(self, turn: pipes.Turn, deadline: float) -> int | None:
        """Hands over the script, then waits for an exit code: the command's, or that of the shell. None: it is late."""
        with pipes.end_of(self.pid) as watch:
            while time.monotonic() < deadline:
                others = {watch: select.POLLIN}
                if not self._mute:
                    others[self._status] = select.POLLIN
                if self._waiting:
                    others[self._commands] = select.POLLOUT
                ready = turn(deadline, others)
                if self._status in ready and (code := self._read_status()) is not None:
                    return code
                if watch in ready and self.look() is not None:
                    return self.code
                if self._commands in ready:
                    self._write_script()
        return None

    def _write_script(self) -> None:
        try:
            self._waiting = self._waiting[os.write(self._commands, self._waiting) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:  # it ends, or has closed what it reads from
            self._waiting = b""

    def _read_status(self) -> int | None:
        try:
            block = os.read(self._status, 64)
        except BlockingIOError:
            return None
        self._mute = not block
        return int(block) & 0xFF if block.strip().isdigit() else None

    def _interrupt(self, turn: pipes.Turn, before: set[int]) -> None:
        """Ends the command, and the shell with it when it must be."""
        commands.kill(self.pid, signal.SIGSTOP)
        commands.kill_started(before, owner=self.pid)
        if self._read_status() is not None:  # it was just done
            commands.kill(self.pid, signal.SIGCONT)
            return
        if self._bash and not self._waiting:
            commands.kill(self.pid, _STOP)
            commands.kill(self.pid, signal.SIGCONT)
            deadline = time.monotonic() + _PATIENCE
            while time.monotonic() < deadline and self.look() is None:
                left = self._wait(turn, min(deadline, time.monotonic() + _LOOK_AGAIN)) is not None
                commands.kill_started(before, owner=self.pid)  # what it began before it looked at the signal
                if left:
                    return
        self.close()

    def close(self) -> None:
        """Ends the shell and all that it has started."""
        processes.end(self.pid, self.look() is not None)
        self.look()

    def forget(self) -> None:
        """After its end: what it has left in the background still writes."""
        pipes.drain()  # the last that it printed
        for fd in (self._commands, self._status):
            os.close(fd)
        for pipe in self._pipes:
            pipe.leave()


_shells: dict[str, Shell] = {}


def collect() -> None:
    """Gives up the shells that have ended by themselves."""
    for name, shell in list(_shells.items()):
        if shell.look() is not None:
            shell.forget()
            del _shells[name]


commands.before_reaping.append(collect)


def run(name: str, command: str, timeout: float) -> dict[str, Any]:
    """The fields of `ExecResult`, and `ended`: whether the shell is gone, so that the next command gets a fresh one."""
    collect()
    if name not in _shells:
        if len(_shells) >= MAX_SHELLS:
            raise TooManyShells(f"{MAX_SHELLS} shells live already: close some")
        try:
            _shells[name] = Shell()
        except OSError as error:
            code, text = commands.not_started(error, ["/bin/sh"])
            nothing = commands.result(code, [Stream(), Stream(text)], False, time.perf_counter())
            return {**nothing, "ended": True}
    return _shells[name].run(command, timeout)


def close(name: str) -> None:
    collect()
    if name in _shells:
        _shells[name].close()
        collect()


HANDLERS: dict[Op, Callable[..., Any]] = {Op.SHELL: run, Op.SHELL_CLOSE: close}
