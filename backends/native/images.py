"""Snapshots as files: criu(8) writes a whole process tree into a folder, and makes it again any number of times.

Each run of criu is a job in a mount namespace of its own, whose /run is a tmpfs that all runs share: there criu keeps
what it found out about the kernel, which takes it 40 ms otherwise, and there a restored root is mounted. Memory and
disk are of one instant: while the tree stands still, criu waits for the supervisor to clone the disk.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import select
import shutil
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sandbox_gym.api import Limits
from sandbox_gym.guest import syscalls

from . import criu, rpc, watches
from .criu_planner import Sight
from .disk import Layer, Store, used_bytes
from .jobs import TIMED_OUT, Jobs
from .merge import merge
from .network import bring_loopback_up
from .node import Family, Node
from .spares import Parts

_RUN = "/run"
_ROOT = f"{_RUN}/root"  # where a restored tree's root is mounted, for criu alone
_CONTROL_FD = 100
_NO_LIMITS = Limits(None, None, None, None)
_COMMON: dict[str, rpc.Value] = {
    "log_level": 2,  # warnings: of what it leaves out
    "log_file": "log",
    "notify_scripts": 1,
    "manage_cgroups_mode": 0,  # ignore: a restored tree stays in the group that its criu joined
    "network_lock": 3,  # none
    "empty_ns": syscalls.CLONE_NEWNET,
    "tcp_established": 1,
    "file_locks": 1,
    "ghost_limit": 1 << 30,  # bytes of a file that is open but deleted
    "link_remap": 1,  # for one that has another name, or lies below
}
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
    handles: int = 1
    restoring: int = 0
    created: float = field(default_factory=time.time)
    depth: int = -1  # its copies are no deeper than a first guest

    def disk_bytes(self) -> int:
        return sum(layer.used for layer in self.layers)

    def usage(self) -> dict[str, int]:
        """Of its memory, as it lies on the disk."""
        return {"oom_kills": 0, "memory_bytes": self.memory_bytes, "children": 0}

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
            "memory_bytes": self.memory_bytes,
            "pid": 0,
        }


class Imager:
    """Dumps sandboxes and restores images."""

    def __init__(self, jobs: Jobs, run_folder: Path, store: Store) -> None:
        self._jobs = jobs
        self._run_folder = run_folder
        self._store = store
        self._count = 0
        self._run_fd = -1
        self._program = ""

    def dump(
        self,
        node: Node,
        image_id: str,
        sight: Sight,
        timeout: float,
        done: Callable[[Image | None, str], None],
    ) -> None:
        """Writes a sandbox, which runs on, as an image. `done` hears the image, or None and the reason. `sight`: what a
        look at its processes has shown.

        Raises BackendUnavailable, OSError.
        """
        self._prepare()
        folder = self._make_folder()
        image = Image(image_id, node.family, (), folder, node.control_inode, 0)
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
                image.layers = (self._store.clone(node.layer), *node.below)
                for layer in node.below:
                    layer.hold()

        def ended(reason: str, pid: int) -> None:
            if reason or not image.layers:
                image.drop()
                done(None, reason or "its disk was not captured")
                return
            image.memory_bytes = sum(file.stat().st_size for file in folder.glob("pages-*.img"))
            done(image, "")

        def begin() -> None:
            if sight.watched:
                Path(watches.NAME).write_bytes(watches.image(sight.watched))

        self._run(rpc.DUMP, folder, options, timeout, stage, ended, begin)

    def restore(
        self, image: Image, parts: Parts, root: int, timeout: float, done: Callable[[int, str], None]
    ) -> None:
        """Makes the tree again, on another disk and under other limits. `done` hears the pid of its first process, or 0
        and the reason. Raises BackendUnavailable, OSError.
        """
        options: dict[str, rpc.Value] = {
            "root": _ROOT,
            "inherit_fd": [rpc.inherit_fd(f"socket:[{image.control_inode}]", _CONTROL_FD)],
            "external": [f"mnt[{key}]:{_RUN}/{key}" for key, _, _ in _externals(image.family)],
            **(_LOCKED if any(image.folder.glob("tcp-stream-*.img")) else {}),
        }
        joins, control_fd = list(parts.group.join_fds), parts.theirs.fileno()

        def begin() -> None:
            for fd in joins:
                os.write(fd, b"0")
            syscalls.unshare(syscalls.CLONE_NEWCGROUP)
            syscalls.move_mount(root, _ROOT)
            for key, source, _ in _externals(image.family):
                _show(source, f"{_RUN}/{key}")
            os.dup2(control_fd, _CONTROL_FD)  # last: any of the others may have had that number
            os.set_inheritable(_CONTROL_FD, True)

        def stage(script: str, pid: int, log: Path) -> None:
            if script == "setup-namespaces":  # before sockets are made: connections on loopback need it
                bring_loopback_up(pid)

        def ended(reason: str, pid: int) -> None:
            image.restoring -= 1
            done(pid, reason)

        self._run(rpc.RESTORE, image.folder, options, timeout, stage, ended, begin)
        image.restoring += 1

    def _run(
        self,
        kind: int,
        folder: Path,
        options: dict[str, rpc.Value],
        timeout: float,
        stage: Callable[[str, int, Path], None],
        done: Callable[[str, int], None],
        begin: Callable[[], None],
    ) -> None:
        """A run of criu. `stage` acts at each of its stages, while it waits, with the tree's first pid and criu's log.
        `begin`: what its process does before it becomes criu, in criu's working folder.
        """
        self._prepare()
        work = self._make_work()
        # criu opens them by these numbers, as this process's.
        fds = [os.open(folder, os.O_RDONLY), os.open(work, os.O_RDONLY, dir_fd=self._run_fd)]
        place = Path(f"/proc/self/fd/{fds[1]}")
        log = place / "log"
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        failure = ""
        open_ = True

        def body() -> None:
            os.dup2(
                os.open(log, os.O_WRONLY | os.O_CREAT, 0o600), 2
            )  # what goes wrong before there is a criu
            self._enter()
            socket_fd = fcntl.fcntl(theirs, fcntl.F_DUPFD, _CONTROL_FD + 1)  # out of the way of `begin`
            os.chdir(place)
            begin()
            os.execve(self._program, [self._program, "swrk", str(socket_fd)], {"PATH": os.defpath})

        def end(reason: str, pid: int) -> None:
            nonlocal open_
            if not open_:
                return
            open_ = False
            self._jobs.loop.unwatch(ours.fileno())
            ours.close()
            for fd in fds:
                os.close(fd)
            shutil.rmtree(f"/proc/self/fd/{self._run_fd}/{work}", ignore_errors=True)
            done(reason, pid)

        def spoken() -> bool:
            """False when criu has closed its end: its exit code is on the way, and tells more."""
            nonlocal failure
            try:
                said = rpc.receive(ours)
                if said["kind"] != rpc.NOTIFY:
                    pid = said.get("pid", 0)
                    # A tree that ends at once is a success to criu, without a pid.
                    good = said["success"] and (kind == rpc.DUMP or pid > 0)
                    end("" if good else failure or f"criu failed: {_first_error(log)}", pid)
                    return True
                try:
                    stage(said["script"], said["pid"], log)
                except OSError as error:
                    failure = str(error)
                ours.send(rpc.notified(success=not failure))
            except (EOFError, ValueError, OSError):
                self._jobs.loop.unwatch(ours.fileno())
                return False
            return True

        def ended(code: int) -> None:
            # What it said last may not have been read yet.
            while open_ and code != TIMED_OUT and select.select([ours], [], [], 0)[0] and spoken():
                pass
            how = f"did not end within {timeout:g} s" if code == TIMED_OUT else f"ended with {code}"
            end(f"criu {how}: {_first_error(log)}", 0)

        self._jobs.start(body, timeout, ended)
        theirs.close()
        self._jobs.loop.watch(ours.fileno(), spoken)
        ours.send(rpc.request(kind, {**_COMMON, **options, "images_dir_fd": fds[0], "work_dir_fd": fds[1]}))

    def flatten(self, image: Image, timeout: float, done: Callable[[str], None]) -> None:
        """Merges its layers into one; `done` hears "", or why that failed. Raises OSError."""
        merged = self._store.make(_NO_LIMITS, 0)
        merged.lower = f"{merged.folder}/f"
        os.mkdir(merged.lower)
        lowers = [layer.lower for layer in image.layers if layer.lower is not None]
        count = Path(merged.folder) / "used"

        def body() -> None:
            merge(lowers, f"{merged.folder}/f")
            count.write_text(str(used_bytes(f"{merged.folder}/f")))

        def ended(code: int) -> None:
            if code:
                merged.release()
                done(f"its layers could not be merged ({code})")
                return
            merged.used = int(count.read_text())
            merged.count_inodes()
            layers, image.layers = image.layers, (merged,)
            for layer in layers:
                layer.release()
            done("")

        self._jobs.start(body, timeout, ended)

    def _make_work(self) -> str:
        """A folder for one run's log, on the tmpfs."""
        self._count += 1
        os.mkdir(f"w{self._count}", dir_fd=self._run_fd)
        return f"w{self._count}"

    def _make_folder(self) -> Path:
        self._count += 1
        folder = self._run_folder / "disk" / f"image-{self._count}"
        folder.mkdir()
        return folder

    def _prepare(self) -> None:
        """The tmpfs that is /run for all runs of criu. Raises BackendUnavailable where there is no criu."""
        self._program = criu.find().path
        if self._run_fd >= 0:
            return
        context = syscalls.fsopen("tmpfs")
        try:
            syscalls.fsconfig_string(context, "mode", "755")
            syscalls.fsconfig_create(context)
            self._run_fd = syscalls.fsmount(context)
        finally:
            os.close(context)
        for name in ("root", "tmp"):
            os.mkdir(name, dir_fd=self._run_fd)

    def _enter(self) -> None:
        """In a job's process: a mount namespace with that /run, where only our own folder is as it was."""
        ours = syscalls.open_tree(str(self._run_folder), recursive=True)
        run = syscalls.open_tree("", dfd=self._run_fd)
        syscalls.unshare(syscalls.CLONE_NEWNS)
        syscalls.move_mount(
            syscalls.open_tree("tmp", dfd=run), "/tmp"
        )  # criu leaves folders there when killed
        syscalls.move_mount(run, _RUN)
        self._run_folder.mkdir(parents=True, exist_ok=True)
        syscalls.move_mount(ours, str(self._run_folder))
        null = os.open("/dev/null", os.O_RDWR)
        for fd in (0, 1):
            os.dup2(null, fd)


def _externals(family: Family) -> list[tuple[str, str, str]]:
    """Key, host place and target of each mount that comes from outside."""
    attached = enumerate(family.base.attached)
    return [(f"{'d' if os.path.isdir(place) else 'f'}{i}", place, target) for i, (place, target) in attached]


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


def _first_error(log: Path) -> str:
    """Why criu gave up, by its log: the first error is the cause, later ones follow from it."""
    try:
        with open(log, errors="replace") as file:
            found = re.findall(r"Error(?: \([^)]*\))?: (.*)", file.read(1 << 20))
    except OSError:
        found = []
    # Not being allowed more descriptors than the hard limit is what it complains of at each start.
    return next((line for line in found if "RLIMIT_NOFILE" not in line), "it did not say why")
