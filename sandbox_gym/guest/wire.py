"""The wire between host and guest: frames on a stream socket, and a codec that never runs what it reads.

A frame is a header, `data` (raw bytes: arrays, files) and `meta` (JSON). Arrays and bytes inside a value go to
`data` and leave their dtype, shape and place in `meta`; so nothing is pickled, and both lengths are bounded before
a byte is read.
"""

from __future__ import annotations

import array
import enum
import json
import math
import select
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

HEADER = struct.Struct("<BBHIQ")  # op, status, seq, meta length, data length
MAX_META = 32 << 20
MAX_DATA = 512 << 20
STEP_RESULT = struct.Struct("<??6xd")  # terminated, truncated, reward: before the observation's raw bytes
_MAX_FDS = 253  # SCM_MAX_FD: a restore carries one for each mount
_RIGHTS = socket.CMSG_SPACE(_MAX_FDS * 4)
_BUFFER = 1 << 16
_SLICE = 1 << 18
_ARRAY_KINDS = "biufcSUmM"
_MAX_EMPTY = 1 << 20  # elements of an array of no bytes, which NumPy gives one byte each
_to_json = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


class Op(enum.IntEnum):
    READY = 1  # guest to host, once, when a copy stands
    PING = 2
    ADOPT = 5  # from the supervisor: goes on over the socket that comes along, unanswered; answers where none does
    CLONE = 3  # from the supervisor, with descriptors
    SETTLE = 4  # before a snapshot: see Agent._settle
    # the user's Sandbox
    CODE = 10
    EXEC = 11
    READ = 12
    WRITE = 13
    LIST = 14
    UNPACK = 15
    PACK = 16
    RESEED = 17
    # long-lived processes and shells
    START = 18
    WAIT = 19
    OUTPUT = 20
    FEED = 21
    SIGNAL = 22
    RESIZE = 23
    PROCESSES = 24
    SHELL = 25
    SHELL_CLOSE = 26
    # a hosted Gymnasium environment
    MAKE = 30
    RESET = 31
    STEP = 32  # the hot path: raw bytes both ways where the spaces have a fixed size
    RENDER = 33
    ROLLOUT = 34
    CLOSE = 35


class Status(enum.IntEnum):
    OK = 0
    ERROR = 1  # meta: {"type", "message", "traceback"}


class WireError(Exception):
    """The other side broke the protocol: a bad header, an oversized frame, a value that can't be decoded."""


class Frame(NamedTuple):
    op: int
    status: int
    seq: int
    meta: bytes
    data: memoryview
    fds: list[int]


def send(
    sock: socket.socket,
    op: int,
    status: int = 0,
    seq: int = 0,
    meta: bytes = b"",
    *data: Any,
    fds: Sequence[int] = (),
    deadline: float | None = None,
) -> None:
    """One frame out. Raises BlockingIOError past the `deadline` (monotonic)."""
    length = 0
    for block in data:
        length += block.nbytes if isinstance(block, memoryview) else len(block)
    blocks = [HEADER.pack(op, status, seq, len(meta), length), *data, meta]
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    total = HEADER.size + length + len(meta)
    if total <= _SLICE:
        sent = sock.sendmsg(blocks, rights)
        if sent == total:
            return
        whole = memoryview(b"".join(blocks))
    else:
        whole = memoryview(b"".join(blocks))
        sent = sock.sendmsg([whole[:_SLICE]], rights)
    while (
        sent < total
    ):  # in slices: the kernel's time-out starts anew with each piece that a slow reader takes
        if deadline is not None and time.monotonic() > deadline:
            raise BlockingIOError
        sent += sock.send(whole[sent : sent + _SLICE])


Quick = Callable[[bytearray, int], bytes | None]
"""Answers a small frame that lies in a buffer, with all of its bytes; None for a frame that it does not know."""


