"""Names: the answers that a sandbox gets (RFC 1035), and the addresses that the proxy itself looks up for one."""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Callable, Sequence

from sandbox_gym.network import as_host

_HEADER = struct.Struct("!6H")
_QR, _AA, _RD, _RA, _OPCODES = 0x8000, 0x0400, 0x0100, 0x0080, 0x7800
_FORMAT_ERROR, _NO_SUCH_NAME, _NOT_IMPLEMENTED = 1, 3, 4
_A, _INTERNET = 1, 1
_TTL = 60  # seconds
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Find = Callable[[str], str | None]


def answer(query: bytes, find: Find) -> tuple[bytes | None, str | None]:
    """What to answer, if anything, and the name that was asked for where `find` does not know it.

    `find`: the IPv4 address of a name, or None. An allowed name has that and no other record; others don't exist.
    """
    if len(query) < _HEADER.size:
        return None, None
    number, flags, questions, *_ = _HEADER.unpack_from(query)
    if flags & _QR:
        return None, None
    reply = _QR | _AA | _RA | (flags & (_RD | _OPCODES))
    if flags & _OPCODES or questions != 1:
        return _HEADER.pack(number, reply | _NOT_IMPLEMENTED, 0, 0, 0, 0), None
    try:
        name, end = _question(query)
        kind, family = struct.unpack_from("!HH", query, end)
    except (ValueError, struct.error, IndexError):
        return _HEADER.pack(number, reply | _FORMAT_ERROR, 0, 0, 0, 0), None
    question = query[_HEADER.size : end + 4]
    try:
        address = find(as_host(name))
    except ValueError:
        address = None
    if address is None:
        return _HEADER.pack(number, reply | _NO_SUCH_NAME, 1, 0, 0, 0) + question, name
    if (kind, family) != (_A, _INTERNET):
        return _HEADER.pack(number, reply, 1, 0, 0, 0) + question, None
    record = struct.pack("!HHHIH", 0xC00C, _A, _INTERNET, _TTL, 4) + socket.inet_aton(address)
    return _HEADER.pack(number, reply, 1, 1, 0, 0) + question + record, None


def _question(query: bytes) -> tuple[str, int]:
    """The name, and where it ends."""
    labels, at = [], _HEADER.size
    while length := query[at]:
        if length > 63 or len(query) < at + 1 + length:
            raise ValueError("no name")
        labels.append(query[at + 1 : at + 1 + length].decode("ascii", "backslashreplace"))
        at += 1 + length
    return ".".join(labels), at + 1


def public(addresses: Sequence[str]) -> tuple[list[str], str]:
    """Those that a name may lead to without a rule that says so, and one of the others, "" if there is none: loopback,
    private and link-local networks, where a name of someone else's could point (DNS rebinding).
    """
    fine = [address for address in addresses if is_public(address)]
    return fine, next((address for address in addresses if address not in fine), "")


def is_public(text: str) -> bool:
    address: Address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo or (None, None))[1]
        if address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
        if address.is_site_local:
            return False
    return address.is_global and not address.is_multicast and not address.is_reserved


def look_up(name: str, port: int) -> list[str]:
    """By this machine's own resolver. Raises OSError."""
    found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))
