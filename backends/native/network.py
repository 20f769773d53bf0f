"""What the supervisor does in a guest's network namespace: it enters, acts, and comes back."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

from sandbox_gym.guest import syscalls


@contextlib.contextmanager
def network_of(pid: int) -> Iterator[None]:
    """This process is in the network namespace of `pid` for a while. Raises OSError."""
    own = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        theirs = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            syscalls.setns(theirs, syscalls.CLONE_NEWNET)
        finally:
            os.close(theirs)
        try:
            yield
        finally:
            syscalls.setns(own, syscalls.CLONE_NEWNET)
    finally:
        os.close(own)


def bring_loopback_up(pid: int) -> None:
    with network_of(pid):
        syscalls.loopback_up()


def socket_pair(pid: int) -> tuple[socket.socket, socket.socket]:
    """A pair of stream sockets that criu finds where it looks for those of `pid`."""
    with network_of(pid):
        return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
