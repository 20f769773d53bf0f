"""A container's control groups, found by its first process: what it uses, and whether it stands still."""

from __future__ import annotations

from pathlib import Path

from sandbox_gym.errors import BackendUnavailable

_ROOT = Path("/sys/fs/cgroup")


class Groups:
    """`pid`: of the container's first process, as this host numbers it. Raises BackendUnavailable where it is none of
    this host's: the daemon then runs elsewhere.
    """

    def __init__(self, container: str, pid: int) -> None:
        self.pid = pid
        self._folders: dict[str, Path] = {}  # by controller; "" for all of v2
        try:
            lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
        except OSError:
            lines = []
        for line in lines:
            _, controllers, path = line.split(":", 2)
            if container not in path:
                continue
            for controller in controllers.split(","):
                root = _ROOT / controller if controller else _ROOT
                self._folders[controller] = root / path.lstrip("/")
        if not self._folders:
            raise BackendUnavailable(
                f"container {container[:12]} is no process of this host: the docker daemon must run on this machine, "
                "outside of any container"
            )

    def memory_bytes(self) -> int:
        return int(self._read("memory", "memory.usage_in_bytes", "memory.current") or 0)

    def oom_kills(self) -> int:
        """So far, by its memory limit."""
        return _field(self._read("memory", "memory.oom_control", "memory.events"), "oom_kill")

    def processes(self) -> int:
        return len(self._read("memory", "cgroup.procs", "cgroup.procs").split())

    def is_frozen(self) -> bool:
        state = self._read("freezer", "freezer.state", "cgroup.events")
        return state.strip() == "FROZEN" or _field(state, "frozen") == 1

    def _read(self, controller: str, first: str, second: str) -> str:
        """A file of version 1's or 2's; "" once the container is gone."""
        folder = self._folders.get(controller)
        file = folder / first if folder is not None else self._folders.get("", _ROOT) / second
        try:
            return file.read_text()
        except OSError:
            return ""


def _field(text: str, name: str) -> int:
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0
