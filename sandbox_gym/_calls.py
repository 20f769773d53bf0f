"""What can be asked of a running guest: code, commands, files. `Sandbox` adds where guests come from, and their end."""

from __future__ import annotations

import builtins
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from sandbox_gym import _audit, _records, _transfer
from sandbox_gym.api import Backend, CodeResult, ErrorInfo, ExecResult, FileInfo, Live
from sandbox_gym.channel import GuestError
from sandbox_gym.errors import LimitExceeded, ProtocolError, SandboxDied, SandboxError, SandboxTimeout
from sandbox_gym.guest import wire
from sandbox_gym.guest.wire import Op
from sandbox_gym.network import NetworkRecord
from sandbox_gym.process import Process, ShellSession

_T = TypeVar("_T")
_Ran = TypeVar("_Ran", bound=ExecResult)
_GRACE = 2.0  # seconds that a cell has to react to its interrupt before the sandbox is killed
_MARGIN = 10.0  # the guest keeps a command's deadline; past this much more, the guest itself hangs
_CHUNK = 8 << 20
_MAX_REASON = 2000  # characters
_MARGIN_BYTES = 1 << 20  # of an archive over its files: headers, padding


class GuestCalls:
    """Each call holds the sandbox's lock; whatever is worse than the guest's own failure ends the sandbox."""

    id: str
    name: str
    _backend: Backend
    _live: Live
    _oom_kills: int
    _ending: bool

    def _awake(self) -> AbstractContextManager[None]:
        """Holds the sandbox's lock over a call; wakes a stopped sandbox, refuses one that is gone."""
        raise NotImplementedError

    def _end(self, state: Literal["dead", "terminated"], reason: str | None) -> None:
        raise NotImplementedError

    def network_log(self) -> list[NetworkRecord]:
        """What it has tried to reach since it was made, or has last woken: allowed or not, oldest first, the last
        thousand at most; none where the network is closed. Takes no turn among calls. Raises SandboxDied when it
        doesn't run.
        """
        return self._backend.network_log(self._live)

    # ---- running things -----------------------------------------------------------------------------------------

    def run_code(self, code: str, timeout: float = 30.0) -> CodeResult:
        """Runs a cell of Python; names it defines are there for the next. The last expression's repr is the value.

        An exception is data in `result.error`. After `timeout` seconds the cell is interrupted and what it started is
        killed; one that ignores the interrupt for two seconds takes the sandbox with it (later calls say so). Ctrl-C
        on the host does the same at once. (Another call that you interrupt ends by its own timeout; the next waits.)
        """
        _records.check_seconds("timeout", timeout)
        with self._awake():
            try:
                fields = _audit.call(self, Op.CODE, {"code": code}, timeout=timeout)
            except SandboxTimeout:
                return self._interrupt(timeout)
            except KeyboardInterrupt:
                self._live.channel.forget_owed()
                self._interrupt(timeout)
                raise
            except (SandboxDied, ProtocolError, GuestError) as error:
                raise self._fatal(error) from None
            return self._checked(_records.code_result, fields)

    def _interrupt(self, timeout: float) -> CodeResult:
        """Ends a cell that has run too long: SIGINT, then all of the sandbox."""
        try:
            self._backend.interrupt(self._live)
            frame = self._live.channel.wait(Op.CODE, timeout=_GRACE)
            result = _records.code_result(wire.decode(frame.meta, frame.data), self.name)
        except (SandboxError, GuestError, wire.WireError):
            reason = f"a cell did not stop {_GRACE} s after its interrupt (its timeout: {timeout} s)"
            self._end("dead", reason)
            error = ErrorInfo("SandboxDied", f"{reason}: the sandbox was killed", "")
            return CodeResult("", "", None, error, True, timeout + _GRACE)
        return replace(result, timed_out=True)

    def shell(
        self,
        command: str,
        timeout: float = 60.0,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
    ) -> ExecResult:
        """Runs a command line in bash (sh where there is none). Children left in the background live on, and never hold
        the call; a time-out kills everything that the call started.
        """
        if not isinstance(command, str):
            raise TypeError(f"shell takes a command line, not {command!r}: exec takes a list")
        return self.exec([*_records.SHELL, command], timeout, cwd=cwd, env=env, stdin=stdin)

    def exec(
        self,
        argv: Sequence[str],
        timeout: float = 60.0,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
    ) -> ExecResult:
        """Runs a program without a shell. A program that isn't there is exit code 127, as in a shell.

        The first MiB of each stream is kept; `stdout_cut` and `stderr_cut` say how much was not.
        """
        _records.check_seconds("timeout", timeout)
        _records.check_program(argv, cwd, env)
        request = {
            "argv": list(argv),
            "timeout": timeout,
            "cwd": cwd,
            "env": dict(env) if env else None,
            "stdin": stdin,
        }
        with self._awake():
            fields = self._answer(Op.EXEC, request, timeout=timeout + _MARGIN)
            return self._limit_named(self._checked(_records.exec_result, fields))

    def _limit_named(self, result: _Ran) -> _Ran:
        """With the limit that killed the command in it, if one did."""
        if result.exit_code != 137:  # SIGKILL: by the memory limit, if that counts one more
            return result
        kills = self._usage()["oom_kills"]
        result = replace(result, limit="memory" if kills > self._oom_kills else None)
        self._oom_kills = kills
        return result

    # ---- what lives on between calls ----------------------------------------------------------------------------

    def start(
        self,
        argv: Sequence[str],
        *,
        pty: bool = False,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Process:
        """Starts a program and returns at once; it runs on between calls, and no call's time-out ends it.

        `pty`: on a terminal of its own, in place of pipes. A program that isn't there has ended with exit code 127, as
        in a shell. Raises LimitExceeded while 64 such processes run; OSError when no terminal can be made.
        """
        _records.check_program(argv, cwd, env)
        return Process.start(self, argv, pty=pty, cwd=cwd, env=env)

    def processes(self) -> builtins.list[Process]:
        """Those that were started, oldest first: all that run, and of those that ended the last 256."""
        return Process.all(self)

    def process(self, id: str) -> Process:
        """This sandbox's instance of a process: a copy has its own of each. Raises KeyError when there is none."""
        return Process.all(self, id)[0]

    def session(self, name: str = "default") -> ShellSession:
        """A shell that keeps its state from command to command; the same one for the same name."""
        return ShellSession(self, name)

    # ---- files --------------------------------------------------------------------------------------------------

    def read_file(self, path: str, *, max_bytes: int = 512 << 20, timeout: float | None = None) -> bytes:
        """Raises FileNotFoundError, IsADirectoryError, ...; LimitExceeded when it is larger than `max_bytes`.

        `timeout`: seconds for all of it; None is 60 for each 8 MiB. Past it SandboxTimeout; a guest that leaves a call
        unanswered is killed.
        """
        _records.check_seconds("timeout", timeout, optional=True)
        until = None if timeout is None else time.monotonic() + timeout
        blocks: builtins.list[bytes] = []
        size, end = 0, False
        while not end:
            left = 60.0 if until is None else until - time.monotonic()
            if left <= 0:  # by answers in time, but without end
                raise SandboxTimeout(f"sandbox {self.name}: reading {path} took longer than {timeout} s")
            reply = self._file_call(Op.READ, {"path": path, "offset": size, "size": _CHUNK}, left)
            data, end = self._checked(_records.block, reply)
            blocks.append(data)
            size += len(data)
            if size > max_bytes:
                raise LimitExceeded(
                    f"sandbox {self.name}: {path} is larger than {max_bytes} bytes (max_bytes=)"
                )
        return b"".join(blocks)

    def read_text(self, path: str, encoding: str = "utf-8") -> str:
        return self.read_file(path).decode(encoding)

    def write_file(self, path: str, data: bytes | str, *, mode: int | None = None) -> None:
        """Writes a file, its folders too where they are missing. Raises OSError: "No space left" included."""
        block = data.encode() if isinstance(data, str) else bytes(data)
        for start in range(0, max(1, len(block)), _CHUNK):
            part = block[start : start + _CHUNK]
            self._file_call(Op.WRITE, {"path": path, "data": part, "append": start > 0, "mode": mode})

    def list_files(
        self,
        path: str = ".",
        *,
        recursive: bool = False,
        max_entries: int = 100_000,
        timeout: float = 60.0,
    ) -> builtins.list[FileInfo]:
        """The entries of a folder, by name; links are not followed. What vanishes meanwhile is left out.

        Raises FileNotFoundError or NotADirectoryError when `path` is no folder; ValueError for more than `max_entries`.
        """
        _records.check_seconds("timeout", timeout)
        request = {"path": path, "recursive": recursive, "most": max_entries}
        rows = self._file_call(Op.LIST, request, timeout)
        if not isinstance(rows, builtins.list):
            rows = [None]
        return [self._checked(_records.file_info, row) for row in rows]

    def upload(self, source: str | os.PathLike[str], target: str) -> None:
        """Copies a host file or folder to `target` in the sandbox. Raises FileNotFoundError, OSError."""
        source = Path(source)
        if not source.is_dir():
            self.write_file(target, source.read_bytes(), mode=source.stat().st_mode & 0o777)
            return
        with tempfile.TemporaryFile() as spool, self._awake():
            size = _transfer.pack(source, spool)
            for start in range(0, size, _CHUNK):
                ends = {"first": start == 0, "last": start + _CHUNK >= size}
                self._file_call(Op.UNPACK, {"data": spool.read(_CHUNK), "target": target, **ends})

    def download(self, source: str, target: str | os.PathLike[str], *, max_bytes: int = 8 << 30) -> None:
        """Copies a file or folder of the sandbox to the host path `target`. The guest is not trusted: nothing is
        written outside `target`, device files and links that leave it are refused.

        Raises:
            FileNotFoundError, LimitExceeded: it is not there; it is larger than `max_bytes`.
            ProtocolError: it holds what is refused.
        """
        with tempfile.TemporaryFile() as spool, self._awake():
            end = False
            while not end:
                request = {"path": None if spool.tell() else source, "offset": spool.tell()}
                data, end = self._checked(_records.block, self._file_call(Op.PACK, request))
                spool.write(data)
                if spool.tell() > max_bytes + _MARGIN_BYTES:
                    raise LimitExceeded(
                        f"sandbox {self.name}: {source} is larger than {max_bytes} bytes (max_bytes=)"
                    )
            spool.seek(0)
            _transfer.unpack(spool, Path(target), max_bytes=max_bytes, name=self.name)

    def _file_call(self, op: Op, value: Any, timeout: float = 60.0) -> Any:
        try:
            return self._call(op, value, timeout=timeout)
        except GuestError as error:
            raise _records.os_error(error.info, self.name) from None

    # ---- calls to the guest --------------------------------------------------------------------------------------

    def _call(self, op: Op, value: Any = None, *, timeout: float) -> Any:
        """One request to the guest. Raises GuestError for what its handler raised; anything worse ends the sandbox."""
        with self._awake():
            try:
                return _audit.call(self, op, value, timeout=timeout)
            except (SandboxTimeout, SandboxDied, ProtocolError) as error:
                raise self._fatal(error) from None

    def _answer(self, op: Op, value: Any, *, timeout: float) -> Any:
        """`_call` of a handler that never raises: one that does is broken, and ends the sandbox."""
        try:
            return self._call(op, value, timeout=timeout)
        except GuestError as error:
            raise self._fatal(error) from None

    def _checked(self, check: Callable[[Any, str], _T], answer: Any) -> _T:
        """A guest's answer, checked; one that lies is killed."""
        try:
            return check(answer, self.name)
        except ProtocolError as error:
            raise self._fatal(error) from None

    def _usage(self) -> dict[str, int]:
        try:
            return self._backend.usage(self.id)
        except SandboxDied as error:
            raise self._fatal(error) from None

    def _request(self, op: Op, meta: bytes = b"", *data: Any, timeout: float) -> wire.Frame:
        """`_call` with bytes both ways."""
        with self._awake():
            try:
                return self._live.channel.request(op, meta, *data, timeout=timeout)
            except (SandboxTimeout, SandboxDied, ProtocolError) as error:
                raise self._fatal(error) from None

    def _fatal(self, error: Exception) -> Exception:
        """Ends the sandbox over an error, which comes back with the cause in its message."""
        if isinstance(error, GuestError):
            error = ProtocolError(f"sandbox {self.name}: its interpreter failed: {str(error)[:_MAX_REASON]}")
        if self._ending:
            self._end("terminated", "it was terminated")
            return SandboxDied(f"sandbox {self.name} was terminated during the call")
        try:
            reason = self._backend.death(self._live) if isinstance(error, SandboxDied) else ""
        except SandboxError as gone:
            reason = str(gone)
        self._end("dead", str(error))
        if reason.startswith("memory"):
            return LimitExceeded(f"sandbox {self.name} was killed: {reason}; create it with a larger memory=")
        if isinstance(error, SandboxDied):
            return SandboxDied(f"sandbox {self.name} is gone: {reason}")
        return type(error)(f"{error}; it was killed")
