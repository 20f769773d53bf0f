"""Parts of a sandbox that can be made before anyone asks: layer, control group, network namespace, socket.

They are most of what a restore would otherwise wait for. The supervisor makes them when it has nothing else to do.
"""

from __future__ import annotations

import array
import contextlib
import gc
import os
import socket
from collections import deque
from dataclasses import dataclass
from typing import NoReturn

from sandbox_gym.api import Limits
from sandbox_gym.guest import syscalls

from . import disk
from .cgroups import Group, Groups
from .disk import Layer, Store

_KEPT = 8  # of each part; a burst beyond them makes its own
_NETWORKS_KEPT = 8  # of network namespaces; the kernel takes long for one when it ends others


@dataclass
class Parts:
    layer: Layer
    group: Group
    control: socket.socket  # the host's end
    theirs: socket.socket  # the guest's end
    netns_fd: int
    disk_fd: int = -1  # of the overlay mount, once there is one
    below: tuple[Layer, ...] = ()  # what that stands on, newest first

    def discard(self) -> None:
        self.control.close()
        self.theirs.close()
        os.close(self.netns_fd)
        if self.disk_fd >= 0:
            os.close(self.disk_fd)
        self.group.remove()
        self.layer.release()


_Kind = tuple[Limits, "Userns"]


class Spares:
    def __init__(self, store: Store, groups: Groups, owner: int) -> None:
        self.store = store
        self.groups = groups
        self.owner = owner
        self._count = 0
        self._ready: dict[_Kind, deque[Parts]] = {}
        self._latest: _Kind | None = None
        self._above = 0

    def take(self, limits: Limits, userns: Userns, used: int, above: int) -> Parts:
        """Parts under these limits, of whose disk `used` bytes are taken by layers below, whose inode numbers go up to
        `above`. Raises OSError.
        """
        self._latest, self._above = (limits, userns), above
        waiting = self._ready.setdefault(self._latest, deque())
        parts = next((parts for parts in waiting if parts.layer.start >= above), None)
        if parts is not None:
            waiting.remove(parts)
        else:
            parts = self._make(limits, userns, above)
        if used:
            try:
                disk.limit(parts.layer, limits, used)
            except OSError:
                parts.discard()
                raise
        return parts

    def refill(self) -> bool:
        """Makes at most one more. False when there are enough."""
        if self._latest is None:
            return False
        waiting = self._ready[self._latest]
        if sum(parts.layer.start >= self._above for parts in waiting) >= _KEPT:
            return False
        if len(waiting) >= 2 * _KEPT:
            waiting.popleft().discard()
        waiting.append(self._make(*self._latest, self._above))
        for kind in [key for key in self._ready if key != self._latest]:  # that nobody uses now
            for parts in self._ready.pop(kind):
                parts.discard()
        return True

    def _make(self, limits: Limits, userns: Userns, above: int) -> Parts:
        self._count += 1
        layer = self.store.make(limits, self.owner, above)
        group = None
        try:
            group = self.groups.make(f"{self._count}", limits)
            netns, control, theirs = userns.network()
        except OSError:
            if group is not None:
                group.remove()
            layer.release()
            raise
        control.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        return Parts(layer, group, control, theirs, netns)


class Userns:
    """A user namespace that guests are in, as a descriptor: one for all, but that each guest which criu restores comes
    with one of its own.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._factory: NetnsFactory | None = None

    def network(self) -> tuple[int, socket.socket, socket.socket]:
        """See `NetnsFactory.take`. One that was killed is replaced."""
        if self._factory is None:
            self._factory = NetnsFactory(self.fd)
        try:
            return self._factory.take()
        except ConnectionError:
            self._factory = NetnsFactory(self.fd)
            return self._factory.take()

    def __del__(self) -> None:
        os.close(self.fd)


class NetnsFactory:
    """A process inside a user namespace that makes network namespaces with `lo` up, some ahead of need.

    A guest may only enter a network namespace that its own user namespace owns, and whoever enters that to make one
    can't come back: so it isn't the supervisor itself. The control socket's pair is made there too, since criu finds a
    guest's sockets in its network namespace only.
    """

    def __init__(self, userns_fd: int) -> None:
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            self._ours.close()
            _make_namespaces(userns_fd, theirs)
        theirs.close()
        for _ in range(_NETWORKS_KEPT):
            self._ours.send(b"1")

    def take(self) -> tuple[int, socket.socket, socket.socket]:
        """A network namespace that nothing is in, and a pair of stream sockets made there. Raises OSError when the
        kernel makes no more, ConnectionError when the process is gone.
        """
        block = b""
        for _ in range(1 + _NETWORKS_KEPT):  # a failure may be an old one, that of a kept one
            block, ancillary, _, _ = self._ours.recvmsg(64, socket.CMSG_SPACE(3 * 4), socket.MSG_CMSG_CLOEXEC)
            if not block:
                raise ConnectionError("the process that makes network namespaces is gone")
            with contextlib.suppress(ConnectionError):  # the next one notices
                self._ours.send(b"1")
            if block == b"ok":
                netns, control, theirs = array.array("i", ancillary[0][2])
                return netns, socket.socket(fileno=control), socket.socket(fileno=theirs)
        raise OSError(int(block), "no network namespace could be made")


def _make_namespaces(userns_fd: int, sock: socket.socket) -> NoReturn:
    gc.freeze()  # the supervisor's garbage would close descriptors under numbers that are this process's by then
    try:
        syscalls.setns(userns_fd, syscalls.CLONE_NEWUSER)
        for name in os.listdir("/proc/self/fd"):  # guests notice their end by sockets that must close with it
            if int(name) not in (1, 2, sock.fileno()):
                with contextlib.suppress(OSError):
                    os.close(int(name))
        while sock.recv(1):
            try:
                syscalls.unshare(syscalls.CLONE_NEWNET)
                syscalls.loopback_up()
                fd = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                sock.send(str(error.errno).encode())
                continue
            pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            made = array.array("i", [fd, *(end.fileno() for end in pair)])
            sock.sendmsg([b"ok"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, made)])
            os.close(fd)
            for end in pair:
                end.close()
    finally:
        os._exit(0)
