"""What runsc is told to run: a root file system, and an OCI configuration (opencontainers/runtime-spec, 1.0).

The root is the one that native has, mounted read-only: one overlay of the kernel's over the listed host folders, or
over an image. What is written lies in memory inside gVisor (`guest/own_disk.py`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandbox_gym.api import Limits, SandboxSpec
from sandbox_gym.backends.native import overlay, rootfs
from sandbox_gym.backends.native.overlay import SUBDIR
from sandbox_gym.backends.shared.environment import guest_environment
from sandbox_gym.guest import syscalls

from .wires import PLACE

# Docker's default set, less raw sockets; CAP_SYS_ADMIN is for `own_disk`, which gives it up.
_CAPABILITIES = [
    f"CAP_{name}"
    for name in (
        *("CHOWN", "DAC_OVERRIDE", "FSETID", "FOWNER", "MKNOD", "SETGID", "SETUID", "SETFCAP", "SETPCAP"),
        *("NET_BIND_SERVICE", "SYS_CHROOT", "KILL", "AUDIT_WRITE", "SYS_ADMIN"),
    )
]
_START = """\
import json
import sys

from sandbox_gym_guest import own_disk

own_disk.enter(**json.loads(sys.argv.pop(1)))

from sandbox_gym_guest.agent import main

main()
"""


@dataclass(frozen=True)
class Root:
    """A root file system, mounted at `place`. `attached`: (host path, target) of mounts above it."""

    place: str
    attached: tuple[tuple[str, str], ...]
    python: str  # the guest's interpreter
    path: tuple[str, ...]  # what goes on its sys.path


@dataclass(frozen=True)
class Family:
    """What every copy of one created sandbox shares."""

    spec: SandboxSpec
    root: Root


def make_root(spec: SandboxSpec, folder: Path) -> Root:
    """For as long as this process lives. `folder`, which is not there yet, must not lie in the file system that / is
    on: overlayfs refuses (ELOOP).

    Raises BackendUnavailable, OSError.
    """
    built = rootfs.build(spec, folder, privileged=True)
    ours = folder / SUBDIR / rootfs.GUEST_FOLDER.lstrip("/")
    (ours / "enter.py").write_text(_START)
    (ours / "disk").mkdir()
    (folder / SUBDIR / "etc/resolv.conf").write_text(f"nameserver {PLACE.address}\n")
    root = folder.parent / f"{folder.name}-root"
    root.mkdir()
    lowers = [str(built.skeleton), *([built.lower] if built.lower else [])]
    _mount_root(lowers, str(root))
    attached = [
        (_mount_read_only(source, folder.parent / f"{folder.name}-mount-{i}"), target)
        for i, (source, target) in enumerate(built.attached)
    ]
    return Root(str(root), tuple(attached), built.python, tuple(built.path))


def _mount_read_only(source: str, place: Path) -> str:
    """Where the source can be seen and, whatever gVisor lets through, not be changed: a file that is opened with
    O_TRUNC on a mount that is read-only for gVisor alone is emptied (release 20240729).
    """
    fd = syscalls.open_tree(source)
    try:
        syscalls.mount_setattr(fd, syscalls.MOUNT_ATTR_RDONLY | syscalls.MOUNT_ATTR_NOSUID)
        place.mkdir() if os.path.isdir(source) else place.touch()
        syscalls.move_mount(fd, str(place))
    finally:
        os.close(fd)
    return str(place)


def _mount_root(lowers: list[str], place: str) -> None:
    context = syscalls.fsopen("overlay")
    try:
        for lower in lowers:
            syscalls.fsconfig_string(context, "lowerdir+", lower)
        syscalls.fsconfig_string(context, "redirect_dir", "follow")
        syscalls.fsconfig_create(context)
        whole = syscalls.fsmount(context, syscalls.MOUNT_ATTR_RDONLY | syscalls.MOUNT_ATTR_NOSUID)
    finally:
        os.close(context)
    try:
        root = overlay.subtree_attached(whole)  # beside it, the whole shows all of the host
    finally:
        os.close(whole)
    try:
        syscalls.move_mount(root, place)
    finally:
        os.close(root)


def write_config(folder: Path, family: Family, *, variables: Mapping[str, str], netns: str | None) -> None:
    """The file `config.json` of the bundle in `folder`. `netns`: the path of its network namespace."""
    (folder / "config.json").write_text(json.dumps(_config(family, variables, netns)))


def _config(family: Family, variables: Mapping[str, str], netns: str | None) -> dict[str, Any]:
    spec, root = family.spec, family.root
    disk = {
        "size": spec.limits.disk_bytes,
        "attached": [target for _, target in root.attached],
        "workdir": spec.workdir or rootfs.WORKSPACE,
    }
    start = f"{rootfs.GUEST_FOLDER}/enter.py"
    environment = guest_environment(root.python, {**variables, **spec.env})
    network = {"type": "network", **({"path": netns} if netns else {})}
    return {
        "ociVersion": "1.0.2",
        "root": {"path": root.place, "readonly": True},
        "hostname": "sandbox",
        "process": {
            "user": {"uid": 0, "gid": 0},
            "args": [root.python, "-s", start, json.dumps(disk), "stdio", *root.path],
            "env": [f"{name}={value}" for name, value in environment.items()],
            "cwd": "/",
            "noNewPrivileges": True,
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), _CAPABILITIES),
            "rlimits": _rlimits(spec.limits),
        },
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            *(
                {"destination": target, "type": "bind", "source": source, "options": ["bind", "ro"]}
                for source, target in root.attached
            ),
        ],
        "linux": {
            "namespaces": [*({"type": kind} for kind in ("pid", "mount", "ipc", "uts")), network],
        },
    }


def _rlimits(limits: Limits) -> list[dict[str, Any]]:
    """gVisor's own tasks are not the host's: the kernel inside counts them."""
    wanted = {"RLIMIT_CORE": 0, **({"RLIMIT_NPROC": limits.pids + 1} if limits.pids is not None else {})}
    return [{"type": kind, "hard": most, "soft": most} for kind, most in wanted.items()]
