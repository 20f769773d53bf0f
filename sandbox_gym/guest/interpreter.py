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

from . import commands

MAX_OUTPUT = 1 << 20  # bytes kept of each stream
MAX_VALUE = 1 << 16  # characters kept of a value's repr


class TimedOut(BaseException):
    """Raised inside the cell by the host's SIGINT; not an Exception, so that `except Exception` lets it through."""


class Interpreter:
    def __init__(self) -> None:
        self._module = types.ModuleType("__main__")
        self._module.__dict__["__builtins__"] = builtins
        sys.modules["__main__"] = self._module  # classes defined in cells pickle and introspect as in a script
        self._cells = 0
        self._running = False

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
        capture = _Capture()
        try:
            self._running = True
            result["value"] = self._evaluate(code, f"<cell {self._cells}>")
            self._running = False
        except TimedOut:
            result["timed_out"] = True
            commands.kill_started(before)
        except BaseException as error:  # SystemExit and KeyboardInterrupt of a cell end the cell, not the guest
            self._running = False
            result["error"] = _describe(error)
        finally:
            streams = capture.stop()
        return {**result, **streams, "duration": time.perf_counter() - started}

    def _evaluate(self, code: str, name: str) -> str | None:
        linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
        tree = ast.parse(code, name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        if tree.body:
            self._run_block(compile(tree, name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT))
        if last is None:
            return None
        expression = ast.Expression(last.value)
        value = self._run_block(compile(expression, name, "eval", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT))
        if value is None:
            return None
        self._module.__dict__["_"] = value
        text = repr(value)
        return text if len(text) <= MAX_VALUE else f"{text[:MAX_VALUE]}... ({len(text) - MAX_VALUE} characters cut)"

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
    except Exception as broken:  # an exception class whose __str__ raises
        text = message = f"<unprintable: {type(broken).__name__}>"
    return {"type": type(error).__name__, "message": message[:MAX_VALUE], "traceback": text[-MAX_VALUE:]}


class _Capture:
    """Descriptors 1 and 2, and sys.stdout and sys.stderr above them, into bounded files until `stop`.

    Files, not pipes: nothing has to read while the cell runs, and a child left behind never blocks or breaks.
    """

    def __init__(self) -> None:
        self._python = sys.stdout, sys.stderr
        self._saved = [os.dup(1), os.dup(2)]
        self._files = [_scratch(), _scratch()]
        for fd, scratch in zip((1, 2), self._files):
            os.dup2(scratch, fd)
        self._raw = [_Bounded(1), _Bounded(2)]
        sys.stdout, sys.stderr = (
            io.TextIOWrapper(io.BufferedWriter(raw), "utf-8", "backslashreplace", line_buffering=True)
            for raw in self._raw
        )

    def stop(self) -> dict[str, Any]:
        wrappers = sys.stdout, sys.stderr
        streams: dict[str, Any] = {}
        for name, raw, wrapper, scratch, saved, fd in zip(
            ("stdout", "stderr"), self._raw, wrappers, self._files, self._saved, (1, 2)
        ):
            try:
                wrapper.flush()
            except Exception:  # the cell closed or replaced the stream: what it flushed before is kept
                pass
            os.dup2(saved, fd)
            os.close(saved)
            size = os.fstat(scratch).st_size
            kept = os.pread(scratch, MAX_OUTPUT, 0) + bytes(raw.spilled)
            os.close(scratch)
            streams[name] = kept.decode("utf-8", "replace")
            streams[f"{name}_cut"] = max(0, size - MAX_OUTPUT) + raw.dropped
        sys.stdout, sys.stderr = self._python
        return streams


class _Bounded(io.RawIOBase):
    """Writes through to a descriptor up to MAX_OUTPUT; keeps in memory what a full disk refuses; drops the rest."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
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
