"""A pair of pipes in a socket's place, for guests whose only way out is their standard input and output."""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

_TIMEVAL = struct.Struct("@qq")
_TURN = 0.1  # seconds


class Stdio:
    """What `wire.Connection` and the host's `Channel` use of a socket. Time-outs as a socket's: SO_RCVTIMEO and
    SO_SNDTIMEO, then BlockingIOError. Takes both descriptors, which may be one and the same.
    """

    def __init__(self, reads: int, writes: int) -> None:
        self._reads, self._writes = reads, writes
        self._timeouts: dict[int, float | None] = {socket.SO_RCVTIMEO: None, socket.SO_SNDTIMEO: None}
        self._hung_up = False
        for fd in (reads, writes):
            os.set_inheritable(fd, False)  # or every command would hold it
            os.set_blocking(fd, False)

    def fileno(self) -> int:
        """What is ready to be read when a frame has come."""
        return self._reads

    def recvmsg_into(
        self, buffers: Sequence[Any], ancillary: int = 0, flags: int = 0
    ) -> tuple[int, list[Any], int, None]:
        """0 bytes: the other side is gone. Of the flags, MSG_DONTWAIT counts."""
        while not self._hung_up:
            try:
                return os.readv(self._reads, buffers), [], 0, None
            except BlockingIOError:
                if flags & socket.MSG_DONTWAIT:
                    raise
                self._wait(self._reads, select.POLLIN, socket.SO_RCVTIMEO)
        return 0, [], 0, None

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        """Into all of the buffer; otherwise as `recvmsg_into`."""
        return self.recvmsg_into([buffer], 0, flags)[0]

    def sendmsg(self, blocks: Sequence[Any], ancillary: Sequence[Any] = ()) -> int:
        if ancillary:
            raise OSError(errno.EOPNOTSUPP, "no descriptors go through a pipe")
        while not self._hung_up:
            try:
                return os.writev(self._writes, blocks)
            except BlockingIOError:
                self._wait(self._writes, select.POLLOUT, socket.SO_SNDTIMEO)
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    def send(self, block: Any) -> int:
        return self.sendmsg([block])

    def sendall(self, block: Any) -> None:
        rest = memoryview(block)
        while rest:
            rest = rest[self.send(rest) :]

    def setsockopt(self, level: int, option: int, value: bytes) -> None:
        """Of a socket's options, the two time-outs."""
        if level != socket.SOL_SOCKET or option not in self._timeouts:
            raise OSError(errno.ENOPROTOOPT, f"a pipe has no option {option}")
        seconds, micros = _TIMEVAL.unpack(value)
        self._timeouts[option] = seconds + micros / 1e6 or None

    def shutdown(self, how: int) -> None:
        """Ends another thread's wait, too; what comes after is as if the other side had gone."""
        self._hung_up = True

    def close(self) -> None:
        fds, self._reads, self._writes = {self._reads, self._writes}, -1, -1
        for fd in fds - {-1}:
            os.close(fd)

    def _wait(self, fd: int, event: int, option: int) -> None:
        poll = select.poll()
        poll.register(fd, event)
        limit = self._timeouts[option]
        deadline = None if limit is None else time.monotonic() + limit
        while not self._hung_up:
            # In turns: no other thread can wake a poll of pipes.
            left = _TURN if deadline is None else min(_TURN, deadline - time.monotonic())
            if left <= 0:
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            if poll.poll(left * 1000):
                return
