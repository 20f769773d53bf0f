"""What a connection's first bytes say of where it goes: HTTP heads (RFC 9112) and TLS ClientHellos (RFC 8446, 6066).

Strict: what two readers could understand differently is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from sandbox_gym.network import as_host, split_port

MOST_HEAD = 32 << 10  # bytes of a request's head, or of a ClientHello
_TOKEN = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_TARGET = re.compile(rb"[\x21-\x7e]+")
_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
_OF_ONE_HOP = {b"connection", b"keep-alive", b"te", b"upgrade", b"http2-settings"}
_HANDSHAKE, _CLIENT_HELLO, _SERVER_NAME, _HOST_NAME = 22, 1, 0, 0


class Refused(Exception):
    """Says why, and with which status of HTTP where that can be told."""

    def __init__(self, reason: str, status: int = 400) -> None:
        super().__init__(reason)
        self.status = status


@dataclass
class Head:
    """Of a request. `fields`: names in lower case."""

    method: bytes
    target: bytes
    version: bytes
    fields: list[tuple[bytes, bytes]]

    def only(self, name: bytes) -> bytes | None:
        """The value of a field that may come once. Raises Refused."""
        values = [value for key, value in self.fields if key == name]
        if len(values) > 1:
            raise Refused(f"more than one {name.decode()} field")
        return values[0] if values else None

    def host(self) -> tuple[str, int]:
        """What its Host field names; 80 where that has no port. Raises Refused."""
        value = self.only(b"host")
        if value is None:
            raise Refused("no Host field")
        return authority(value, 80)

    def body(self) -> int | None:
        """Its length; None for chunks. Raises Refused."""
        coding, length = self.only(b"transfer-encoding"), self.only(b"content-length")
        if coding is not None:
            if coding.lower() != b"chunked" or length is not None or self.version != b"HTTP/1.1":
                raise Refused("a body that is neither of one length nor in chunks")
            return None
        if length is not None and not re.fullmatch(rb"[0-9]{1,18}", length):
            raise Refused("a Content-Length that is no number")
        return int(length or 0)

    def forwarded(self, target: bytes) -> bytes:
        """The head for the server itself, one request on its connection."""
        listed = {
            name.strip().lower()
            for key, value in self.fields
            if key == b"connection"
            for name in value.split(b",")
        } - {b"host", b"content-length", b"transfer-encoding"}
        kept = [
            (key, value)
            for key, value in self.fields
            if key not in _OF_ONE_HOP and key not in listed and not key.startswith(b"proxy-")
        ]
        lines = [b" ".join((self.method, target, self.version))]
        lines += [key + b": " + value for key, value in (*kept, (b"connection", b"close"))]
        return b"\r\n".join(lines) + b"\r\n\r\n"


def head(block: bytes) -> Head:
    """Of the bytes before the empty line. Raises Refused."""
    first, *lines = block.split(b"\r\n")
    words = first.split(b" ")
    if len(words) != 3 or not _TOKEN.fullmatch(words[0]) or not _TARGET.fullmatch(words[1]):
        raise Refused("no request of HTTP")
    if words[2] not in (b"HTTP/1.1", b"HTTP/1.0"):
        raise Refused("no HTTP/1.1")
    fields = []
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon or not _TOKEN.fullmatch(name) or not _VALUE.fullmatch(value):
            raise Refused("a malformed header field")
        fields.append((name.lower(), value.strip(b" \t")))
    return Head(words[0], words[1], words[2], fields)


def absolute(target: bytes) -> tuple[bytes, bytes]:
    """Authority, and path with query, of an `http://` target. Raises Refused."""
    match = re.fullmatch(rb"(?i:http)://([^/?#@]+)(/[^#]*|\?[^#]*)?", target)
    if not match:
        raise Refused("no http:// address: this is a proxy (HTTPS goes by CONNECT)")
    path = match[2] or b"/"
    return match[1], path if path.startswith(b"/") else b"/" + path


def authority(block: bytes, port: int | None) -> tuple[str, int]:
    """Host, in the form of `as_host`, and port, by default the given one. Raises Refused."""
    try:
        name, own = split_port(block.decode("ascii"))
        found = own or port
        if found is None:
            raise ValueError("no port")
        return as_host(name), found
    except ValueError as error:
        raise Refused(f"no host and port: {error}") from None


def is_tls(block: bytes) -> bool:
    """Whether it begins as a record with a handshake of TLS does."""
    return block[:1] == bytes([_HANDSHAKE]) and block[1:2] in (b"\x03", b"")


def server_name(block: bytes) -> str | None:
    """Whom a ClientHello is for, in the form of `as_host`; "" where it names nobody; None while it isn't complete.

    Raises Refused.
    """
    hello = b""
    at = 0
    while len(block) >= at + 5:
        length = int.from_bytes(block[at + 3 : at + 5], "big")
        if block[at] != _HANDSHAKE or block[at + 1] != 3 or not 0 < length <= 1 << 14:
            raise Refused("no ClientHello of TLS")
        hello += block[at + 5 : at + 5 + length]
        if hello[0:1] not in (b"", bytes([_CLIENT_HELLO])):
            raise Refused("no ClientHello of TLS")
        needed = 4 + int.from_bytes(hello[1:4], "big") if len(hello) >= 4 else 4
        if needed > MOST_HEAD:
            raise Refused("too long a ClientHello")
        if len(hello) >= needed and len(hello) >= 4:
            return _named(_Reader(hello[4:needed]))
        at += 5 + length
    return None


class _Reader:
    def __init__(self, block: bytes) -> None:
        self.block = block

    def take(self, count: int) -> bytes:
        if len(self.block) < count:
            raise Refused("a malformed ClientHello")
        taken, self.block = self.block[:count], self.block[count:]
        return taken

    def vector(self, width: int) -> _Reader:
        """What is preceded by its length."""
        return _Reader(self.take(int.from_bytes(self.take(width), "big")))


def _named(hello: _Reader) -> str:
    hello.take(2 + 32)
    for width in (1, 2, 1):  # session, cipher suites, compression
        hello.vector(width)
    if not hello.block:
        return ""
    extensions, names = hello.vector(2), []
    while extensions.block:
        kind, content = int.from_bytes(extensions.take(2), "big"), extensions.vector(2)
        if kind != _SERVER_NAME:
            continue
        entries = content.vector(2)
        while entries.block:
            if entries.take(1)[0] != _HOST_NAME:
                raise Refused("a server name of an unknown kind")
            names.append(entries.vector(2).block)
    if len(names) > 1:
        raise Refused("more than one server name")
    try:
        return as_host(names[0].decode("ascii")) if names else ""
    except ValueError:
        raise Refused("a malformed server name") from None
