"""How the supervisor starts: its file systems, its control groups, its loop."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

from sandbox_gym.backends.egress.gateway import Gateway
from sandbox_gym.backends.shared import janitor
from sandbox_gym.backends.shared.desk import Desk
from sandbox_gym.backends.shared.jobs import Jobs
from sandbox_gym.backends.shared.loop import Loop
from sandbox_gym.guest import syscalls

from . import cgroups, criu, disk
from .copies import CopyFailed, Maker
from .images import Imager
from .spares import Spares, Userns
from .spawn import make_userns
from .supervisor import Supervisor

_FIRST_ID = 1 << 30  # user and group ids of guests, far from any real account
_ID_COUNT = 1 << 16


def main() -> NoReturn:
    """`argv`: the lifeline's descriptor, the run folder, the cap on live sandboxes."""
    cap = int(sys.argv[3])
    hierarchy = cgroups.find()
    privileged = os.geteuid() == 0
    janitor.run(
        lambda folder: _supervise(folder, cap, hierarchy, privileged),
        groups=[str(path) for path in hierarchy.roots.values()],
        mounts=["base", "disk"],
    )


def _supervise(folder: Path, cap: int, hierarchy: cgroups.Hierarchy, privileged: bool) -> janitor.Service:
    (folder / "base").mkdir()
    syscalls.mount("sandbox-gym", str(folder / "base"), "tmpfs", syscalls.MS_NOSUID, "mode=755")
    store = _store(folder, privileged)
    first = _FIRST_ID if privileged else 0
    userns = Userns(make_userns(f"0 {first} {_ID_COUNT if privileged else 1}"))
    groups = cgroups.Groups(hierarchy, folder.name)
    unenforced = [name for name, c in cgroups.LIMITS.items() if c not in hierarchy.roots]
    jobs = Jobs(Loop())
    imager = Imager(jobs, folder, store)
    maker = Maker(Spares(store, groups, first), userns, imager, Gateway(jobs))
    supervisor = Supervisor(
        folder, jobs, maker, imager, userns.fd, privileged=privileged, cap=cap, unenforced=unenforced
    )
    desk = Desk(jobs.loop, supervisor, _kind_of)
    facts = {"disk": store.kind, "unenforced": unenforced, "any_depth": criu.installed()}
    return janitor.Service(facts, jobs.loop, desk.accept, supervisor.run)


def _kind_of(error: Exception) -> str:
    if isinstance(error, CopyFailed):
        return "SnapshotError"
    return "LimitExceeded" if isinstance(error, OSError) and disk.is_full(error) else ""


def _store(folder: Path, privileged: bool) -> disk.Store:
    if not privileged:
        return disk.TmpfsStore()
    place = folder / "disk"
    place.mkdir()
    return disk.BtrfsStore(place)
