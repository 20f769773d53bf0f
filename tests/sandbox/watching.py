"""What tests of processes, terminals and shells look at."""

# ruff: noqa: E501  (programs for the guest are text)
from __future__ import annotations

import time
from typing import Any

from sandbox_gym.process import Process
from sandbox_gym.sandbox import Sandbox

MIB = 1 << 20
CHATTY = (
    "import os, sys\nfor _ in range(640): sys.stdout.buffer.write(bytes(65536)); sys.stderr.write('e' * 65536)\n"
    "sys.stdout.flush(); os.mknod('done'); sys.stdin.read()"
)


def read_until(process: Process, wanted: bytes, *, stream: Any = "stdout", timeout: float = 20.0) -> bytes:
    """Its output up to and with `wanted`."""
    data, deadline = b"", time.monotonic() + timeout
    while wanted not in data:
        assert time.monotonic() < deadline, data[-2000:]
        data += process.read(0.5, stream)
    return data


def alive(box: Sandbox) -> list[str]:
    """The names of what runs in the sandbox, but for its process 1 and the command that looks; no zombies."""
    line = "for p in /proc/[0-9]*; do [ $p != /proc/1 ] && [ $p != /proc/$$ ] && sed 's/.*(\\(.*\\)) \\(.\\).*/\\1 \\2/' $p/stat; done 2>/dev/null"
    names = [row.split() for row in box.shell(line).stdout.splitlines()]
    return sorted(name for name, state in names if state not in "ZX" and name != "sed")


def forget_after(box: Sandbox, timeout: float = 5.0) -> list[str]:
    """`alive`, as soon as it is empty."""
    deadline = time.monotonic() + timeout
    while (names := alive(box)) and time.monotonic() < deadline:
        pass
    return names
