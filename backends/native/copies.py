"""Sandboxes in the making: disk, socket and limits go ahead, the guest comes, then the client hears of it."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sandbox_gym.api import Limits
from sandbox_gym.backends.egress.gateway import Gateway
from sandbox_gym.backends.egress.network import changed_variables, end_connections, socket_pair, variables
from sandbox_gym.errors import SnapshotError
from sandbox_gym.guest import syscalls, wire
from sandbox_gym.guest.wire import HEADER, Op, Status
from sandbox_gym.network import Allow

from . import disk, overlay
from .images import Image, Imager
from .node import Family, Node
from .rootfs import WORKSPACE
from .spares import Parts, Spares, Userns
from .spawn import Order, spawn

_CRIU_PIDS = 16  # processes of its own, in the group of the tree that it makes
_CREDENTIALS = struct.Struct("3i")


class CopyFailed(Exception):
    """A guest did not come to be; the message says why."""


class CopyLate(CopyFailed):
    """It has not announced itself by its deadline."""


@dataclass(eq=False)
class Expected:
    """A node whose guest has not announced itself yet. `done` is called once, with the failure or None."""

    node: Node
    source: Node | None
    done: Callable[[Expected, CopyFailed | None], None]
    deadline: float


class Maker:
    """Puts a guest's parts together and starts it: from nothing, or as a copy."""

    def __init__(self, spares: Spares, userns: Userns, imager: Imager, gateway: Gateway) -> None:
        self.spares = spares
        self.gateway = gateway
        self._imager = imager
        self._userns = userns  # of first guests
        self._last: Node | None = None  # the snapshot restored last
        # The same, if it was the last before, too: a search goes from one snapshot to the other.
        self._hot: Node | None = None
        # The parts and the mounted disk of its next copy.
        self._prepared: tuple[Node, Parts, int] | None = None

    def first(self, family: Family, name: str | None) -> Node:
        """Starts a family's first guest. Raises OSError."""
        node, parts, root = self._assemble(family, None, name, family.spec.network)
        attached = attach(family)
        spec, rootfs = family.spec, family.rootfs
        order = Order(
            self._userns.fd,
            parts.netns_fd,
            parts.group.join_fds,
            root,
            attached,
            parts.theirs.fileno(),
            rootfs.python,
            rootfs.path,
            {**variables(spec.network), **spec.env},
            spec.workdir or WORKSPACE,
            "sandbox",
        )
        try:
            spawn(order)
        except OSError:
            self.discard(node)
            raise
        finally:
            _close(parts, root, attached)
        return node

    def copy(self, source: Node, name: str | None, allow: Allow | None) -> Node:
        """Asks a guest to clone itself. Raises OSError, CopyFailed, BackendUnavailable."""
        source.freeze_disk()
        self._hot = source if source is self._last else None
        self._last = source
        node, parts, root = self._assemble(source.family, source, name, allow)
        attached = attach(source.family)
        joins = parts.group.join_fds
        meta, _ = wire.encode(
            {"joins": len(joins), "attach": [target for _, target in attached], **_told(source, allow)}
        )
        fds = [parts.theirs.fileno(), root, parts.netns_fd, *joins, *(fd for fd, _ in attached)]
        try:
            wire.send(source.control, Op.CLONE, 0, 0, meta, fds=fds)
        except OSError as error:
            self.discard(node)
            raise CopyFailed(f"the origin's process is gone ({error.strerror})") from None
        finally:
            _close(parts, root, attached)
        return node

    def restore(
        self,
        image: Image,
        name: str | None,
        allow: Allow | None,
        timeout: float,
        done: Callable[[str], None],
    ) -> Node:
        """Has criu make a sandbox from an image; `done` hears "" when it runs, else why not. Raises OSError."""
        node, parts, root = self._assemble(image.family, image, name, None)
        node.network = allow
        limits = image.family.spec.limits
        node.group.set_pids(limits, 1 + _CRIU_PIDS)

        def connect(pid: int) -> None:
            if allow is not None and node.control.fileno() >= 0:  # it is still wanted
                netns = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
                try:
                    node.outlet = self.gateway.open(netns, allow)
                finally:
                    os.close(netns)

        def restored(pid: int, reason: str) -> None:
            node.group.set_pids(limits, 1)
            if pid and node.control.fileno() >= 0:
                try:
                    _take_over(node, pid, _told(image, allow))
                    if image.outside:
                        end_connections(pid, image.outside)
                except OSError as error:
                    reason = f"it ended at once ({error.strerror})"
            done(reason)

        try:
            self._imager.restore(image, parts, root, timeout, connect, restored, node.kill)
        except BaseException:
            self.discard(node)
            raise
        finally:
            _close(parts, root, [])
        return node

    def prepare(self) -> bool:
        """Makes one thing that the next requests are likely to need. False when all is there."""
        hot = self._hot
        ready = self._prepared is not None and self._prepared[0] is hot
        # Frozen: the disk of a sandbox that goes on after a refusal still changes.
        if hot is None or not hot.frozen or hot.pidfd < 0 or ready:
            return self.spares.refill()
        self.forget(None)
        parts, root = self._mount(hot.family, hot)
        self._prepared = hot, parts, root
        return True

    def forget(self, source: Node | None) -> None:
        """Gives up what was prepared for a snapshot that is gone (None: for any)."""
        if self._prepared is not None and source in (None, self._prepared[0]):
            _, parts, root = self._prepared
            self._prepared = None
            os.close(root)
            parts.discard()
        if source is self._hot:
            self._hot = None
        if source is self._last:
            self._last = None

    def _assemble(
        self, family: Family, source: Node | Image | None, name: str | None, allow: Allow | None
    ) -> tuple[Node, Parts, int]:
        if self._prepared is not None and self._prepared[0] is source:
            _, parts, root = self._prepared
            self._prepared = None
        else:
            parts, root = self._mount(family, source)
        inode = os.fstat(parts.theirs.fileno()).st_ino
        depth = source.depth + 1 if source is not None else 0
        node = Node(
            id="",
            name=name or "",
            family=family,
            parent=source if isinstance(source, Node) else None,
            layer=parts.layer,
            below=parts.below,
            group=parts.group,
            control=parts.control,
            control_inode=inode,
            disk_fd=parts.disk_fd,
            depth=depth,
            userns=source.userns if isinstance(source, Node) else self._userns,
        )
        for layer in parts.below:
            layer.hold()
        if isinstance(source, Node):
            source.children.add(node)
        node.network = allow
        if allow is not None:
            try:
                node.outlet = self.gateway.open(parts.netns_fd, allow)
            except BaseException:
                self.discard(node)
                _close(parts, root, [])
                raise
        return node, parts, root

    def _mount(self, family: Family, source: Node | Image | None) -> tuple[Parts, int]:
        limits = family.spec.limits
        used = source.disk_bytes() if source is not None else 0
        if isinstance(source, Image) and not source.loaded:
            parts = self._branch(source, limits, used)
        else:
            userns = source.userns if isinstance(source, Node) else self._userns
            below = source.layers if source is not None else ()
            above = max((layer.top for layer in below), default=0)
            parts = self.spares.take(limits, userns, used, above)
            parts.below = below
        try:
            lowers = [layer.lower for layer in parts.below if layer.lower is not None]
            root, parts.disk_fd = overlay.mount(parts.layer.upper, parts.layer.work, lowers, family.base)
        except OSError:
            parts.discard()
            raise
        return parts, root

    def _branch(self, image: Image, limits: Limits, used: int) -> Parts:
        """Parts whose layer goes on from the image's newest."""
        parts = self.spares.take(limits, self._userns, 0, 0)
        try:
            layer = self.spares.store.branch(image.layers[0], self.spares.owner)
            parts.layer.release()
            parts.layer, parts.below = layer, image.layers[1:]
            disk.limit(layer, limits, used)
        except (OSError, SnapshotError):
            parts.discard()
            raise
        return parts

    def discard(self, node: Node) -> None:
        """Undoes `_assemble` for a node whose guest never came."""
        node.close()
        node.group.remove()
        node.release_layers()
        if node.parent is not None:
            node.parent.children.discard(node)


