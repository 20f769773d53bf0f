"""Sockets, interfaces, shared memory; priority."""

from __future__ import annotations

import glob
import os
import socket
import struct

from .words import (
    CONTAINED,
    DENIALS,
    POSSIBLE,
    REFUSED,
    Known,
    Outcome,
    attempt,
    libc,
    reading,
    shared,
    tried,
)


@attempt("abstract sockets of the host and of others")
def _(known: Known) -> Outcome:
    for name in known["abstract"]:
        with socket.socket(socket.AF_UNIX) as sock:
            if sock.connect_ex("\0" + name) == 0:
                return POSSIBLE, name
    return REFUSED, "none can be connected to"


@attempt("shared memory of the host and of others")
def _(known: Known) -> Outcome:
    found = [key for key in known["shm"] if libc.shmget(key, 1, 0) != -1]
    return (
        (POSSIBLE, str(found))
        if found
        else reading(glob.glob("/dev/shm/*") + glob.glob("/dev/mqueue/*"), known)
    )


@attempt("servers on the host's loopback and other addresses")
def _(known: Known) -> Outcome:
    for host, port in known["servers"]:
        with socket.socket() as sock:
            sock.settimeout(2)
            if sock.connect_ex((host, port)) == 0:
                return POSSIBLE, f"{host}:{port}"
    return REFUSED, "none can be connected to"


@attempt("names, by the host's resolver")
def _(known: Known) -> Outcome:
    return tried(lambda: socket.getaddrinfo(socket.gethostname() + ".example.org", 80), POSSIBLE)


@attempt("network interfaces of the host")
def _(known: Known) -> Outcome:
    found = {name for _, name in socket.if_nameindex()}
    shared = found & set(known["interfaces"]) - {"lo"}
    return (POSSIBLE if shared else CONTAINED), ", ".join(sorted(found))


@attempt("raw sockets")
def _(known: Known) -> Outcome:
    return tried(lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1).close(), CONTAINED)


@attempt("packet sockets")
def _(known: Known) -> Outcome:
    return tried(lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0x300).close(), CONTAINED)


@attempt("sockets to the hypervisor (vsock)")
def _(known: Known) -> Outcome:
    """Made, and connected to nothing: no namespace separates them."""
    return tried(lambda: socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM).close(), shared(known))


@attempt("new network interfaces, by netlink")
def _(known: Known) -> Outcome:
    def add() -> None:
        attributes = struct.pack("HH8s", 12, 3, b"probe0\0\0") + struct.pack("HHHH4s", 16, 18, 10, 1, b"dumm")
        body = struct.pack("BxHiII", 0, 0, 0, 0, 0) + attributes
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as sock:
            sock.settimeout(5)
            sock.send(struct.pack("IHHII", 16 + len(body), 16, 0x605, 1, 0) + body)
            code = -struct.unpack_from("i", sock.recv(4096), 16)[0]
        if code in DENIALS:
            raise OSError(code, os.strerror(code))

    return tried(add, CONTAINED)


@attempt("priority over everybody (nice, real time)")
def _(known: Known) -> Outcome:
    def rise() -> None:
        try:
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        except OSError:
            os.setpriority(os.PRIO_PROCESS, 0, -20)

    def run() -> int:
        child = os.fork()
        if child == 0:
            os._exit(0 if tried(rise, POSSIBLE)[0] == POSSIBLE else 1)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    return (shared(known), "granted") if run() == 0 else (REFUSED, "neither")
