"""A guest process and what it holds: as a live sandbox, or frozen as a snapshot that copies hang from.

A copy's pid namespace lies inside its origin's, and the kernel kills a namespace with its first process: so a node
lives as long as anything below it does, and goes when nothing needs it.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sandbox_gym.api import SandboxSpec
from sandbox_gym.backends.egress.gateway import Outlet
from sandbox_gym.network import Allow

from .cgroups import Group
from .disk import Layer
from .overlay import Base
from .rootfs import Rootfs
from .spares import Userns


@dataclass(frozen=True)
class Family:
    """What every copy of one created sandbox shares."""

    spec: SandboxSpec
    rootfs: Rootfs
    base: Base


@dataclass(eq=False)
class Node:
    """`id`, `name`: of the sandbox, or of the snapshot once `frozen`. `depth`: pid namespaces below the first guest."""

    id: str
    name: str
    family: Family
    parent: Node | None
    layer: Layer
    below: tuple[Layer, ...]  # frozen layers under this node's own, newest first
    group: Group
    control: socket.socket  # the host's end; the client has a duplicate of a live sandbox's
    control_inode: int  # of the guest's end, to know it among the guest's descriptors
    disk_fd: int  # of the whole overlay mount
    depth: int
    userns: Userns
    pid: int = 0
    pidfd: int = -1
    frozen: bool = False
    handles: int = 0  # references that clients hold on a snapshot
    children: set[Node] = field(default_factory=set)
    created: float = field(default_factory=time.time)
    dies_at: float | None = None  # monotonic
    origin: str | None = None  # the snapshot that this sandbox came from
    branched_from: str | None = None  # the sandbox that this one, or this snapshot, was taken of
    reason: str = ""  # why it was killed, when it was
    network: Allow | None = None  # what it, and what is restored from it, may reach
    outlet: Outlet | None = None
    on_exit: list[Callable[[], object]] = field(default_factory=list)
    _disk_frozen: bool = False

    @property
    def layers(self) -> tuple[Layer, ...]:
        """What a copy of this node stands on, newest first."""
        return (self.layer, *self.below)

    def freeze_disk(self) -> None:
        """Before the first copy; what was written since a thaw is taken in then."""
        if not self._disk_frozen:
            self.layer.freeze()
            self._disk_frozen = True

    def thaw_disk(self) -> None:
        """The sandbox goes on: no copy came to be."""
        self._disk_frozen = False
        self.layer.thaw()

    def disk_bytes(self) -> int:
        """What its frozen layers hold."""
        return sum(layer.used for layer in self.layers)

    def release_layers(self) -> None:
        """It stands on none of them any more."""
        for layer in self.layers:
            layer.release()

    def usage(self) -> dict[str, int]:
        """Of its memory, by its control group, and how many processes hang from it."""
        return {
            "oom_kills": self.group.oom_kills(),
            "memory_bytes": self.group.memory_bytes(),
            "children": len(self.children),
        }

    def arrived(self, pid: int) -> None:
        """The process is there: it gets a descriptor that outlives its number."""
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)

    def is_confined(self) -> bool:
        """Whether the process is in its control group, as it was told to be first of all."""
        try:
            return self.group.holds(self.pid)
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """Gives up its descriptors. Idempotent."""
        self.close_network()
        self.control.close()
        for fd in (self.pidfd, self.disk_fd):
            if fd >= 0:
                os.close(fd)
        self.pidfd = self.disk_fd = -1

    def close_network(self) -> None:
        """It reaches nothing any more."""
        if self.outlet is not None:
            self.outlet.close()

    def kill(self, reason: str) -> None:
        self.reason = self.reason or reason
        if self.pidfd >= 0:
            try:
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def row(self) -> dict[str, Any]:
        """What `list` shows."""
        return {
            "id": self.id,
            "name": self.name,
            "state": "snapshot" if self.frozen else "running",
            "age": time.time() - self.created,
            "parent": self.origin,
            "branched_from": self.branched_from,
            "memory_bytes": self.group.memory_bytes(),
            "pid": self.pid,
        }
