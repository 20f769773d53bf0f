"""The host's end of the wire to one guest: requests with deadlines, and what a silent or lying guest turns into."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from typing import Any

from sandbox_gym.errors import ProtocolError, SandboxDied, SandboxTimeout
from sandbox_gym.guest import wire
from sandbox_gym.guest.wire import Op, Status

_TIMEVAL = struct.Struct("@qq")


class GuestError(Exception):
    """The guest's handler raised: `info` is {"type", "message", "traceback"}. Layers above turn it into a result."""

    def __init__(self, info: dict[str, Any]) -> None:
        self.info = {key: str(info.get(key, "")) for key in ("type", "message", "traceback")}
        super().__init__(f"{self.info['type']}: {self.info['message']}")

    def __reduce__(self) -> tuple[type[GuestError], tuple[dict[str, Any]]]:
        return type(self), (self.info,)  # Ray sends errors, and RLlib copies them


class Channel:
    """One request at a time, in order. `lock` is held by whoever is in the middle of a call.

    The socket blocks and the kernel ends a wait (SO_RCVTIMEO): one syscall a reply, where settimeout costs two.
    """

    def __init__(self, sock: socket.socket, name: str) -> None:
        self.name = name
        self.lock = threading.RLock()
        self.sock = sock
        self._connection = wire.Connection(sock, takes_fds=False)
        self._seq = 0
        self._owed: tuple[Op, float] | None = (
            None  # a reply that nobody waits for, and until when it may come
        )
        self._timeouts: dict[int, float] = {}

    def call(self, op: Op, value: Any = None, *, timeout: float) -> Any:
        """Sends a value, returns the guest's value. Raises GuestError, SandboxTimeout, SandboxDied, ProtocolError."""
        meta, buffers = wire.encode(value)
        frame = self.request(op, meta, *buffers, timeout=timeout)
        try:
            return wire.decode(frame.meta, frame.data)
        except wire.WireError as error:
            raise ProtocolError(f"sandbox {self.name}: {error}") from None

    def request(self, op: Op, meta: bytes = b"", *data: Any, timeout: float) -> wire.Frame:
        """A frame out, a frame back; the raw form of `call`."""
        with self.lock:
            self.post(op, meta, *data, timeout=timeout)
            try:
                return self.wait(op, timeout=timeout)
            except KeyboardInterrupt:
                self._owed = op, time.monotonic() + timeout
                raise

    def forget_owed(self) -> None:
        """The caller fetches it."""
        self._owed = None

    def post(self, op: Op, meta: bytes = b"", *data: Any, timeout: float) -> None:
        """Sends only: the reply is fetched by `wait`. Waits first for that of a call which the user interrupted."""
        if self._owed is not None:
            (owed, until), self._owed = self._owed, None
            with contextlib.suppress(GuestError):
                self.wait(owed, timeout=max(timeout, until - time.monotonic()))
        self._seq = (self._seq + 1) & 0xFFFF
        self._connection.deadline = time.monotonic() + timeout
        try:
            self._limit(socket.SO_SNDTIMEO, timeout)
            self._connection.send(op, 0, self._seq, meta, *data)
        except BlockingIOError:
            raise SandboxTimeout(f"sandbox {self.name} took no request within {timeout} s") from None
        except OSError as error:
            raise SandboxDied(f"sandbox {self.name} is gone ({error.strerror})") from None

    def wait(self, op: Op, *, timeout: float) -> wire.Frame:
        """The reply to the last `post`."""
        self._connection.deadline = time.monotonic() + timeout
        try:
            self._limit(socket.SO_RCVTIMEO, timeout)
            frame = self._connection.receive()
        except BlockingIOError:
            raise SandboxTimeout(f"sandbox {self.name} did not answer {op.name} within {timeout} s") from None
        except EOFError:
            raise SandboxDied(f"sandbox {self.name} is gone") from None
        except wire.WireError as error:
            raise ProtocolError(f"sandbox {self.name}: {error}") from None
        except OSError as error:
            raise SandboxDied(f"sandbox {self.name} is gone ({error.strerror})") from None
        if frame.op == Op.READY and frame.status == Status.ERROR:
            raise SandboxDied(f"sandbox {self.name}: its copy could not be set up: {frame.meta[:1000]!r}")
        if frame.op != op or frame.seq != self._seq:
            raise ProtocolError(
                f"sandbox {self.name} answered op {frame.op} seq {frame.seq}, not {op.name} {self._seq}"
            )
        if frame.status != Status.OK:
            try:
                info = wire.decode(frame.meta, frame.data)
            except wire.WireError as error:
                raise ProtocolError(f"sandbox {self.name}: {error}") from None
            raise GuestError(info if isinstance(info, dict) else {})
        return frame

    def limit(self, timeout: float) -> None:
        """Seconds for whoever uses `sock` directly."""
        self._limit(socket.SO_SNDTIMEO, timeout)
        self._limit(socket.SO_RCVTIMEO, timeout)

    def _limit(self, option: int, timeout: float) -> None:
        if self._timeouts.get(option) != timeout:
            whole = int(timeout)
            micros = max(int((timeout - whole) * 1e6), 0 if whole else 1)  # zero would mean: wait for ever
            self.sock.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(whole, micros))
            self._timeouts[option] = timeout

    def replace(self, sock: socket.socket) -> None:
        """Goes on with another guest: the copy that took this one's place."""
        self._connection.replace(sock)
        self.sock = sock
        self._timeouts.clear()
        self._owed = None

    def detach(self) -> socket.socket:
        """The socket alone, for another channel to go on with."""
        return self.sock

    def interrupt(self) -> None:
        """Ends the wait of whatever thread is in a call, and the guest with it. The socket stays open: its number
        must not go to another while that thread still holds it.
        """
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._connection.close()
