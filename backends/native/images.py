"""Snapshots as files: criu(8) writes a whole process tree into a folder, and makes it again any number of times.

Memory and disk are of one instant: while the tree stands still, criu waits for the supervisor to clone the disk. The
memory of a large tree is not read when it is restored, but when it is touched (see `lazy`).
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sandbox_gym.backends.egress.network import Connection, connections, inside_that_of
from sandbox_gym.backends.shared.jobs import Jobs
from sandbox_gym.errors import SandboxError
from sandbox_gym.guest import syscalls
from sandbox_gym.network import Allow

from . import lazy, reservations, rpc, watches
from .criu_planner import Sight
from .disk import Layer, Store
from .node import Family, Node
from .spares import Parts
from .swrk import CONTROL_FD, ROOT, RUN, Task, Workplace

# No packet moves between the ends of a connection, of which one is written, or made, before the other: 10 ms.
_LOCKED: dict[str, rpc.Value] = {"network_lock": 2}
_LOST = re.compile(r"Warn .*?: (.*(?:queue is dropped|events will be dropped|queue of .* isn't empty).*)")


@dataclass(eq=False)
class Image:
    """A snapshot that criu has written. `control_inode`: of the socket that another is put in the place of."""

    id: str
    family: Family
    layers: tuple[Layer, ...]
    folder: Path
    control_inode: int
    memory_bytes: int
    handles: int = 0
    restoring: int = 0
    created: float = field(default_factory=time.time)
    network: Allow | None = None  # see `Node`; of one that was loaded, none
    outside: Sequence[Connection] = ()  # that its copies don't have
    branched_from: str | None = None  # the sandbox that it is of
    loaded: bool = False  # from an archive: its layers stay apart, to be stored once wherever they are used
    depth: int = -1  # its copies are no deeper than a first guest

    def disk_bytes(self) -> int:
        return sum(layer.used for layer in self.layers)

    def usage(self) -> dict[str, int]:
        """Of its memory, as it lies on the disk."""
        return {"oom_kills": 0, "memory_bytes": self.memory_bytes, "children": 0}

    def drop_unneeded(self) -> None:
        """Removes it where no handle, restore or pager needs it any more."""
        if not self.handles and not self.restoring:
            self.drop()

    def drop(self) -> None:
        for layer in self.layers:
            layer.release()
        shutil.rmtree(self.folder, ignore_errors=True)

    def row(self) -> dict[str, Any]:
        """What `list` shows."""
        return {
            "id": self.id,
            "name": self.id,
            "state": "snapshot",
            "age": time.time() - self.created,
            "parent": None,
            "branched_from": self.branched_from,
            "memory_bytes": self.memory_bytes,
            "pid": 0,
        }


class Imager:
    """Dumps sandboxes and restores images."""

    def __init__(self, jobs: Jobs, run_folder: Path, store: Store) -> None:
        self._jobs = jobs
        self._folder = run_folder / "disk"
        self.store = store
        self._workplace = Workplace(jobs, run_folder)
        self._count = 0
        # The environment for a lazy restore, where there can be one.
        self._lazily: Mapping[str, str] | None = None
        self._pagers: dict[int, lazy.Pager] = {}  # by the first process of the sandbox

    def dump(
        self,
        node: Node,
        image_id: str,
        look: Callable[[], Sight],
        timeout: float,
        done: Callable[[Image | None, str], None],
    ) -> None:
        """Writes a sandbox, which runs on, as an image. `done` hears the image, or None and the reason. `look` is
        called right before, and tells of its processes, or raises SandboxError for what can't be written.

        Raises BackendUnavailable, SandboxError, OSError.
        """
        self._prepare()

        def completed(reason: str) -> None:
            if not reason and node.pidfd < 0:
                reason = "it ended meanwhile"
            if not reason:
                try:
                    self._dump(node, image_id, look(), timeout, done)
                    return
                except (OSError, SandboxError) as error:
                    reason = str(error)
            done(None, reason)

        if not self.is_complete(node):
            self.complete(node, timeout, completed)
        else:
            self._dump(node, image_id, look(), timeout, done)

    def is_complete(self, node: Node) -> bool:
        """Whether all of its memory is there: that of a restored sandbox may come when it is touched."""
        return self._restored(node) is None

    def complete(self, node: Node, timeout: float, done: Callable[[str], object]) -> None:
        """Brings what is missing; `done` hears "", or why that failed: all that is missing, in the sandboxes that were
        forked from the same one too, must find room below their memory limits. Raises OSError.
        """
        restored = self._restored(node)
        if restored is None:
            done("")
        else:
            self._pagers[restored.pid].complete(_room(restored), timeout, done)

    def _restored(self, node: Node | None) -> Node | None:
        """The sandbox whose memory a pager brings: this, or one that it was forked from."""
        while node is not None and node.pid not in self._pagers:
            node = node.parent
        return node

    def _dump(
        self,
        node: Node,
        image_id: str,
        sight: Sight,
        timeout: float,
        done: Callable[[Image | None, str], None],
    ) -> None:
        folder = self._make_folder()
        image = Image(image_id, node.family, (), folder, node.control_inode, 0, network=node.network)
        mounts = [f"mnt[{target}]:{key}" for key, _, target in _externals(node.family)]
        options: dict[str, rpc.Value] = {
            "pid": node.pid,
            "leave_running": 1,
            "external": [f"unix[{node.control_inode}]", *mounts],
            **(_LOCKED if sight.connected else {}),
        }

        def stage(script: str, pid: int, log: Path) -> None:
            if script == "post-dump":  # the tree still stands still
                _check_losses(log)
                if node.outlet is not None:
                    image.outside = connections(node.pid, node.outlet.ends())
                image.layers = (self.store.clone(node.layer), *node.below)
                for layer in node.below:
                    layer.hold()

        def ended(reason: str, pid: int) -> None:
            if reason or not image.layers:
                image.drop()
                done(None, reason or "its disk was not captured")
                return
            try:
                reservations.uncount(folder)
            except (OSError, ValueError) as error:
                image.drop()
                done(None, f"its image can't be read: {error}")
                return
            image.memory_bytes = sum(file.stat().st_size for file in folder.glob("pages-*.img"))
            done(image, "")

        def begin() -> None:
            if sight.watched:
                Path(watches.NAME).write_bytes(watches.image(sight.watched))

        def broken() -> None:
            """Its processes may stand still for ever, or have criu's code in them."""
            node.kill("criu was killed while it took a snapshot, and had hold of its processes")

        try:
            self._workplace.start(Task(rpc.DUMP, folder, options, timeout, stage, ended, broken, begin))
        except BaseException:
            image.drop()
            raise

    def restore(
        self,
        image: Image,
        parts: Parts,
        root: int,
        timeout: float,
        connect: Callable[[int], None],
        done: Callable[[int, str], None],
        lost: Callable[[str], object] | None = None,
    ) -> None:
        """Makes the tree again, on another disk and under other limits. `connect` hears its first process, once that
        has a network namespace, and before there are sockets in it. `done` hears that process, or 0 and the reason;
        `lost`, later, why it can't go on, should its memory not come any more.

        Raises BackendUnavailable, OSError.
        """
        self._prepare()
        lazily = self._lazily if _may_be_lazy(image) else None
        pager: lazy.Pager | None = None
        abandon: Callable[[str], None] | None = None

        def start_pager(work: Path, folder: int) -> None:
            nonlocal pager
            if lazily is not None:
                pager = lazy.Pager(self._jobs, work, folder, let_go)
                image.restoring += 1

        def let_go(failure: str) -> None:
            self._let_go(image)
            if failure and abandon is not None:  # criu's tasks may wait for their memory for ever
                abandon(failure)

        def ended(reason: str, pid: int) -> None:
            image.restoring -= 1
            if pager is not None and not self._guard(pager, pid, lost):
                pager.stop()
            if lazily is not None and "userfaultfd" in reason:  # a criu that none can be preloaded into
                self._lazily = None
            done(pid, reason)

        def set_up(script: str, pid: int, log: Path) -> None:
            if script == "setup-namespaces":  # before sockets are made: connections on loopback need it
                inside_that_of(pid, syscalls.loopback_up)
                connect(pid)

        begin, options = _putting_in_place(image, parts, root), _restoring(image, lazily is not None)
        task = Task(
            rpc.RESTORE, image.folder, options, timeout, set_up, ended, begin=begin, environment=lazily
        )
        try:
            abandon = self._workplace.start(task, start_pager)
        except BaseException:
            if pager is not None:
                pager.stop()
            raise
        image.restoring += 1

    def _guard(self, pager: lazy.Pager, pid: int, lost: Callable[[str], object] | None) -> bool:
        """Ties a pager to its sandbox. False where there is none."""
        if not pid:
            return False
        try:
            pager.guard(pid, lost)
        except ProcessLookupError:
            return False
        self._pagers[pid] = pager
        return True

    def _let_go(self, image: Image) -> None:
        """A pager no longer reads from it."""
        image.restoring -= 1
        image.drop_unneeded()
        self._pagers = {pid: pager for pid, pager in self._pagers.items() if not pager.over}

    def _make_folder(self) -> Path:
        self._count += 1
        folder = self._folder / f"image-{self._count}"
        folder.mkdir()
        return folder

    def _prepare(self) -> None:
        """Raises BackendUnavailable where there is no criu, OSError."""
        if self._workplace.prepare():
            self._lazily = lazy.prepare(self._folder, self._workplace.run_fd)


