"""A container's standard input and output in a socket's place: what the wire and the exchange use of one."""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Sequence
from typing import Any

_HEADER = struct.Struct(">BxxxI")  # of each piece of output: the stream it is of, and its length
_STDOUT = 1
_BUFFER = 1 << 16


class Attached:
    """Takes a connection that is attached to a container without a terminal. What goes out is the container's input as
    it is; what comes in is its output in pieces, each with a header of the daemon's, taken off here. Time-outs are the
    socket's own (SO_RCVTIMEO, SO_SNDTIMEO): then BlockingIOError, as of any blocking socket.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._raw = bytearray(_BUFFER)
        self._view = memoryview(self._raw)
        self._begin = self._end = 0  # what of the buffer has come and is not yet taken
        self._left = 0  # bytes of the present piece that are not yet taken
        # What only goes out needs nothing of this.
        self.fileno, self.send, self.sendall = sock.fileno, sock.send, sock.sendall
        self.setsockopt, self.shutdown = sock.setsockopt, sock.shutdown

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        """As many bytes as have come, or, where none has, as come next; 0: the other side is gone. All of the buffer is
        there to be filled; of the flags, MSG_DONTWAIT counts.
        """
        while self._begin == self._end or not self._piece():
            if not self._fill(flags):
                return 0
        target = memoryview(buffer).cast("B")
        count = 0
        while count < target.nbytes and self._piece():
            size = min(target.nbytes - count, self._left, self._end - self._begin)
            target[count : count + size] = self._view[self._begin : self._begin + size]
            self._begin += size
            self._left -= size
            count += size
        return count

    def sendmsg(self, blocks: Sequence[Any], ancillary: Sequence[Any] = ()) -> int:
        if ancillary:
            raise OSError(errno.EOPNOTSUPP, "no descriptors go into a container")
        return self._sock.sendmsg(blocks)

    def close(self) -> None:
        self._sock.close()

    def _piece(self) -> bool:
        """Whether bytes of a piece lie in the buffer; reads its header where one is due."""
        while not self._left:
            if self._end - self._begin < _HEADER.size:
                return False
            stream, self._left = _HEADER.unpack_from(self._raw, self._begin)
            self._begin += _HEADER.size
            if stream != _STDOUT:
                raise OSError(errno.EPROTO, f"docker sent a piece of stream {stream}")
        return self._begin < self._end

    def _fill(self, flags: int) -> int:
        rest = self._end - self._begin  # less than a header
        self._raw[:rest] = self._raw[self._begin : self._end]
        self._begin, self._end = 0, rest
        count = self._sock.recv_into(self._view[rest:], 0, flags & socket.MSG_DONTWAIT)
        self._end += count
        return count
