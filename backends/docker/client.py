"""The docker backend: containers of a daemon on this machine."""

from __future__ import annotations

import builtins
import contextlib
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

from sandbox_gym.api import Deviation, Live, SandboxSpec, Taken
from sandbox_gym.backends.shared import host_python
from sandbox_gym.errors import BackendUnavailable, SandboxDied, SandboxError, SnapshotError
from sandbox_gym.network import Allow, NetworkRecord

from . import owners
from .daemon import Daemon, Refused
from .keeping import Keeping
from .maker import TOLD, Maker
from .owners import Owner
from .population import Population
from .roots import Roots

# Copies in the making. On two cores 8 at once take 1.35 s, 4 at a time 1.47, 2 at a time 1.7.
_MOST_AT_ONCE = max(8, 2 * (os.cpu_count() or 1))
_LAYERS = 120  # of an image, at most: docker takes 125


class DockerBackend:
    """See `sandbox_gym.api.Backend`. `option`: the daemon's runtime for containers ("docker:runsc")."""

    name = "docker"
    deviations: Sequence[Deviation] = (
        Deviation("create.mounts_within_mounts", "of two mounts, none may lie within the other"),
        Deviation("limits.disk", "docker bounds disks only on btrfs, zfs, and xfs with project quotas"),
        Deviation("snapshot.saved_and_loaded", "checkpoints stay with their daemon"),
        Deviation("snapshot.budget_is_kept", "each container has its own limits, and all together none"),
    )
    any_depth = False
    rest_engine = "auto"

    def __init__(self, option: str | None = None) -> None:
        self._daemon = Daemon()
        self._pid = os.getpid()
        info = self._daemon.info()
        if option is not None and option not in info["Runtimes"]:
            raise BackendUnavailable(
                f"the docker daemon has no runtime {option!r}, but {', '.join(sorted(info['Runtimes']))}: add it under "
                '"runtimes" in /etc/docker/daemon.json, and restart the daemon'
            )
        self._owner = Owner.this()
        self._roots = Roots(self._daemon, self._owner)
        cap = int(os.environ.get("SANDBOX_GYM_MAX_SANDBOXES", "1024"))
        self._population = Population(self._daemon, cap)
        self._unreferenced: deque[str] = deque()  # snapshots whose last handle was garbage
        self._closed = False
        self._keeper = Keeping(self._daemon.url, self._owner.run)
        self._maker = Maker(self._daemon, self._owner, self._keeper, self._population, info, option)

    # ---- Backend --------------------------------------------------------------------------------------------------

    def create(self, spec: SandboxSpec, *, name: str | None, timeout: float) -> Live:
        until = time.monotonic() + timeout
        self._tend()
        spec = host_python.seen(spec)
        with self._population.room([name]):
            root = self._roots.get(spec, until)
            return self._maker.make(spec, root, None, spec.network, name, secrets.token_hex(6), until)

    def snapshot(
        self,
        live: Live,
        *,
        keep: bool,
        engine: str,
        settled: bool,
        obstacle: str | None = None,
        timeout: float,
        levels: int = 1,
    ) -> Taken:
        self._tend()
        box = self._population.get(live.id)
        if engine == "fork":
            raise SnapshotError(f"sandbox {box.name}: docker has no fork engine: leave engine= out")
        depth = 1 + (box.origin.depth if box.origin is not None else 0)
        if depth + levels - 1 > _LAYERS:
            raise SnapshotError(
                f"sandbox {box.name}: docker stacks at most {_LAYERS} snapshots: restore from an earlier one"
            )
        full = engine != "disk"
        if not full and self._maker.engine == "gvisor":
            raise SnapshotError(f"sandbox {box.name}: gVisor keeps the disk in its memory: leave scope= out")
        if full:
            self._maker.checkpoints.check()
            if not settled:
                raise SnapshotError(
                    f"sandbox {box.name}: a checkpoint needs a guest that has made itself ready"
                )
        shot = self._maker.capture(box, full, depth, timeout, keep=keep)
        self._population.keep(shot)
        if not keep:
            live.channel.close()
        why = "docker takes no others" if full else "the disk alone was asked for"
        return Taken(shot.id, self._maker.engine if full else "disk", why, _LAYERS - depth)

    def restore(
        self,
        snapshot_id: str,
        *,
        names: Sequence[str | None],
        timeout: float,
        replace: Live | None = None,
        network: Allow | Literal["same"] | None = "same",
    ) -> list[Live]:
        until = time.monotonic() + timeout
        self._tend()
        shot = self._population.shot(snapshot_id)
        allow = shot.network if network == "same" else network
        old = self._population.boxes.get(replace.id) if replace is not None else None

        def copy(name: str | None) -> Live:
            box_id = replace.id if replace is not None else secrets.token_hex(6)
            return self._maker.make(
                shot.spec, shot.root, shot, allow, old.name if old else name, box_id, until, old
            )

        with self._population.room(names, replace.id if replace is not None else None):
            return self._all(copy, names)

    def set_budget(self, *, memory: int | None, disk: int | None) -> None:
        if memory is not None or disk is not None:
            raise BackendUnavailable(
                "docker keeps no budget over containers: bound each, by memory= and disk="
            )

    def put_on_disk(self, snapshot_id: str, *, timeout: float) -> None:
        self._population.shot(snapshot_id)  # where a checkpoint is from the beginning

    def release(self, snapshot_id: str) -> None:
        self._population.release(snapshot_id)

    def release_later(self, snapshot_id: str) -> None:
        self._unreferenced.append(snapshot_id)

    def terminate(self, live: Live, reason: str | None = None) -> None:
        live.channel.close()
        box = self._population.boxes.get(live.id)
        if box is not None:
            self._maker.end(box, reason or "it was terminated")
            self._population.drop_images()

    def interrupt(self, live: Live) -> None:
        box = self._population.get(live.id)
        try:
            self._daemon.ask("POST", f"/containers/{box.container}/kill", params={"signal": "SIGINT"})
        except Refused as refused:
            raise SandboxDied(f"sandbox {box.name} is gone ({refused})") from None

    def death(self, live: Live) -> str:
        box = self._population.boxes.get(live.id)
        if box is not None and self._maker.deaths.code(box.container, TOLD) is None:
            self._maker.end(box, "")  # its output ended, and it has not
        box = box or self._population.dead(live.id)
        return self._maker.reason(box) if box is not None else "it is not known here"

    def usage(self, node_id: str) -> dict[str, int]:
        shot = self._population.shots.get(node_id)
        if shot is not None:
            copies = sum(box.origin is shot for box in builtins.list(self._population.boxes.values()))
            disk = self._size(shot.image) - self._size(shot.root.image) if shot.image else 0
            return {"memory_bytes": shot.memory_bytes, "disk_bytes": disk, "oom_kills": 0, "children": copies}
        box = self._population.get(node_id)
        groups = self._maker.groups(box)
        found = self._daemon.ask("GET", f"/containers/{box.container}/json", params={"size": 1})
        return {
            "memory_bytes": groups.memory_bytes(),
            "disk_bytes": int(found.get("SizeRw") or 0),
            "oom_kills": groups.oom_kills(),
            "children": max(0, groups.processes() - 1),
        }

    def network_log(self, live: Live) -> builtins.list[NetworkRecord]:
        box = self._population.get(live.id)
        found: builtins.list[NetworkRecord] = []
        after, more = 0, True
        while more:
            page = self._keeper.ask("records", container=box.container, after=after)
            for row in page["records"]:
                after = row.pop("n")
                found.append(NetworkRecord(**row))
            more = page["more"]
        return found

    def list(self) -> builtins.list[dict[str, Any]]:
        return [
            {
                "id": box.id,
                "name": box.name,
                "state": "running",
                "age": time.time() - box.created,
                "parent": box.origin.id if box.origin is not None else None,
                "memory_bytes": self._maker.groups(box).memory_bytes(),
                "pid": self._maker.groups(box).pid,
            }
            for box in builtins.list(self._population.boxes.values())
        ]

    def alive(self) -> bool:
        return not self._closed and self._keeper.alive()

    def close(self) -> None:
        """Ends every container of this client, and removes what was made for them. Idempotent."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        cleared = self._keeper.close()
        self._maker.deaths.close()
        if not cleared:  # it was killed
            with contextlib.suppress(SandboxError):  # the daemon, too: what it has is removed once it is back
                owners.remove_run(self._daemon, self._owner.run)

    # ---- small things -----------------------------------------------------------------------------------------------

    def _all(self, copy: Callable[[str | None], Live], names: Sequence[str | None]) -> builtins.list[Live]:
        """All or none, side by side."""
        if len(names) == 1:
            return [copy(names[0])]
        with ThreadPoolExecutor(min(len(names), _MOST_AT_ONCE)) as pool:
            made = [pool.submit(copy, name) for name in names]
        failures = [error for future in made if (error := future.exception()) is not None]
        if failures:
            for future in made:
                if future.exception() is None:
                    self.terminate(future.result())
            raise failures[0]
        return [future.result() for future in made]

    def _tend(self) -> None:
        """Before anything is made: what garbage has left goes. Raises SandboxDied where nothing more can be made."""
        if not self.alive():
            raise SandboxDied("the keeper of this process's containers is gone")
        while self._unreferenced:
            self._population.release(self._unreferenced.popleft())

    def _size(self, image: str) -> int:
        return int(self._daemon.ask("GET", f"/images/{image}/json")["Size"])
