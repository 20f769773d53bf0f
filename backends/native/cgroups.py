"""cpu, memory and pids limits through control groups: v2 where it has the controllers, else v1 (cgroups(7)).

Each supervisor has a folder `sandbox-gym-<id>` in every hierarchy it uses and one group below it for each sandbox.
"""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from pathlib import Path

from sandbox_gym.api import Limits
from sandbox_gym.backends.shared.registry import CGROUP_PREFIX

LIMITS = {"cpus": "cpu", "memory": "memory", "pids": "pids"}  # the limit that each controller enforces
CONTROLLERS = tuple(LIMITS.values())
_PERIOD = 100_000  # microseconds, the kernel's default scheduling period


@dataclass(frozen=True)
class Hierarchy:
    """Where a supervisor may make groups. `roots` maps a controller to a folder; v2 has one folder for all."""

    version: int
    roots: dict[str, Path]


def find() -> Hierarchy:
    """What this process may use. Empty roots where it may use nothing (an ordinary user without delegation)."""
    v2 = _find_v2()
    if v2:
        return Hierarchy(2, dict.fromkeys(CONTROLLERS, v2))
    roots = {}
    for controller in CONTROLLERS:
        root = Path("/sys/fs/cgroup") / controller
        if (root / "cgroup.procs").exists() and os.access(root, os.W_OK):
            roots[controller] = root
    return Hierarchy(1, roots)


def _find_v2() -> Path | None:
    root = Path("/sys/fs/cgroup")
    if not (root / "cgroup.controllers").exists():
        return None
    own = root
    if os.geteuid() != 0:  # an ordinary user may only use what was delegated: its own group's parent
        with open("/proc/self/cgroup") as lines:
            path = next((line.split("::", 1)[1].strip() for line in lines if line.startswith("0::")), "/")
        own = (root / path.lstrip("/")).parent
    try:
        available = (own / "cgroup.controllers").read_text().split()
        if not set(CONTROLLERS) <= set(available) or not os.access(own, os.W_OK):
            return None
        _write(own / "cgroup.subtree_control", " ".join(f"+{name}" for name in CONTROLLERS))
    except OSError:
        return None
    return own


class Groups:
    """The groups of one supervisor."""

    def __init__(self, hierarchy: Hierarchy, supervisor_id: str) -> None:
        self.version = hierarchy.version
        self.folders = [
            root / f"{CGROUP_PREFIX}{supervisor_id}" for root in dict.fromkeys(hierarchy.roots.values())
        ]
        self._controllers = hierarchy.roots
        self._name = f"{CGROUP_PREFIX}{supervisor_id}"
        for folder in self.folders:
            folder.mkdir(exist_ok=True)
            if self.version == 2:
                _write(folder / "cgroup.subtree_control", " ".join(f"+{name}" for name in CONTROLLERS))
        # All sandboxes of a client together would weigh as much as one other process: let them weigh one for each core.
        cores = os.cpu_count() or 1
        if self.version == 2:
            _write(self.folders[0] / "cpu.weight", str(min(10_000, 100 * cores)))
        elif "cpu" in self._controllers:
            _write(self._controllers["cpu"] / self._name / "cpu.shares", str(min(262_144, 1024 * cores)))

    def resident_bytes(self) -> int | None:
        """Memory of all groups together that can't be dropped, shared pages once; None where nothing counts it.
        It is too much for some seconds after a group is gone: see `resident_bytes_now`.
        """
        root = self._controllers.get("memory")
        return self._resident(root / self._name) if root is not None else None

    def resident_bytes_now(self) -> int:
        """The same, group by group: the kernel puts off taking a dead one's from the sum."""
        root = self._controllers["memory"] / self._name
        found = 0
        for entry in os.scandir(root):
            with contextlib.suppress(OSError):  # it goes just now
                found += self._resident(Path(entry.path)) or 0 if entry.is_dir() else 0
        return found

    def _resident(self, group: Path) -> int | None:
        key = "anon " if self.version == 2 else "total_rss "
        for line in _read(f"{group}/memory.stat").splitlines():
            if line.startswith(key):
                return int(line.split()[1])
        return None

    def make(self, name: str, limits: Limits) -> Group:
        group = Group(
            self.version, {c: f"{root}/{self._name}/{name}" for c, root in self._controllers.items()}
        )
        group.make(limits)
        return group


