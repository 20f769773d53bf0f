"""Handles on what lives on in a sandbox between calls: processes that were started, and shells."""

from __future__ import annotations

import builtins
import secrets
import signal as signals
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from sandbox_gym import _records
from sandbox_gym.api import ProcessInfo, ShellResult
from sandbox_gym.channel import GuestError
from sandbox_gym.errors import LimitExceeded, ProtocolError
from sandbox_gym.guest.wire import Op

if TYPE_CHECKING:
    from sandbox_gym._calls import GuestCalls

Stream = Literal["stdout", "stderr"]
_MAX_BYTES = 1 << 20  # of output in one answer: all that a guest keeps of a stream
_BLOCK = 1 << 18  # of input in one request
_FIRST_SLICE, _LAST_SLICE = 0.01, 0.2  # seconds of a wait in one request: other threads' calls go in between
_MARGIN = 30.0


class Process:
    """A process that runs in a sandbox until it ends. Made by `Sandbox.start`, found by `Sandbox.process`.

    The handle holds its id and the sandbox; the state is in the sandbox. So it works on after a `rewind`, at the state
    of the checkpoint, and `copy.process(proc.id)` is the instance that a copy has of the same process. Every method
    raises KeyError where the sandbox holds no such process: it was started after the checkpoint that a rewind went back
    to, or ended before 256 others did.
    """

    def __init__(self, sandbox: GuestCalls, info: ProcessInfo) -> None:
        self.id = info.id
        self.pid = info.pid  # inside; 0: it could not be started
        self.argv = info.argv  # its first 16 arguments, 256 characters of each
        self.pty = info.pty
        self._sandbox = sandbox

    @classmethod
    def start(
        cls,
        sandbox: GuestCalls,
        argv: Sequence[str],
        *,
        pty: bool,
        cwd: str | None,
        env: Mapping[str, str] | None,
    ) -> Process:
        """`Sandbox.start`."""
        request = {
            "id": secrets.token_hex(6),
            "argv": list(argv),
            "pty": bool(pty),
            "cwd": cwd,
            "env": dict(env) if env else None,
        }
        return cls(sandbox, sandbox._checked(_records.process_info, _ask(sandbox, Op.START, request)))

    @classmethod
    def all(cls, sandbox: GuestCalls, id: str | None = None) -> builtins.list[Process]:
        """`Sandbox.processes`; of an `id`, that one alone."""
        rows = _ask(sandbox, Op.PROCESSES, {"id": id})
        return [cls(sandbox, info) for info in sandbox._checked(_rows(id), rows)]

    def info(self) -> ProcessInfo:
        """All that is known of it at this moment."""
        return self._sandbox._checked(_rows(self.id), self._ask(Op.PROCESSES))[0]

    def poll(self) -> int | None:
        """Its exit code, 128 + the signal that ended it; None while it runs. -1: code in the sandbox has waited for it
        first (`os.waitpid(-1)` in a cell), and knows.
        """
        return self._wait_once(0.0)

    def wait(self, timeout: float = 60.0) -> int | None:
        """`poll` once it has ended; None when it still runs after `timeout` seconds."""
        _records.check_seconds("timeout", timeout)
        code: int | None = None

        def ended(left: float) -> bool:
            nonlocal code
            code = self._wait_once(left)
            return code is not None

        _until(timeout, ended)
        return code

    def kill(self, signal: int = signals.SIGKILL) -> None:
        """Sends a signal to the process and all that it has started and that can be told from the rest: its session,
        and their children. (A daemon that has left its session and its parent is out of reach.) SIGKILL: returns when
        they are gone. One that has ended takes no signal, and that is no error.
        """
        if not 0 < signal < 65:
            raise ValueError(f"a signal is a number from 1 to 64, not {signal!r}")
        self._ask(Op.SIGNAL, number=int(signal))

    def read(self, timeout: float = 0.0, stream: Stream = "stdout") -> bytes:
        """What it has printed since the last read; if that is nothing yet, what comes first within `timeout` seconds.
        Empty: nothing has come, or all of it was read and no process has the stream open any more.

        The sandbox keeps the newest MiB of each stream; `info()` says how much was dropped unread (`stdout_cut`,
        `stderr_cut`). With a terminal both streams are `stdout`.
        """
        if stream not in ("stdout", "stderr"):
            raise ValueError(f"stream is 'stdout' or 'stderr', not {stream!r}")
        if timeout:
            _records.check_seconds("timeout", timeout)
        data = b""

        def came(left: float) -> bool:
            nonlocal data
            reply = self._ask(Op.OUTPUT, left, stream=stream, timeout=left, most=_MAX_BYTES)
            data, may_come = self._sandbox._checked(_output, reply)
            return bool(data) or not may_come

        _until(timeout, came)
        return data

    def read_text(self, timeout: float = 0.0, stream: Stream = "stdout") -> str:
        """`read` as UTF-8. A character that was printed in two parts may come out as two marks of replacement."""
        return self.read(timeout, stream).decode("utf-8", "replace")

    def write(self, data: bytes | str, timeout: float = 10.0) -> int:
        """Writes to its stdin: how many bytes it took in `timeout` seconds, all of them unless it reads too slowly.

        Raises BrokenPipeError: it has ended, or has closed its stdin.
        """
        _records.check_seconds("timeout", timeout)
        block = data.encode() if isinstance(data, str) else bytes(data)
        taken = 0

        def all_taken(left: float) -> bool:
            nonlocal taken
            part = block[taken : taken + _BLOCK]
            reply = self._ask(Op.FEED, left, data=part, timeout=left, end=False)
            taken += self._sandbox._checked(_count(len(part)), reply)
            return taken == len(block)

        _until(timeout, all_taken)
        return taken

    def close_stdin(self) -> None:
        """It reads the end of its input after what was written. On a terminal this is Ctrl-D: at a line's start."""
        self._ask(Op.FEED, data=b"", timeout=1.0, end=True)

    def resize(self, rows: int, cols: int) -> None:
        """The size of its terminal, 24 x 80 at first. Raises ValueError when it has none."""
        for name, value in (("rows", rows), ("cols", cols)):
            if not 0 < value < 1 << 16:
                raise ValueError(f"{name} is a number from 1 to 65535, not {value!r}")
        self._ask(Op.RESIZE, rows=int(rows), columns=int(cols))

    def _wait_once(self, seconds: float) -> int | None:
        return self._sandbox._checked(_exit_code, self._ask(Op.WAIT, seconds, timeout=seconds))

    def _ask(self, op: Op, seconds: float = 0.0, **value: Any) -> Any:
        return _ask(self._sandbox, op, {"id": self.id, **value}, seconds)

    def __repr__(self) -> str:
        return f"<Process {self.id} {' '.join(self.argv)[:60]!r} in {self._sandbox.name}>"


