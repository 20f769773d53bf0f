"""A guest's sockets as the kernel tells of them: by duplicates of its descriptors, and without a change to any."""

from __future__ import annotations

import re
import select
import socket

from sandbox_gym.backends.egress import network

from .planner import get_descriptor

_SO_PROTOCOL, _SO_DOMAIN, _SO_PASSPIDFD = 38, 39, 76
_GROUP = re.compile(r"^(?:\t+|\d+ +\S+ +)([0-9A-Fa-f]{8,32}) ", re.MULTILINE)
_GROUPS_OF_ALL = {"010000E0", "ff02000000000000" + "1".zfill(16), "ff01000000000000" + "1".zfill(16)}


class Socket:
    """A duplicate of a guest's socket, and what can be asked of it without a change."""

    def __init__(self, pid: int, fd: int) -> None:
        # The family and kind that are given here are not looked at: asking for the true ones might be refused.
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, fileno=get_descriptor(pid, fd))
        self.family = self._option(_SO_DOMAIN)
        self.kind = self._option(socket.SO_TYPE)
        self.protocol = self._option(_SO_PROTOCOL)

    def __enter__(self) -> Socket:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._sock.close()

    def poll(self) -> int:
        poll = select.poll()
        poll.register(self._sock, select.POLLIN | select.POLLPRI | select.POLLRDHUP)
        return next((events for _, events in poll.poll(0)), 0)

    def passes_credentials(self) -> bool:
        return any(self._option(option) for option in (socket.SO_PASSCRED, _SO_PASSPIDFD))

    def tcp_info(self) -> bytes:
        return self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)

    def addresses(self) -> tuple[bytes, bytes]:
        """Its own and its peer's."""
        return network.address_of(self._sock, "getsockname"), network.address_of(self._sock, "getpeername")

    def _option(self, option: int) -> int:
        try:
            return self._sock.getsockopt(socket.SOL_SOCKET, option)
        except OSError:  # an option that the kernel, or this family, has not
            return 0


def has_joined_groups(pid: int) -> bool:
    """Whether any socket in the network namespace has joined a multicast group: which, nothing tells."""
    found: list[str] = []
    for name in ("igmp", "igmp6"):
        try:
            with open(f"/proc/{pid}/net/{name}") as groups:
                found += _GROUP.findall(groups.read())
        except FileNotFoundError:  # a kernel without it
            continue
    return not set(found) <= _GROUPS_OF_ALL


def family_name(number: int) -> str:
    try:
        return socket.AddressFamily(number).name
    except ValueError:
        return f"family {number}"
