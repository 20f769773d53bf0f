"""What a sandbox may use, and what it hears when that runs out."""

from __future__ import annotations

import ast

from sandbox_gym.api import ExecResult
from sandbox_gym.errors import LimitExceeded
from sandbox_gym.sandbox import Sandbox
from sandbox_gym.testing.subject import PATIENCE, Subject, check, expect, value

_HOG = "x = bytearray(1 << 30)"


def _command_runs_out(box: Sandbox) -> None:
    """By the command's end, told as the limit's; or by the sandbox's, as LimitExceeded."""
    try:
        result: ExecResult = box.exec(["python3", "-c", _HOG], timeout=PATIENCE)
    except LimitExceeded as error:
        assert "memory" in str(error), error  # noqa: PT017
        expect(box.status, "dead", "status")
        return
    expect((result.exit_code, result.limit, result.ok), (137, "memory", False), "a command over the limit")
    expect(value(box, "6 * 7"), "42", "a cell after")


@check("limits")
def memory_of_commands(subject: Subject) -> None:
    """A command over the memory limit is killed and the result says so, or the sandbox ends as LimitExceeded."""
    box, other = subject.create(memory="256Mi"), subject.create()
    _command_runs_out(box)
    expect(value(other, "6 * 7"), "42", "another sandbox")


@check("limits")
def memory_of_cells(subject: Subject) -> None:
    """A cell over the memory limit is LimitExceeded, or hears a MemoryError."""
    box = subject.create(memory="256Mi")
    try:
        result = box.run_code(_HOG, timeout=PATIENCE)
    except LimitExceeded as error:
        assert "memory" in str(error), error  # noqa: PT017
        expect(box.status, "dead", "status")
    else:
        expect(result.error and result.error.type, "MemoryError", "the error")


@check("limits")
def memory_of_copies(subject: Subject) -> None:
    """Copies have their origin's memory limit, and one's end harms neither origin nor siblings."""
    box = subject.create(memory="256Mi")
    value(box, "kept = bytes(range(256)) * 4096 * 20")  # 20 MiB
    first, second = subject.fork(box, 2)
    _command_runs_out(first)
    for sandbox in (box, second):
        expect(value(sandbox, "kept == bytes(range(256)) * 4096 * 20"), "True", "what another holds")


@check("limits")
def processes(subject: Subject) -> None:
    """No more than pids= processes run; who needs one more hears an error, and the sandbox goes on."""
    box = subject.create(pids=40)
    code = """
import subprocess
started = []
try:
    for _ in range(100):
        started.append(subprocess.Popen(['sleep', '98769']))
except OSError as error:
    print(type(error).__name__)
len(started)
"""
    result = box.run_code(code, timeout=PATIENCE)
    assert result.ok and result.stdout, f"no error after {result.value} of them: {result}"
    assert int(result.value or 0) <= 40, f"{result.value} were started"
    value(box, "for p in started: p.kill(); p.wait()")
    expect(box.shell("echo again").stdout, "again\n", "a command after")


@check("limits")
def disk(subject: Subject) -> None:
    """Who writes more than disk= hears an error, and goes on when something is deleted."""
    box = subject.create(disk="64Mi")
    code = """
import os
def fill(path, blocks):
    try:
        with open(path, 'wb') as file:
            for _ in range(blocks):
                file.write(os.urandom(1 << 20))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return os.strerror(error.errno)
fill('big', 100)
"""
    full = value(box, code) or ""
    assert "space" in full or "quota" in full, f"100 MiB in 64: {full}"
    expect(value(box, "os.remove('big'); fill('small', 16)"), None, "16 MiB after that was deleted")
    (copy,) = subject.fork(box)
    full = value(copy, "fill('big', 100)") or ""
    assert "space" in full or "quota" in full, f"100 MiB in a copy: {full}"


@check("limits")
def cpus(subject: Subject) -> None:
    """With cpus=0.1 a program gets a tenth of a processor."""
    slow, fast = subject.create(cpus=0.1), subject.create(cpus=1.0)
    code = """
import time
def work(seconds):
    n, begun, start = 0, time.process_time(), time.perf_counter()
    while time.perf_counter() < start + seconds:
        n += 1
    return n, (time.process_time() - begun) / (time.perf_counter() - start)
work(0.6)
"""
    seen = []
    for _ in range(5):  # others may use the machine meanwhile
        done, share = ast.literal_eval(value(slow, code) or "")
        ratio = done / ast.literal_eval(value(fast, code) or "")[0]
        seen.append((ratio, share))
        # Not every kernel counts a program's time exactly; and where others leave none, both get as little.
        if ratio < 0.45 or share < 0.25:
            return
    raise AssertionError(f"work beside that of one with a whole cpu, and share of the time: {seen}")
