"""A guest's writable disk where its kernel is gVisor's, which bounds none that lies outside: a tmpfs of the limit's
size, as the upper layer of an overlay over the root file system, which is read-only. Done once, before the agent.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from .syscalls import (
    CLONE_NEWNS,
    MNT_DETACH,
    MS_BIND,
    MS_PRIVATE,
    MS_REC,
    PR_CAPBSET_DROP,
    capset,
    mount,
    pivot_root,
    prctl,
    umount2,
    unshare,
)

_PLACE = "/.sandbox-gym/disk"  # `bundle` makes it
_CAP_SYS_ADMIN = 21
_NO_LIMIT = 1 << 50  # bytes: without a number it would be half of the machine's memory


def enter(*, size: int | None, attached: Sequence[str], workdir: str) -> None:
    """Moves this process onto its own disk of `size` bytes. `attached`: mounts that keep their place, read-only.

    It needs CAP_SYS_ADMIN, and gives it up for good: what runs from here on can't mount. Raises OSError.
    """
    mount("disk", _PLACE, "tmpfs", 0, f"size={size or _NO_LIMIT},mode=755")
    upper, work, root = (f"{_PLACE}/{name}" for name in ("upper", "work", "root"))
    for folder in (upper, work, root):
        os.mkdir(folder)
    mount("overlay", root, "overlay", 0, f"lowerdir=/,upperdir={upper},workdir={work}")
    for target in ("/proc", "/sys", "/dev", *attached):
        mount(target, root + target, None, MS_BIND | MS_REC)
    unshare(CLONE_NEWNS)
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    os.chdir(root)
    pivot_root(".", ".")
    umount2(".", MNT_DETACH)
    os.makedirs(workdir, exist_ok=True)
    os.chdir(workdir)
    _give_up(_CAP_SYS_ADMIN)


def _give_up(capability: int) -> None:
    rows = dict(
        line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line
    )
    kept = int(rows["CapPrm"], 16) & ~(1 << capability)
    prctl(PR_CAPBSET_DROP, capability)
    capset({number for number in range(64) if kept >> number & 1})
