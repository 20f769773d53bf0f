"""How the supervisor starts: its file systems, its control groups, its loop."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NoReturn

from sandbox_gym.backends.egress.gateway import Gateway
from sandbox_gym.backends.native import cgroups, disk
from sandbox_gym.backends.shared import janitor, registry
from sandbox_gym.backends.shared.desk import Desk
from sandbox_gym.backends.shared.jobs import Jobs
from sandbox_gym.backends.shared.loop import Loop
from sandbox_gym.guest import syscalls

from . import wires
from .engine import Engine
from .population import Population
from .supervisor import Supervisor


def main() -> NoReturn:
    """`argv`: the lifeline's descriptor, the run folder, the cap on live sandboxes, the path of runsc, the folder under
    which images lie.
    """
    cap, runsc = int(sys.argv[3]), sys.argv[4]
    images = Path(sys.argv[5]) / f"{registry.CGROUP_PREFIX}{Path(sys.argv[2]).name}"
    hierarchy = cgroups.find()
    janitor.run(
        lambda folder: _supervise(folder, images, hierarchy, cap, runsc),
        groups=[str(path) for path in hierarchy.roots.values()],
        mounts=["base"],
        scratch=images,
    )


def _supervise(
    folder: Path, images: Path, hierarchy: cgroups.Hierarchy, cap: int, runsc: str
) -> janitor.Service:
    images.mkdir(mode=0o700)
    (folder / "base").mkdir()
    syscalls.mount("sandbox-gym", str(folder / "base"), "tmpfs", syscalls.MS_NOSUID, "mode=755")
    jobs = Jobs(Loop())
    # runsc would set what there is to set of its network, which from Linux 6.11 on fails here.
    syscalls.mount("sandbox-gym", "/proc/sys/net", "tmpfs", syscalls.MS_NOSUID, "mode=755")
    groups, gateway = cgroups.Groups(hierarchy, folder.name), Gateway(jobs, wires.PLACE)
    engine = Engine(jobs, groups, gateway, runsc, folder, images)
    guests = Population(engine, cap)
    unenforced = [name for name, c in cgroups.LIMITS.items() if c not in hierarchy.roots and name != "pids"]
    supervisor = Supervisor(folder, engine, guests, unenforced)
    desk = Desk(jobs.loop, supervisor, _kind_of)
    return janitor.Service({"unenforced": unenforced}, jobs.loop, desk.accept, supervisor.run)


def _kind_of(error: Exception) -> str:
    return "LimitExceeded" if isinstance(error, OSError) and disk.is_full(error) else ""