class ShellSession:
    """A shell that lives on in a sandbox: what a command does to its folder, variables, functions and aliases is there
    for the next. Made by `Sandbox.session`; one bash for each name, or sh in an image without bash.

    Like a process, it lives in the sandbox: the handle works on after a `rewind`, and a copy has its own by that name.
    """

    def __init__(self, sandbox: GuestCalls, name: str) -> None:
        if not isinstance(name, str) or not 0 < len(name) <= 100:
            raise ValueError(f"a session's name is a string of 1 to 100 characters, not {name!r}")
        self.name = name
        self._sandbox = sandbox

    def run(self, command: str, timeout: float = 60.0) -> ShellResult:
        """Runs a command in it. The first command, and the first after the shell's end, begins with a fresh shell, in
        the interpreter's folder.

        Commands read an empty stdin. What is left in the background lives on and never holds a call; what it prints is,
        as in a terminal, in the result of whatever command is next. A command that ends the shell (`exit 3`) is a
        result with that exit code and `ended`. After `timeout` seconds what the command started is killed and the rest
        of it is not run; the shell goes on with its state where it can (bash, as a rule), else `ended` says that it is
        gone.
        """
        _records.check_seconds("timeout", timeout)
        _records.check_texts([command])
        if len(command) > _MAX_BYTES:
            raise ValueError(f"a command has at most {_MAX_BYTES} characters: write_file() a script")
        request = {"name": self.name, "command": command, "timeout": timeout}
        with self._sandbox._awake():
            fields = _ask(self._sandbox, Op.SHELL, request, timeout)
            return self._sandbox._limit_named(self._sandbox._checked(_records.shell_result, fields))

    def close(self) -> None:
        """Ends the shell and all that it has started, as far as `Process.kill` reaches. Idempotent."""
        _ask(self._sandbox, Op.SHELL_CLOSE, {"name": self.name})

    def __repr__(self) -> str:
        return f"<ShellSession {self.name!r} in {self._sandbox.name}>"


def _ask(sandbox: GuestCalls, op: Op, value: dict[str, Any], seconds: float = 0.0) -> Any:
    try:
        return sandbox._call(op, value, timeout=seconds + _MARGIN)
    except GuestError as error:
        kind, message = error.info["type"], f"sandbox {sandbox.name}: {error.info['message'][:1000]}"
        if kind == "LookupError":
            raise KeyError(message) from None
        if kind in ("TooManyProcesses", "TooManyShells"):
            raise LimitExceeded(message) from None
        raise _records.os_error(error.info, sandbox.name) from None


def _until(timeout: float, done: Callable[[float], bool]) -> None:
    """Calls `done(seconds)` until it is true or `timeout` is over, with the sandbox's lock free in between."""
    deadline, most = time.monotonic() + timeout, _FIRST_SLICE
    left = timeout
    while not done(min(max(left, 0.0), most)) and left > 0:
        most = min(2 * most, _LAST_SLICE)
        time.sleep(0.001)  # a lock that is taken again at once is never another thread's
        left = deadline - time.monotonic()


def _rows(id: str | None) -> Callable[[Any, str], list[ProcessInfo]]:
    """A listing: of an `id`, that process alone."""

    def check(reply: Any, name: str) -> list[ProcessInfo]:
        infos = _records.process_list(reply, name)
        if id is not None and [info.id for info in infos] != [id]:
            raise ProtocolError(f"sandbox {name} sent another process than it was asked for")
        return infos

    return check


def _output(reply: Any, name: str) -> tuple[bytes, bool]:
    data, may_come = (reply.get("data"), reply.get("open")) if isinstance(reply, dict) else (None, None)
    if not isinstance(data, bytes) or len(data) > _MAX_BYTES or not isinstance(may_come, bool):
        raise ProtocolError(f"sandbox {name} sent no output of a process")
    return data, may_come


def _exit_code(reply: Any, name: str) -> int | None:
    if reply is not None and type(reply) is not int:
        raise ProtocolError(f"sandbox {name} sent no exit code")
    return reply


def _count(most: int) -> Callable[[Any, str], int]:
    def check(reply: Any, name: str) -> int:
        if type(reply) is not int or not 0 <= reply <= most:
            raise ProtocolError(f"sandbox {name} sent no number of bytes")
        return reply

    return check