def attach(family: Family) -> list[tuple[int, str]]:
    """Fresh clones of the family's read-only mounts."""
    return [(syscalls.open_tree(path, recursive=True), target) for path, target in family.base.attached]


def read_announcement(node: Node) -> None:
    """The guest's READY: whose process it is, by the kernel's word. Raises CopyFailed."""
    block, ancillary, _, _ = node.control.recvmsg(4096, socket.CMSG_SPACE(_CREDENTIALS.size))
    if not block:
        raise CopyFailed("the guest ended while it was being set up")
    pid = 0
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
            pid = _CREDENTIALS.unpack(payload[: _CREDENTIALS.size])[0]
    header = HEADER.unpack(block) if len(block) == HEADER.size else (0, 0, 0, 0, 0)
    if header[0] != Op.READY or header[1] != Status.OK or not pid:
        text = block.decode(errors="replace") if header[0] != Op.READY else "its set-up failed"
        raise CopyFailed(f"the guest could not be set up: {text}")
    node.control.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 0)
    try:
        node.arrived(pid)
    except ProcessLookupError:
        raise CopyFailed("the guest ended while it was being set up") from None


def read_refusal(source: Node) -> str:
    """What a guest that could not clone itself answers on its old socket."""
    try:
        source.control.setblocking(False)
        frame = wire.Connection(source.control, takes_fds=False).receive()
        info = wire.decode(frame.meta, frame.data)
    except (EOFError, OSError, wire.WireError):
        return "its process is gone"
    finally:
        source.control.setblocking(True)
    return str(info.get("message", "")) if isinstance(info, dict) else "it broke the protocol"


def _told(source: Node | Image, allow: Allow | None) -> dict[str, Any]:
    """What a copy hears of its network, where that is closed or opened."""
    changed = changed_variables(source.network, allow)
    return {"variables": changed} if changed else {}


def _take_over(node: Node, pid: int, told: dict[str, Any]) -> None:
    """A guest that criu has made goes on over a socket from its own network namespace, where the next dump finds it."""
    node.arrived(pid)
    node.userns = Userns(os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC))
    before = node.control
    node.control, theirs = socket_pair(pid)
    with before, theirs:
        node.control_inode = os.fstat(theirs.fileno()).st_ino
        wire.send(before, Op.ADOPT, 0, 0, wire.encode(told)[0], fds=[theirs.fileno()])


def _close(parts: Parts, root: int, attached: list[tuple[int, str]]) -> None:
    """What the guest has now, or will never have."""
    parts.theirs.close()
    parts.group.close_join()
    os.close(parts.netns_fd)
    os.close(root)
    for fd, _ in attached:
        os.close(fd)


def deadline_in(seconds: float) -> float:
    return time.monotonic() + seconds
