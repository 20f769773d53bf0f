"""What attempts are written in: verdicts, and the ways of trying that they share."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Callable, Iterable
from typing import Any

REFUSED, CONTAINED, POSSIBLE = "refused", "contained", "possible"
Outcome = tuple[str, str]  # verdict, evidence
Known = dict[str, Any]  # what the host tells: see tests/backends/attempts.py
DENIALS = {errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EROFS}
attempts: dict[str, Callable[[Known], Outcome]] = {}
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long


def attempt(name: str) -> Callable[[Callable[[Known], Outcome]], Callable[[Known], Outcome]]:
    def add(function: Callable[[Known], Outcome]) -> Callable[[Known], Outcome]:
        attempts[name] = function
        return function

    return add


def shared(known: Known) -> str:
    """The verdict on what is one for a whole kernel."""
    return POSSIBLE if os.uname().version == known["kernel"] else CONTAINED


def tried(action: Callable[[], object], done: str) -> Outcome:
    try:
        result = action()
    except OSError as error:
        return REFUSED, str(error)
    return done, str(result)[:200]


def reading(paths: Iterable[str], known: Known) -> Outcome:
    """Possible where a secret of somebody else's, which are told backwards, is in one of these files."""
    read = 0
    for path in paths:
        with contextlib.suppress(OSError, ValueError):
            with open(path, "rb") as file:
                content = file.read(1 << 20)
            read += 1
            if any(secret[::-1].encode() in content for secret in known["secrets"]):
                return POSSIBLE, path
    return (CONTAINED, f"{read} files, none with a secret") if read else (REFUSED, "nothing to read")


def writing(paths: list[str], known: Known) -> Outcome:
    """Writes to files what is in them."""
    problems = []
    for path in paths:
        try:
            with open(path, "r+b", buffering=0) as file:
                content = file.read(4096)
                file.seek(0)
                file.write(content)
            return shared(known), path
        except OSError as error:
            problems.append(f"{path}: {error.strerror}")
    return REFUSED, "; ".join(problems)


def opening(paths: list[str], flags: int, known: Known) -> Outcome:
    for path in paths:
        try:
            os.close(os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC))
            return shared(known), path
        except OSError as error:
            problem = error
    return REFUSED, str(problem)
