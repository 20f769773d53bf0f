"""Devices, mounts, control groups."""

from __future__ import annotations

import contextlib
import ctypes
import glob
import os
import stat
from collections.abc import Callable

from .words import (
    CONTAINED,
    POSSIBLE,
    REFUSED,
    Known,
    Outcome,
    attempt,
    libc,
    opening,
    shared,
    tried,
    writing,
)


@attempt("devices of the host")
def _(known: Known) -> Outcome:
    names = (
        "sda",
        "vda",
        "nvme0n1",
        "fuse",
        "kvm",
        "net/tun",
        "loop-control",
        "loop0",
        "mapper/control",
        "vhost-net",
    )
    return opening([f"/dev/{name}" for name in names], os.O_RDWR, known)


@attempt("devices that are made by mknod")
def _(known: Known) -> Outcome:
    found = [REFUSED, "mknod"]
    numbers = [
        (stat.S_IFCHR, 1, 1),
        (stat.S_IFCHR, 10, 229),
        *((stat.S_IFBLK, *pair) for pair in known["disks"]),
    ]
    for kind, major, minor in numbers:
        for folder in ("/tmp", "/dev/shm", "/dev", "/workspace"):
            path = f"{folder}/device-{major}-{minor}"
            with contextlib.suppress(OSError):
                os.mknod(path, kind | 0o600, os.makedev(major, minor))
                try:
                    os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
                    return shared(known), path
                except OSError as error:
                    found = [CONTAINED, f"made, but not to be opened: {error.strerror}"]
                finally:
                    os.unlink(path)
    return found[0], found[1]


def _mount(source: str, kind: str | None, flags: int = 0) -> str | None:
    """Mounts at /tmp/mounted: None when it is done, else the error."""
    os.makedirs("/tmp/mounted", exist_ok=True)
    encoded = [None if text is None else text.encode() for text in (source, "/tmp/mounted", kind)]
    return None if libc.mount(*encoded, flags, None) == 0 else os.strerror(ctypes.get_errno())


def _mounted(what: list[tuple[str, str | None, int]], look: Callable[[], Outcome]) -> Outcome:
    problem: str | None = "nothing to mount"
    for source, kind, flags in what:
        problem = _mount(source, kind, flags)
        if problem is None:
            try:
                return look()
            finally:
                libc.umount2(b"/tmp/mounted", 2)
    return REFUSED, str(problem)


@attempt("mount the host's disk")
def _(known: Known) -> Outcome:
    disks: list[tuple[str, str | None, int]] = [
        (path, kind, 1) for path in known["devices"] for kind in ("ext4", "xfs", "btrfs")
    ]
    return _mounted(disks, lambda: (POSSIBLE, "mounted"))


@attempt("mount a new /proc or /sys, which nothing hides parts of")
def _(known: Known) -> Outcome:
    def look() -> Outcome:
        return writing(["/tmp/mounted/sys/kernel/core_pattern", "/tmp/mounted/kernel/mm/ksm/run"], known)

    kinds: list[tuple[str, str | None, int]] = [
        ("proc", "proc", 0),
        ("proc", "proc", 14),
        ("sysfs", "sysfs", 0),
    ]
    verdict, evidence = _mounted(kinds, look)
    return (
        (CONTAINED, "mounted, not writable")
        if verdict == REFUSED and "/tmp/mounted" in evidence
        else (verdict, evidence)
    )


@attempt("make read-only mounts writable")
def _(known: Known) -> Outcome:
    place = known["mount"]
    libc.mount(None, place.encode(), None, 32 | 4096, None)
    libc.mount(None, place.encode(), None, 32, None)
    libc.umount2(place.encode(), 2)
    return tried(
        lambda: open(f"{place}/probe-was-here", "w").close(), CONTAINED
    )  # the host sees whether it is there


@attempt("a control group's release_agent")
def _(known: Known) -> Outcome:
    agents = glob.glob("/sys/fs/cgroup/*/release_agent") + glob.glob(
        "/sys/fs/cgroup/**/release_agent", recursive=True
    )
    verdict, evidence = writing(agents or ["/sys/fs/cgroup/release_agent"], known)
    if verdict != REFUSED:
        return verdict, evidence
    own = _mounted(
        [("cgroup", "cgroup", 0)], lambda: writing(glob.glob("/tmp/mounted/**/release_agent"), known)
    )
    return (CONTAINED, own[1]) if own[0] == REFUSED and "mounted" in own[1] else own


@attempt("its own limits, in its control group")
def _(known: Known) -> Outcome:
    names = ("memory.max", "memory.limit_in_bytes", "pids.max", "cpu.max", "cpu.cfs_quota_us")
    paths = [path for name in names for path in glob.glob(f"/sys/fs/cgroup/**/{name}", recursive=True)]
    return writing(paths or ["/sys/fs/cgroup/memory.max"], known)
