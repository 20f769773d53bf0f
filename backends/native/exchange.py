"""The client's ends of the pipes through which images leave a supervisor and come in."""

from __future__ import annotations

import fcntl
import os
import select
import socket
import time
from collections.abc import Callable, Iterable
from typing import Any

from sandbox_gym.backends.shared import protocol

SEAL = b"sealed"  # follows the last block: its sender has found all of it good
_BLOCK = 1 << 20
_MARGIN = 5.0  # seconds: the supervisor keeps the deadline, and its reply says so


class CallerFailed(Exception):
    """What takes or gives the bytes has raised `error`; not the supervisor."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def pull(
    sock: socket.socket, request: dict[str, Any], write: Callable[[bytes], object], timeout: float
) -> dict[str, Any]:
    """Sends a request with a pipe, gives `write` all that comes through it, and returns the reply.

    Raises: CallerFailed; TimeoutError; what `protocol.receive` does.
    """
    ours, theirs = _pipe()
    try:
        try:
            protocol.send(sock, request, [theirs])
        finally:
            os.close(theirs)
        deadline = time.monotonic() + timeout + _MARGIN
        while True:
            _wait(ours, select.POLLIN, deadline)
            block = os.read(ours, _BLOCK)
            if not block:
                break
            try:
                write(block)
            except Exception as error:
                raise CallerFailed(error) from error
    finally:
        os.close(ours)
    return protocol.receive(sock)[0]


def push(
    sock: socket.socket, request: dict[str, Any], blocks: Iterable[bytes], timeout: float
) -> dict[str, Any]:
    """Sends a request with a pipe, puts all blocks and the seal into it, and returns the reply. Raises as `pull` does:
    also where `blocks` fails, the supervisor is done with the request by then.
    """
    theirs, ours = _pipe()
    failure = None
    try:
        try:
            protocol.send(sock, request, [theirs])
        finally:
            os.close(theirs)
        os.set_blocking(ours, False)
        failure = _put(ours, blocks, time.monotonic() + timeout + _MARGIN)
    finally:
        os.close(ours)
    reply = protocol.receive(sock)[0]
    if failure is not None:
        raise CallerFailed(failure) from failure
    return reply


def _put(fd: int, blocks: Iterable[bytes], deadline: float) -> Exception | None:
    """What `blocks` raised. A reader that is gone is no failure here: its reply says why."""
    source = iter(blocks)
    sealed = False
    while not sealed:
        try:
            rest = memoryview(next(source))
        except StopIteration:
            rest, sealed = memoryview(SEAL), True
        except Exception as error:
            return error
        while rest:
            _wait(fd, select.POLLOUT, deadline)
            try:
                rest = rest[os.write(fd, rest) :]
            except BlockingIOError:
                continue
            except BrokenPipeError:
                return None
    return None


def _pipe() -> tuple[int, int]:
    ends = os.pipe()
    try:
        fcntl.fcntl(ends[0], fcntl.F_SETPIPE_SZ, _BLOCK)
    except OSError:  # this user's pipes hold as much as they may: a smaller one is only slower
        pass
    return ends


def _wait(fd: int, event: int, deadline: float) -> None:
    poll = select.poll()
    poll.register(fd, event)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise TimeoutError
