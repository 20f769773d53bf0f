"""A sandbox's way to what it may reach: two network namespaces with a pair of virtual cards between them (veth(4)).

gVisor has a network stack of its own and takes the card in the one; in the other the gateway listens (`egress`).
Neither leads anywhere else, and the sandbox's has routes to the rules' addresses only: all others are refused at once.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

from sandbox_gym.backends.egress import network
from sandbox_gym.guest import syscalls
from sandbox_gym.network import Allow

# RFC 7335's and RFC 6598's addresses: on no public network. In IPv6, of RFC 4193's.
PLACE = network.Place("192.0.0.1", ipaddress.IPv4Network("100.64.0.0/10"))
_GUEST, _PREFIX = "192.0.0.2", 30
_GATEWAY6, _GUEST6, _PREFIX6 = "fd00:5b::1", "fd00:5b::2", 64
_OURS, _THEIRS = "gateway", "eth0"
_RTM_NEWLINK, _RTM_NEWROUTE = 16, 24
_IFLA_IFNAME, _IFLA_LINKINFO, _IFLA_NET_NS_FD = 3, 18, 28
_IFLA_INFO_KIND, _IFLA_INFO_DATA, _VETH_INFO_PEER = 1, 2, 1
_RTA_DST, _RTA_OIF, _RTA_GATEWAY = 1, 4, 5
_MAIN_TABLE, _BY_ADMINISTRATOR, _UNICAST = 254, 4, 1
_IFF_UP = 1
_ESTABLISHED = "01"  # proc_net_tcp in the kernel's documentation


@dataclass
class Wires:
    """The two namespaces, as descriptors."""

    guest: int
    gateway: int

    def connections(self) -> int:
        """How many of TCP are open between them."""
        return network.inside(self.gateway, _established)

    def leave_guest(self) -> None:
        """The sandbox is in there by now, and keeps it."""
        if self.guest >= 0:
            os.close(self.guest)
        self.guest = -1

    def close(self) -> None:
        """Idempotent."""
        self.leave_guest()
        if self.gateway >= 0:
            os.close(self.gateway)
        self.gateway = -1


def make(allow: Allow) -> Wires:
    """With routes for these rules. Raises OSError."""
    wires = Wires(-1, -1)
    try:
        wires.guest, wires.gateway = _namespace(), _namespace()
        addresses = network.stand_ins(allow, PLACE)
        six = any(":" in address for address in addresses)
        network.inside(wires.gateway, lambda: _lay(wires.guest, six))
        network.inside(wires.guest, lambda: _route(addresses, six))
    except BaseException:
        wires.close()
        raise
    return wires


def _namespace() -> int:
    def make() -> int:
        syscalls.unshare(syscalls.CLONE_NEWNET)
        syscalls.loopback_up()
        return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)

    return network.in_a_thread(make)


def _established() -> int:
    rows: list[str] = []
    for table in ("tcp", "tcp6"):
        path = Path(f"/proc/thread-self/net/{table}")
        if path.exists():  # else a kernel without IPv6
            rows += path.read_text().splitlines()[1:]
    return sum(row.split()[3] == _ESTABLISHED for row in rows)


def _lay(guest_fd: int, six: bool) -> None:
    """In the gateway's namespace: makes the pair."""
    peer = _link() + _name(_THEIRS) + _attribute(_IFLA_NET_NS_FD, struct.pack("I", guest_fd))
    kind = _attribute(_IFLA_INFO_KIND, b"veth")
    info = kind + _attribute(_IFLA_INFO_DATA, _attribute(_VETH_INFO_PEER, peer))
    body = _link() + _name(_OURS) + _attribute(_IFLA_LINKINFO, info)
    network.ask(socket.NETLINK_ROUTE, _RTM_NEWLINK, network.NLM_F_CREATE, body)
    network.add_address(PLACE.address, _OURS, _PREFIX)
    if six:
        network.add_address(_GATEWAY6, _OURS, _PREFIX6)
    _up(_OURS)


def _route(addresses: list[str], six: bool) -> None:
    """In the guest's namespace."""
    network.add_address(_GUEST, _THEIRS, _PREFIX)
    if six:
        network.add_address(_GUEST6, _THEIRS, _PREFIX6)
    _up(_THEIRS)
    device = struct.pack("I", socket.if_nametoindex(_THEIRS))
    for text in dict.fromkeys(addresses):
        address = ipaddress.ip_address(text)
        family = socket.AF_INET if address.version == 4 else socket.AF_INET6
        gateway = ipaddress.ip_address(PLACE.address if address.version == 4 else _GATEWAY6)
        head = struct.pack(
            "BBBBBBBBI",
            *(family, address.max_prefixlen, 0, 0, _MAIN_TABLE, _BY_ADMINISTRATOR, 0, _UNICAST, 0),
        )
        body = _attribute(_RTA_DST, address.packed) + _attribute(_RTA_GATEWAY, gateway.packed)
        body += _attribute(_RTA_OIF, device)
        network.ask(socket.NETLINK_ROUTE, _RTM_NEWROUTE, network.NLM_F_CREATE, head + body)


def _up(device: str) -> None:
    body = _link(socket.if_nametoindex(device), _IFF_UP, _IFF_UP)
    network.ask(socket.NETLINK_ROUTE, _RTM_NEWLINK, 0, body)


def _link(index: int = 0, flags: int = 0, changed: int = 0) -> bytes:
    return struct.pack("BxHiII", socket.AF_UNSPEC, 0, index, flags, changed)


def _name(device: str) -> bytes:
    return _attribute(_IFLA_IFNAME, device.encode() + b"\0")


def _attribute(kind: int, value: bytes) -> bytes:
    """struct rtattr, padded to four bytes."""
    length = 4 + len(value)
    return struct.pack("HH", length, kind) + value + bytes(-length % 4)