class Connection:
    """Frames over a connected stream socket. Blocking calls; time-outs are the socket's own (SO_RCVTIMEO).

    Only the guest takes descriptors: with `takes_fds` False the kernel drops what a guest may try to send.
    """

    def __init__(self, sock: socket.socket, *, takes_fds: bool) -> None:
        self.sock = sock
        self.deadline: float | None = (
            None  # monotonic; a peer that dribbles restarts the kernel's clock at each byte
        )
        self._takes_fds = takes_fds
        # A host has one of these for each of its many guests, made while a user waits: no 64 KiB to clear there.
        self._buffer = bytearray(_BUFFER if takes_fds else 1 << 12)

    def send(self, op: int, status: int = 0, seq: int = 0, meta: bytes = b"", *data: Any) -> None:
        send(self.sock, op, status, seq, meta, *data, deadline=self.deadline)

    def receive(self) -> Frame:
        """The next frame. Raises EOFError when the other side is gone, WireError when it misbehaves."""
        if not self._takes_fds:
            return self._frame(self.sock.recv_into(self._buffer), [])
        count, ancillary, _, _ = self.sock.recvmsg_into([self._buffer], _RIGHTS, socket.MSG_CMSG_CLOEXEC)
        return self._frame(count, _descriptors(ancillary))

    def serve(self, quick: Quick) -> Frame:
        """`receive`, but each frame is first shown to `quick` where it lies; those that it answers never come out."""
        buffers, receive, send = [self._buffer], self.sock.recvmsg_into, self.sock.send
        arrivals = select.poll()
        arrivals.register(self.sock, select.POLLIN)
        wait = arrivals.poll
        while True:
            wait()  # one that waits in `recvmsg` is woken also when its reply has been read, for nothing
            count, ancillary, _, _ = receive(buffers, _RIGHTS, socket.MSG_CMSG_CLOEXEC)
            answer = quick(self._buffer, count) if not ancillary else None
            if answer is None:
                return self._frame(count, _descriptors(ancillary))
            sent = send(answer)
            if sent < len(answer):
                self.sock.sendall(memoryview(answer)[sent:])

    def _frame(self, count: int, fds: list[int]) -> Frame:
        """The frame that begins with `count` bytes in the buffer."""
        buffer = self._buffer
        if count == 0:
            raise EOFError("the other side closed the connection")
        while count < HEADER.size:
            count += self._more(memoryview(buffer)[count:])
        op, status, seq, meta_length, data_length = HEADER.unpack_from(buffer)
        if meta_length > MAX_META or data_length > MAX_DATA:
            raise WireError(f"a frame of {meta_length} + {data_length} bytes is over the bound")
        end = HEADER.size + data_length + meta_length
        if count > end:
            raise WireError("more bytes than the frame announced")
        if end <= len(buffer):
            body = memoryview(buffer)
        else:
            body = memoryview(bytearray(end))
            body[:count] = memoryview(buffer)[:count]
        while count < end:
            count += self._more(body[count:end])
        split = HEADER.size + data_length
        data = body[HEADER.size : split]
        # A small frame lies in the shared buffer: copied out, or the next receive would overwrite it.
        if end <= len(buffer):
            data = memoryview(bytes(data))
        return Frame(op, status, seq, bytes(body[split:end]), data, fds)

    def _more(self, target: memoryview) -> int:
        count = self.sock.recv_into(target)
        if count == 0:
            raise EOFError("the other side closed the connection in the middle of a frame")
        if self.deadline is not None and time.monotonic() > self.deadline:
            raise BlockingIOError
        return count

    def replace(self, sock: socket.socket) -> None:
        """Goes on over another socket."""
        self.sock.close()
        self.sock = sock

    def close(self) -> None:
        self.sock.close()


def _descriptors(ancillary: list[Any]) -> list[int]:
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    return list(fds)


def failure(error: BaseException) -> bytes:
    """The meta of a reply with Status.ERROR."""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return encode({"type": type(error).__name__, "message": str(error), "traceback": text[-20_000:]})[0]


# ---- values ---------------------------------------------------------------------------------------------------


def encode(value: Any) -> tuple[bytes, list[Any]]:
    """A value as JSON and buffers: None, bool, int, float, str, bytes, list, tuple, dict, set, complex, numpy arrays
    and scalars. Anything else becomes an `Opaque` with its repr, since no side unpickles.
    """
    if value is None:
        return b"", []
    buffers = _Buffers()
    return _to_json(_pack(value, buffers)).encode("utf-8", "surrogatepass"), buffers.blocks


def decode(meta: bytes, data: memoryview) -> Any:
    """The value of `encode`. Raises WireError for anything that `encode` can't have written."""
    if not meta:
        return None
    try:
        return _unpack(json.loads(meta.decode("utf-8", "surrogatepass")), _Source(data))
    except WireError:
        raise
    except (
        *(ValueError, KeyError, TypeError, IndexError, RecursionError, OverflowError, MemoryError),
        SyntaxError,  # of numpy, for a dtype with a comma in it
    ) as error:
        raise WireError(f"a value can't be decoded: {type(error).__name__}: {error}") from None


class Opaque(str):
    """The repr of a guest's object that has no safe encoding."""

    __slots__ = ()


class _Buffers:
    def __init__(self) -> None:
        self.blocks: list[Any] = []
        self.length = 0

    def add(self, block: Any, nbytes: int) -> list[int]:
        start = self.length
        self.blocks.append(block)
        self.length += nbytes
        return [start, nbytes]


