"""A copy's monotonic clocks go on from where its origin was frozen (time_namespaces(7))."""

from __future__ import annotations

import os
import time

from . import syscalls

_CLOCKS = {"monotonic": time.CLOCK_MONOTONIC, "boottime": time.CLOCK_BOOTTIME}
_FILE = "/proc/self/timens_offsets"
_SECOND = 10**9


class Clocks:
    """The clocks of a frozen process, as they were."""

    def __init__(self) -> None:
        self._frozen = {name: time.clock_gettime_ns(clock) for name, clock in _CLOCKS.items()}
        self._offsets: dict[str, int] | None = None
        try:
            with open(_FILE) as file:
                rows = [line.split() for line in file]
            self._offsets = {name: int(seconds) * _SECOND + int(rest) for name, seconds, rest in rows}
        except (OSError, ValueError):  # a kernel without time namespaces
            pass

    def turn_back(self) -> None:
        """The next child finds them so. Without leave or support to do it, its clocks have gone on meanwhile."""
        if self._offsets is None:
            return
        lines = []
        for name, clock in _CLOCKS.items():
            offset = self._offsets[name] + self._frozen[name] - time.clock_gettime_ns(clock)
            lines.append(f"{name} {offset // _SECOND} {offset % _SECOND}")
        try:
            syscalls.unshare(syscalls.CLONE_NEWTIME)
            fd = os.open(_FILE, os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.write(fd, "\n".join(lines).encode())
            finally:
                os.close(fd)
        except OSError:
            self._offsets = None