def _externals(family: Family) -> list[tuple[str, str, str]]:
    """Key, host place and target of each mount that comes from outside."""
    attached = enumerate(family.base.attached)
    return [(f"{'d' if os.path.isdir(place) else 'f'}{i}", place, target) for i, (place, target) in attached]


def _restoring(image: Image, lazily: bool) -> dict[str, rpc.Value]:
    """What criu is told."""
    return {
        "root": ROOT,
        "inherit_fd": [rpc.inherit_fd(f"socket:[{image.control_inode}]", CONTROL_FD)],
        "external": [f"mnt[{key}]:{RUN}/{key}" for key, _, _ in _externals(image.family)],
        **(_LOCKED if any(image.folder.glob("tcp-stream-*.img")) else {}),
        **({"lazy_pages": 1} if lazily else {}),
    }


def _putting_in_place(image: Image, parts: Parts, root: int) -> Callable[[], None]:
    """What the process that becomes criu does before."""
    joins, control_fd = list(parts.group.join_fds), parts.theirs.fileno()

    def begin() -> None:
        for fd in joins:
            os.write(fd, b"0")
        syscalls.unshare(syscalls.CLONE_NEWCGROUP)
        syscalls.move_mount(root, ROOT)
        for key, source, _ in _externals(image.family):
            _show(source, f"{RUN}/{key}")
        os.dup2(control_fd, CONTROL_FD)  # last: any of the others may have had that number
        os.set_inheritable(CONTROL_FD, True)

    return begin


def _may_be_lazy(image: Image) -> bool:
    limit = image.family.spec.limits.memory_bytes
    roomy = limit is None or limit >= lazy.ROOM * image.memory_bytes
    return roomy and image.memory_bytes >= lazy.FROM_BYTES


def _room(node: Node) -> int:
    """Bytes that a sandbox and those that were forked from it have below their memory limits."""
    limit = node.family.spec.limits.memory_bytes
    if limit is None:
        return sys.maxsize
    own = max(0, limit - node.group.memory_bytes() + node.group.droppable_bytes())
    return own + sum(_room(child) for child in node.children)


def _show(source: str, target: str) -> None:
    """Mounts it again where the tree's own root, nobody on the host, may look it up."""
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        Path(target).touch()
    syscalls.move_mount(syscalls.open_tree(source, recursive=True), target)


def _check_losses(log: Path) -> None:
    """Raises OSError for what criu saw, and left out."""
    lost = _LOST.search(log.read_text(errors="replace"))
    if lost:
        raise OSError(errno.EBUSY, f"criu would lose some: {lost[1]}")