class _Source:
    """Buffers come one after the other, as they were added: could they overlap, a small frame of many references
    to one large buffer would fill the reader's memory.
    """

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._end = 0

    def take(self, packed: Any) -> memoryview:
        start, length = packed["p"]
        if start != self._end or type(length) is not int or not 0 <= length <= len(self._data) - self._end:
            raise WireError("a buffer lies outside its frame, or over another")
        self._end += length
        return self._data[start : self._end]


def _pack(value: Any, buffers: _Buffers) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [_pack(item, buffers) for item in value]
    if kind is dict:
        if all(type(key) is str for key in value) and "$" not in value:
            return {key: _pack(item, buffers) for key, item in value.items()}
        return {"$": "m", "v": [[_pack(k, buffers), _pack(v, buffers)] for k, v in value.items()]}
    if kind in (bytes, bytearray, memoryview):
        block = bytes(value)
        return {"$": "b", "p": buffers.add(block, len(block))}
    if kind is complex:
        return {"$": "c", "v": [value.real, value.imag]}
    if kind in (set, frozenset):
        return {"$": "s", "v": [_pack(item, buffers) for item in value]}
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
        return _pack_array(value, buffers, numpy)
    if isinstance(value, tuple):
        return {"$": "t", "v": [_pack(item, buffers) for item in value]}
    bases: tuple[Any, ...] = (dict, list, str, bool, int, float)
    for base in bases:  # subclasses: OrderedDict, IntEnum, ...
        if isinstance(value, base):
            return _pack(base(value), buffers)
    return {"$": "o", "v": _safe_repr(value)}


def _pack_array(value: Any, buffers: _Buffers, numpy: Any) -> Any:
    scalar = not isinstance(value, numpy.ndarray)
    whole = numpy.asarray(value)
    if whole.dtype.kind not in _ARRAY_KINDS:
        return {
            "$": "oa",
            "s": list(whole.shape),
            "v": [_pack(item, buffers) for item in whole.ravel().tolist()],
        }
    raw = numpy.ascontiguousarray(whole).tobytes()
    packed = {"$": "a", "d": whole.dtype.str, "s": list(whole.shape), "p": buffers.add(raw, len(raw))}
    if scalar:
        packed["$"] = "n"
    return packed


def _safe_repr(value: Any) -> str:
    try:
        return repr(value)[:1000]
    except Exception as error:
        return f"<{type(value).__name__}, whose repr raised {type(error).__name__}>"


def _unpack(packed: Any, data: _Source) -> Any:
    if isinstance(packed, list):
        return [_unpack(item, data) for item in packed]
    if not isinstance(packed, dict):
        return packed
    tag = packed.get("$")
    if tag is None:
        return {key: _unpack(item, data) for key, item in packed.items()}
    return _DECODERS[tag](packed, data)


def _unpack_array(packed: Any, data: _Source) -> Any:
    import numpy

    dtype = numpy.dtype(str(packed["d"]))
    if dtype.kind not in _ARRAY_KINDS:
        raise WireError(f"an array of dtype {dtype} is not taken from a guest")
    raw = data.take(packed)
    shape = tuple(int(n) for n in packed["s"])
    if len(shape) > 32 or any(n < 0 for n in shape):
        raise WireError("an array with an impossible shape")
    if dtype.itemsize == 0:  # numpy.frombuffer refuses the empty string dtype
        if len(raw) or math.prod(shape) > _MAX_EMPTY:
            raise WireError("an array of no bytes with too many elements")
        return numpy.zeros(shape, dtype)
    return numpy.frombuffer(raw, dtype).reshape(shape).copy()  # a copy: aligned, writable, and its own


def _unpack_scalar(packed: Any, data: _Source) -> Any:
    return _unpack_array(packed, data)[()]


def _unpack_object_array(packed: Any, data: _Source) -> Any:
    import numpy

    items = [_unpack(item, data) for item in packed["v"]]
    whole = numpy.empty(len(items), dtype=object)
    whole[:] = items
    return whole.reshape([int(n) for n in packed["s"]])


_DECODERS = {
    "m": lambda p, d: {_unpack(k, d): _unpack(v, d) for k, v in p["v"]},
    "b": lambda p, d: bytes(d.take(p)),
    "c": lambda p, d: complex(*p["v"]),
    "s": lambda p, d: {_unpack(item, d) for item in p["v"]},
    "t": lambda p, d: tuple(_unpack(item, d) for item in p["v"]),
    "o": lambda p, d: Opaque(p["v"]),
    "a": _unpack_array,
    "n": _unpack_scalar,
    "oa": _unpack_object_array,
}
