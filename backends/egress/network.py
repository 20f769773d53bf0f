"""What the supervisor does in a guest's network namespace: a thread of its own enters, acts, and ends."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import ipaddress
import os
import socket
import struct
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

from sandbox_gym.guest import syscalls
from sandbox_gym.network import Allow, as_address

T = TypeVar("T")


@dataclass(frozen=True)
class Place:
    """Where a guest finds what is served. `address`: of the proxy and the name server; `names`: the network that the
    names' stand-in addresses are of.
    """

    address: str
    names: ipaddress.IPv4Network


INSIDE = Place("127.0.0.1", ipaddress.IPv4Network("127.64.0.0/10"))
End = tuple[str, int]
Connection = tuple[str, str, str]  # which of _FAMILIES, own end and peer's as the kernel writes them
PROXY_PORT = 3128
_BACKLOG = 64
_NLMSG = struct.Struct("IHHII")
_RTM_NEWADDR, _SOCK_DESTROY, _NLMSG_ERROR = 20, 21, 2
_NLM_F_REQUEST, _NLM_F_ACK, NLM_F_CREATE = 1, 4, 0x400
_NETLINK_SOCK_DIAG = 4
_IFA_ADDRESS, _IFA_LOCAL, _IFA_F_NODAD = 1, 2, 2
_LISTEN, _TIME_WAIT = 10, 6
_FAMILIES = {"tcp": socket.AF_INET, "tcp6": socket.AF_INET6}


def inside(netns_fd: int, action: Callable[[], T]) -> T:
    """What `action` returns, or raises, in that network namespace. A thread goes in and never has to come out: where an
    ordinary user's supervisor is from, it may not enter again.
    """

    def enter() -> T:
        syscalls.setns(netns_fd, syscalls.CLONE_NEWNET)
        return action()

    return in_a_thread(enter)


def in_a_thread(action: Callable[[], T]) -> T:
    """The same where it is: in a thread of its own, which ends with it."""
    made: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            made.append(action())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return made[0]


def inside_that_of(pid: int, action: Callable[[], T]) -> T:
    """The same, in the network namespace of a process."""
    theirs = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return inside(theirs, action)
    finally:
        os.close(theirs)


def socket_pair(pid: int) -> tuple[socket.socket, socket.socket]:
    """A pair of stream sockets that criu finds where it looks for those of `pid`."""
    return inside_that_of(pid, lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM))


def variables(allow: Allow | None, place: Place = INSIDE) -> dict[str, str]:
    """The environment variables of a guest that tell programs of the proxy."""
    if allow is None:
        return {}
    proxies = dict.fromkeys(
        ("http_proxy", "https_proxy", "all_proxy"), f"http://{place.address}:{PROXY_PORT}"
    )
    told = {**proxies, "no_proxy": "localhost,127.0.0.1,::1"}
    return {name: value for key, value in told.items() for name in (key, key.upper())}


def changed_variables(
    before: Allow | None, now: Allow | None, place: Place = INSIDE
) -> dict[str, str | None]:
    """What differs where a copy's network is opened or closed; None: it goes."""
    if (before is None) == (now is None):
        return {}
    return {**variables(now, place)} if now is not None else dict.fromkeys(variables(before, place))


# ---- listening sockets ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Listener:
    """A socket that lies in a guest's network namespace, or next to it, and is served outside. `kind`: "proxy", "dns"
    or "tcp"; `rule`: of the latter, which of the rules it stands for.
    """

    kind: str
    rule: int
    port: int
    sock: socket.socket


def listen(allow: Allow, place: Place = INSIDE) -> list[Listener]:
    """In that namespace: the proxy, the name server, and an address of its own for each rule. Raises OSError."""
    made: list[Listener] = []
    taken: set[tuple[str, int]] = set()
    try:
        made.append(Listener("proxy", -1, PROXY_PORT, _listening(place.address, PROXY_PORT)))
        names = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        made.append(Listener("dns", -1, 53, names))
        names.setblocking(False)
        names.bind((place.address, 53))
        for index, (rule, address) in enumerate(zip(allow.rules, stand_ins(allow, place))):
            if not ipaddress.ip_address(address).is_loopback:
                try:
                    add_address(address)
                except OSError as error:
                    if error.errno != errno.EEXIST:
                        raise
            for port in rule.ports:
                if (address, port) not in taken:
                    taken.add((address, port))
                    made.append(Listener("tcp", index, port, _listening(address, port)))
    except BaseException:
        for listener in made:
            listener.sock.close()
        raise
    return made


def stand_ins(allow: Allow, place: Place = INSIDE) -> list[str]:
    """The address that each rule's host has inside: its own, or for a name one of the place's, the same in all
    sandboxes, since copies may remember it.
    """
    taken: dict[str, str] = {}  # by host
    for rule in allow.rules:
        number = int.from_bytes(hashlib.sha256(rule.host.encode()).digest()[:4], "big") >> 10
        address = rule.host if as_address(rule.host) else _of_range(number, place)
        while address in taken.values() and taken.get(rule.host) != address:
            number += 1
            address = _of_range(number, place)
        taken[rule.host] = address
    return [taken[rule.host] for rule in allow.rules]


