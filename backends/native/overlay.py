"""A sandbox's root: one overlay mount of its own writable layer over what was there before (overlayfs, mount API)."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

from sandbox_gym.guest import syscalls

SUBDIR = ".root"  # the folder of every overlay that is the sandbox's /: see `rootfs`


@dataclass(frozen=True)
class Base:
    """What lies under all of a sandbox's own layers. `lowers`: paths, topmost first. `attached`: mounts that go on top,
    as (where the supervisor has them mounted, target).
    """

    lowers: tuple[str, ...]
    attached: tuple[tuple[str, str], ...]
    privileged: bool


def mount(upper: str, work: str, layers: Sequence[str], base: Base) -> tuple[int, int]:
    """`upper` over the frozen `layers` (newest first) over `base`: the detached mount of the sandbox's /, and that of
    the whole, which is to be closed with the sandbox: closing it waits for an RCU grace period.
    """
    context = syscalls.fsopen("overlay")
    try:
        for lower in (*layers, *base.lowers):
            syscalls.fsconfig_string(context, "lowerdir+", lower)
        syscalls.fsconfig_string(context, "upperdir", upper)
        syscalls.fsconfig_string(context, "workdir", work)
        if base.privileged:
            syscalls.fsconfig_string(context, "redirect_dir", "follow")
            # Else each unmount syncs a disk that nobody will read again.
            syscalls.fsconfig_flag(context, "volatile")
        else:
            # For trusted.* attributes one needs the initial user namespace.
            syscalls.fsconfig_flag(context, "userxattr")
        syscalls.fsconfig_create(context)
        whole = syscalls.fsmount(context)
    finally:
        os.close(context)
    try:
        return _subtree(whole), whole
    except OSError:
        os.close(whole)
        raise


def _subtree(whole: int) -> int:
    """The sandbox's / alone. The whole never leaves the supervisor: beside `.root` it shows all of the host."""
    try:
        return syscalls.open_tree(SUBDIR, dfd=whole)
    except OSError as error:
        if error.errno != errno.EINVAL:  # before Linux 6.15 only an attached mount can be cloned
            raise
    return subtree_attached(whole)


def subtree_attached(whole: int) -> int:
    """`_subtree` by way of a mount point, which this leaves as it was."""
    with tempfile.TemporaryDirectory(prefix="sandbox-gym-root-") as place:
        syscalls.move_mount(whole, place)
        try:
            return syscalls.open_tree(f"{place}/{SUBDIR}")
        finally:
            syscalls.umount2(place, syscalls.MNT_DETACH)
