"""Talking to `criu swrk`: protocol buffers over a seqpacket socket (criu's images/rpc.proto; protobuf.dev's encoding).

Only what the engine says and hears. Nothing here comes from a guest: the other side is criu.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

MAX_MESSAGE = 1 << 16
DUMP, RESTORE, NOTIFY = 1, 2, 6  # enum criu_req_type

# criu_opts: name to field number
_OPTIONS = {
    "images_dir_fd": 1,
    "pid": 2,
    "leave_running": 3,
    "tcp_established": 5,
    "file_locks": 8,
    "log_level": 9,
    "log_file": 10,
    "notify_scripts": 12,
    "root": 13,
    "work_dir_fd": 17,
    "link_remap": 18,
    "inherit_fd": 27,
    "manage_cgroups_mode": 34,
    "ghost_limit": 35,
    "external": 37,
    "empty_ns": 38,
    "lazy_pages": 48,
    "network_lock": 64,
}
_VARINT, _BYTES = 0, 2
_LONGEST_VARINT = 10  # bytes
Value = int | str | bytes | list["Value"]


def request(kind: int, options: Mapping[str, Value]) -> bytes:
    """A criu_req. An inherited descriptor is `inherit_fd(...)`, already a message of its own."""
    body = b"".join(_field(_OPTIONS[name], value) for name, value in options.items())
    return _field(1, kind) + _field(2, body)


def inherit_fd(key: str, fd: int) -> bytes:
    return _field(1, key) + _field(2, fd)


def message(fields: Mapping[int, Value]) -> bytes:
    """Any message, by field numbers."""
    return join(fields.items())


def join(pairs: Iterable[tuple[int, Value]]) -> bytes:
    """A message of these fields, in this order: what `fields` takes apart."""
    return b"".join(_field(number, value) for number, value in pairs)


def notified(*, success: bool) -> bytes:
    """What a notification is answered with; criu waits for it."""
    return _field(1, NOTIFY) + _field(3, int(success))


def receive(sock: socket.socket) -> dict[str, Any]:
    """A criu_resp: `kind`, `success`, and where they come `script` and `pid`, of a notification or a restored
    tree. Raises EOFError when criu is gone, ValueError.
    """
    block = sock.recv(MAX_MESSAGE)
    if not block:
        raise EOFError("criu closed its socket")
    said = dict(fields(block))
    found: dict[str, Any] = {"kind": said.get(1, 0), "success": bool(said.get(2, 0))}
    if 4 in said:
        found["pid"] = _signed(dict(fields(said[4]))[1])
    if 5 in said:
        notify = dict(fields(said[5]))
        found["script"], found["pid"] = notify.get(1, b"").decode(), _signed(notify.get(2, 0))
    return found


def _field(number: int, value: Value) -> bytes:
    if isinstance(value, list):
        return b"".join(_field(number, item) for item in value)
    if isinstance(value, int):
        return _varint(number << 3 | _VARINT) + _varint(value & (1 << 64) - 1)
    block = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | _BYTES) + _varint(len(block)) + block


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def fields(block: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a message, in order: a number, and an int or bytes. Raises ValueError."""
    place = 0
    while place < len(block):
        key, place = _read_varint(block, place)
        value: Any
        value, place = _read_varint(block, place)
        if key & 7 == _BYTES:
            start, place = place, place + value
            if place > len(block):
                raise ValueError("a message that breaks off")
            value = block[start:place]
        elif key & 7 != _VARINT:
            raise ValueError(f"a field of wire type {key & 7}")
        yield key >> 3, value


def _signed(number: int) -> int:
    """An int32 of the wire."""
    return number - (1 << 64) if number >= 1 << 63 else number


def _read_varint(block: bytes, place: int) -> tuple[int, int]:
    value = 0
    for shift, byte in enumerate(block[place : place + _LONGEST_VARINT]):
        value |= (byte & 0x7F) << 7 * shift
        if byte < 0x80:
            return value, place + shift + 1
    raise ValueError("a message that breaks off, or a number of more than 64 bits")