def _of_range(number: int, place: Place) -> str:
    return str(place.names[number % place.names.num_addresses])


def _listening(address: str, port: int) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setblocking(False)
        sock.bind((address, port))
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise OSError(error.errno, f"listening on {address}:{port} inside: {error.strerror}") from None
    return sock


def add_address(text: str, device: str = "lo", prefix: int | None = None) -> None:
    """To a device; `prefix`: the length of its network's, all of it by default (rtnetlink(7), RTM_NEWADDR)."""
    address = ipaddress.ip_address(text)
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    length = address.max_prefixlen if prefix is None else prefix
    body = struct.pack("BBBBI", family, length, _IFA_F_NODAD, 0, socket.if_nametoindex(device))
    for kind in (_IFA_LOCAL, _IFA_ADDRESS):
        body += struct.pack("HH", 4 + len(address.packed), kind) + address.packed
    ask(socket.NETLINK_ROUTE, _RTM_NEWADDR, NLM_F_CREATE, body)


# ---- connections ----------------------------------------------------------------------------------------------------


def connections(pid: int, outside: Collection[End]) -> list[Connection]:
    """Those of TCP in the network namespace of `pid` that lead to one of these, while it stands still."""
    return [
        (table, own, peer)
        for table in _FAMILIES
        for own, peer, state in _rows(pid, table)
        if state not in (_LISTEN, _TIME_WAIT) and _readable(peer) in outside
    ]


def end_connections(pid: int, those: Sequence[Connection]) -> None:
    """Ends them in another network namespace (sock_diag(7)): in a copy, nobody is at their other end. By now the kernel
    may have ended them by itself, and the copy may have made others.
    """

    def end() -> None:
        for table, own, peer in those:
            _destroy(_FAMILIES[table], _packed(own), _packed(peer))

    inside_that_of(pid, end)


def _rows(pid: int, table: str) -> list[tuple[str, str, int]]:
    """Own and peer's end of each socket, and its state (proc_net_tcp in the kernel's documentation)."""
    try:
        with open(f"/proc/{pid}/net/{table}") as file:
            rows = [line.split() for line in file.readlines()[1:]]
    except FileNotFoundError:  # a kernel without IPv6
        return []
    return [(row[1], row[2], int(row[3], 16)) for row in rows]


def _packed(text: str) -> tuple[bytes, int]:
    words, _, port = text.partition(":")  # 32 bits each, in this machine's order
    address = b"".join(struct.pack("=I", int(words[i : i + 8], 16)) for i in range(0, len(words), 8))
    return address, int(port, 16)


def _readable(text: str) -> End:
    packed, port = _packed(text)
    address = ipaddress.ip_address(packed)
    inner = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(inner or address), port


def _destroy(family: int, own: tuple[bytes, int], peer: tuple[bytes, int]) -> None:
    """struct inet_diag_req_v2, with no cookie: whichever has these addresses."""
    ends = struct.pack("!HH", own[1], peer[1]) + own[0].ljust(16, b"\0") + peer[0].ljust(16, b"\0")
    which = struct.pack("BBBxI", family, socket.IPPROTO_TCP, 0, 0xFFFFFFFF) + ends
    try:
        ask(_NETLINK_SOCK_DIAG, _SOCK_DESTROY, 0, which + struct.pack("III", 0, 0xFFFFFFFF, 0xFFFFFFFF))
    except FileNotFoundError:  # it has ended
        pass


def own_address(sock: socket.socket) -> bytes:
    return address_of(sock, "getsockname")


def address_of(sock: socket.socket, call: str) -> bytes:
    """Family, port and address of a socket; IPv4 and the IPv6 addresses that stand for it alike."""
    block, size = ctypes.create_string_buffer(128), ctypes.c_uint32(128)
    if getattr(syscalls.libc, call)(sock.fileno(), block, ctypes.byref(size)):
        raise OSError(ctypes.get_errno(), call)
    family = struct.unpack_from("H", block.raw)[0]
    port = block.raw[2:4]
    address = block.raw[4:8] if family == socket.AF_INET else block.raw[8:24]
    return port + address.removeprefix(bytes(10) + b"\xff\xff")


def ask(protocol: int, kind: int, flags: int, body: bytes) -> None:
    """A request of netlink(7), which is acknowledged. Raises OSError."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol) as sock:
        sock.settimeout(5.0)
        sock.send(
            _NLMSG.pack(_NLMSG.size + len(body), kind, _NLM_F_REQUEST | _NLM_F_ACK | flags, 1, 0) + body
        )
        answer = sock.recv(4096)
    number = (
        -struct.unpack_from("i", answer, _NLMSG.size)[0]
        if _NLMSG.unpack_from(answer)[1] == _NLMSG_ERROR
        else 0
    )
    if number:
        raise OSError(number, f"netlink request {kind}: {os.strerror(number)}")
