"""`run_code`: Python whose state lives on between calls, with its output captured and bounded."""

from __future__ import annotations

import ast
import builtins
import errno
import io
import linecache
import os
import sys
import time
import traceback
import types
from typing import Any

from . import artifacts, commands

MAX_OUTPUT = 1 << 20  # bytes kept of each stream
MAX_VALUE = 1 << 16  # characters kept of a value's repr


class TimedOut(BaseException):
    """Raised inside the cell by the host's SIGINT; not an Exception, so that `except Exception` lets it through."""


class Interpreter:
    def __init__(self) -> None:
        self._module = types.ModuleType("__main__")
        self._module.__dict__["__builtins__"] = builtins
        # Classes defined in cells pickle and introspect as in a script.
        sys.modules["__main__"] = self._module
        self._cells = 0
        self._running = False
        self._capture = _Capture()
        vars(builtins)["display"] = artifacts.display
        sys.meta_path.insert(0, artifacts.Hook())

    def interrupt(self, signum: int, frame: Any) -> None:
        if self._running:
            self._running = False  # one interrupt a cell: a second must not hit the clean-up
            raise TimedOut

    def run(self, code: str) -> dict[str, Any]:
        """The fields of `CodeResult`, as a dict."""
        self._cells += 1
        before = commands.pids()
        started = time.perf_counter()
        result: dict[str, Any] = {"value": None, "error": None, "timed_out": False}
        artifacts.begin()
        self._capture.start()
        try:
            self._running = True
            try:
                result["value"] = self._evaluate(code, f"<cell {self._cells}>")
            except TimedOut:
                raise
            except (
                BaseException
            ) as error:  # SystemExit and KeyboardInterrupt of a cell end the cell, not the guest
                result["error"] = _describe(error)
            artifacts.show_figures()
            self._running = False
        except TimedOut:  # raised in the cell, or in the moment after it
            result["timed_out"] = True
            commands.kill_started(before)
        finally:
            streams = self._capture.stop()
        return {**result, **streams, **artifacts.taken(), "duration": time.perf_counter() - started}

    def _evaluate(self, code: str, name: str) -> str | None:
        linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
        tree = ast.parse(code, name)
        last = tree.body[-1] if tree.body else None
        if isinstance(last, ast.Expr):
            tree.body.pop()
        if tree.body:
            self._run_block(compile(tree, name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT))
        if not isinstance(last, ast.Expr):
            return None
        expression = ast.Expression(last.value)
        value = self._run_block(compile(expression, name, "eval", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT))
        if value is None:
            return None
        self._module.__dict__["_"] = value
        if not artifacts.is_open(value):
            artifacts.show(value)
        text = repr(value)
        return (
            text
            if len(text) <= MAX_VALUE
            else f"{text[:MAX_VALUE]}... ({len(text) - MAX_VALUE} characters cut)"
        )

    def _run_block(self, block: types.CodeType) -> Any:
        outcome = eval(block, self._module.__dict__)
        if block.co_flags & 0x80:  # CO_COROUTINE: the cell awaits at its top level
            import asyncio

            return asyncio.run(outcome)
        return outcome


def _describe(error: BaseException) -> dict[str, str]:
    frames = error.__traceback__
    while frames is not None and not frames.tb_frame.f_code.co_filename.startswith("<cell"):
        frames = frames.tb_next
    try:
        text = "".join(traceback.format_exception(type(error), error, frames))
        message = str(error)
    except BaseException as broken:  # an exception class whose __str__ raises
        text = message = f"<unprintable: {type(broken).__name__}>"
    return {"type": type(error).__name__, "message": message[:MAX_VALUE], "traceback": text[-MAX_VALUE:]}


class _Capture:
    """Descriptors 1 and 2, and sys.stdout and sys.stderr above them, into bounded files from `start` to `stop`.

    Files, not pipes: nothing has to read while the cell runs, and a child left behind never blocks or breaks. The
    Python streams are the same for every cell: what kept one (a logging handler) writes to the present cell.
    """

    def __init__(self) -> None:
        self._raw = [_Bounded(1), _Bounded(2)]
        self._streams = [_stream(raw) for raw in self._raw]
        self._files: list[int] = []
        self._saved: list[int] = []

    def start(self) -> None:
        self._saved = [os.dup(1), os.dup(2)]
        self._files = [_scratch(), _scratch()]
        for fd, scratch, raw in zip((1, 2), self._files, self._raw):
            os.dup2(scratch, fd)
            raw.reset()
        for i, stream in enumerate(self._streams):
            if not _usable(stream):
                self._raw[i] = _Bounded(i + 1)
                self._streams[i] = _stream(self._raw[i])
        self._before = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = self._streams

    def stop(self) -> dict[str, Any]:
        streams: dict[str, Any] = {}
        cells = sys.stdout, sys.stderr  # a cell may have put its own there
        sys.stdout, sys.stderr = self._before
        for i, name in enumerate(("stdout", "stderr")):
            for stream in (cells[i], self._streams[i]):
                try:
                    stream.flush()
                except BaseException:  # the cell closed or broke the stream: what it flushed before is kept
                    pass
            raw, scratch = self._raw[i], self._files[i]
            os.dup2(self._saved[i], i + 1)
            os.close(self._saved[i])
            size = os.fstat(scratch).st_size
            kept = os.pread(scratch, MAX_OUTPUT, 0) + bytes(raw.spilled)
            os.close(scratch)
            streams[name] = kept.decode("utf-8", "replace")
            streams[f"{name}_cut"] = max(0, size - MAX_OUTPUT) + raw.dropped
        return streams


def _stream(raw: _Bounded) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BufferedWriter(raw), "utf-8", "backslashreplace", line_buffering=True)


def _usable(stream: io.TextIOWrapper) -> bool:
    """False once a cell has closed or detached it."""
    try:
        return not stream.closed
    except ValueError:
        return False


class _Bounded(io.RawIOBase):
    """Writes through to a descriptor up to MAX_OUTPUT; keeps in memory what a full disk refuses; drops the rest."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.reset()

    def reset(self) -> None:
        self._left = MAX_OUTPUT
        self.spilled = bytearray()
        self.dropped = 0

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def write(self, block: Any) -> int:
        block = bytes(block)
        keep = block[: self._left]
        self._left -= len(keep)
        self.dropped += len(block) - len(keep)
        while keep:
            try:
                keep = keep[os.write(self._fd, keep) :]
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                self.spilled += keep
                break
        return len(block)


def _scratch() -> int:
    try:
        return os.open("/tmp", os.O_TMPFILE | os.O_RDWR | os.O_APPEND, 0o600)
    except OSError:  # a full disk, or a file system without O_TMPFILE
        return os.memfd_create("output")