class Group:
    """One sandbox's group in each hierarchy."""

    def __init__(self, version: int, folders: dict[str, str]) -> None:
        self._version = version
        self._by_controller = folders
        self._folders = list(dict.fromkeys(folders.values()))
        # What a guest writes "0" to, so that it joins by itself. Moving another process takes a lock whose first writer
        # waits for an RCU grace period (3 to 20 ms); on v1 a thread that moves itself, by `tasks`, takes none.
        self.join_fds: list[int] = []

    def make(self, limits: Limits) -> None:
        for folder in self._folders:
            os.mkdir(folder)
            name = "cgroup.procs" if self._version == 2 else "tasks"
            self.join_fds.append(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CLOEXEC))
        self.set_pids(limits, 1)  # the guest's own process is not the user's
        if limits.memory_bytes is not None:
            file = "memory.max" if self._version == 2 else "memory.limit_in_bytes"
            self._set("memory", file, str(limits.memory_bytes))
            if self._version == 2:
                self._set("memory", "memory.swap.max", "0", optional=True)
        if limits.cpus is not None:
            quota = max(1000, int(limits.cpus * _PERIOD))
            if self._version == 2:
                self._set("cpu", "cpu.max", f"{quota} {_PERIOD}")
            else:
                self._set("cpu", "cpu.cfs_quota_us", str(quota))

    def set_pids(self, limits: Limits, more: int) -> None:
        """The limit of processes, with room for some that are not the user's."""
        if limits.pids is not None:
            self._set("pids", "pids.max", str(limits.pids + more), optional=True)

    def close_join(self) -> None:
        while self.join_fds:
            os.close(self.join_fds.pop())

    def holds(self, pid: int) -> bool:
        """Whether the process is in every folder of the group."""
        return all(str(pid) in _read(f"{folder}/cgroup.procs").split() for folder in self._folders)

    def members(self) -> list[int]:
        """The processes in the group; empty when nothing can tell."""
        for folder in self._folders[:1]:
            return [int(line) for line in _read(f"{folder}/cgroup.procs").split()]
        return []

    def oom_kills(self) -> int:
        memory = self._by_controller.get("memory")
        if memory is None:
            return 0
        name = "memory.events" if self._version == 2 else "memory.oom_control"
        try:
            for line in _read(f"{memory}/{name}").splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
        except FileNotFoundError:  # the group is already gone
            pass
        return 0

    def memory_bytes(self) -> int:
        memory = self._by_controller.get("memory")
        if memory is None:
            return 0
        name = "memory.current" if self._version == 2 else "memory.usage_in_bytes"
        try:
            return int(_read(f"{memory}/{name}"))
        except FileNotFoundError:
            return 0

    def droppable_bytes(self) -> int:
        """Pages of files that count as its memory: the kernel drops them when it needs room."""
        memory = self._by_controller.get("memory")
        if memory is None:
            return 0
        try:
            rows = _read(f"{memory}/memory.stat").splitlines()
        except FileNotFoundError:
            return 0
        counts = dict(row.split() for row in rows)
        return int(counts["active_file"]) + int(counts["inactive_file"])

    def kill(self) -> None:
        """Whatever is in it; what that has just started may need another call."""
        for pid in self.members():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def remove(self) -> bool:
        """False when a process is still leaving it: call again."""
        self.close_join()
        for folder in list(self._folders):
            try:
                os.rmdir(folder)
            except FileNotFoundError:
                pass
            except OSError:
                return False
            self._folders.remove(folder)
        return True

    def _set(self, controller: str, file: str, value: str, optional: bool = False) -> None:
        folder = self._by_controller.get(controller)
        if folder is None:
            return
        try:
            _write(f"{folder}/{file}", value)
        except FileNotFoundError:
            if not optional:
                raise


def _read(path: str) -> str:
    """Four system calls, where a text file's `read` makes nine: several such files are read for each sandbox."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        blocks = []
        while block := os.read(fd, 1 << 16):
            blocks.append(block)
        return b"".join(blocks).decode()
    finally:
        os.close(fd)


def _write(path: str | Path, text: str) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)
