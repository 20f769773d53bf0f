"""Whose containers, images, volumes and networks are whose, by their labels; and what dead owners have left.

An owner is a process, told from a later one of its number by its start time, from one of another container's numbers by
its pid namespace, and from one before the machine was started by the boot's id. Nothing is ever found by a name.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandbox_gym.backends.shared import registry
from sandbox_gym.errors import BackendUnavailable, SandboxError, SandboxTimeout

from .daemon import Daemon
from .groups import Groups

OWNER, RUN, KIND = "sandbox-gym.owner", "sandbox-gym.run", "sandbox-gym.kind"
ID, NAME, PARENT = "sandbox-gym.id", "sandbox-gym.name", "sandbox-gym.parent"
CACHE = "sandbox-gym.cache"  # of an image that has no owner: what it was made of
_PATIENCE = 60.0


@dataclass(frozen=True)
class Owner:
    """A client process. `run`: one backend of it."""

    boot: str
    namespace: int
    pid: int
    start: int
    run: str

    @classmethod
    def this(cls) -> Owner:
        start = registry.start_time(os.getpid())
        assert start is not None
        return cls(_boot(), _pid_namespace(), os.getpid(), start, secrets.token_hex(6))

    @classmethod
    def of(cls, labels: dict[str, str]) -> Owner | None:
        """None for labels that are not ours."""
        try:
            boot, namespace, pid, start = labels[OWNER].split("/")
            return cls(boot, int(namespace), int(pid), int(start), labels[RUN])
        except (KeyError, ValueError):
            return None

    def labels(self, kind: str) -> dict[str, str]:
        return {OWNER: f"{self.boot}/{self.namespace}/{self.pid}/{self.start}", RUN: self.run, KIND: kind}

    def is_dead(self) -> bool:
        """False also where that can't be known: of another pid namespace, while the machine runs."""
        if self.boot != _boot():
            return True
        return self.namespace == _pid_namespace() and registry.start_time(self.pid) != self.start


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def remove_run(daemon: Daemon, run: str) -> None:
    """Removes all that one backend has made. Raises SandboxError."""
    _remove(daemon, f"{RUN}={run}", lambda labels: True)


def collect(daemon: Daemon, *, dry_run: bool = False) -> list[str]:
    """Removes what dead owners have left. Returns what it removed, or would. Raises SandboxError."""

    def dead(labels: dict[str, str]) -> bool:
        owner = Owner.of(labels)
        return owner is not None and owner.is_dead()

    return _remove(daemon, OWNER, dead, dry_run=dry_run)


def collect_all(*, dry_run: bool) -> list[str]:
    """The same at this machine's daemon, and images of root file systems that are kept for later and used by nobody;
    nothing where no daemon answers.
    """
    found: list[str] = []
    with contextlib.suppress(BackendUnavailable):
        daemon = Daemon()
        found += collect(daemon, dry_run=dry_run)
        kept = [row["Id"] for row in daemon.images(CACHE) if OWNER not in (row["Labels"] or {})]
        found += [
            f"image {image[:19]} of docker, a root file system kept for later"
            for image in kept
            if dry_run or daemon.remove_image(image)
        ]
    return found


def _remove(
    daemon: Daemon, label: str, wanted: Callable[[dict[str, str]], bool], *, dry_run: bool = False
) -> list[str]:
    def chosen(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [row for row in rows if wanted(row["Labels"] or {})]

    containers = [row["Id"] for row in chosen(daemon.containers(label))]
    images = [row["Id"] for row in chosen(daemon.images(label))]
    networks = [row["Id"] for row in chosen(daemon.networks(label))]
    volumes = [row["Name"] for row in chosen(daemon.volumes(label))]
    if not dry_run:
        for container in containers:
            daemon.remove_container(container)
        for network in networks:
            daemon.ask("DELETE", f"/networks/{network}")
        for volume in volumes:
            daemon.ask("DELETE", f"/volumes/{volume}", params={"force": 1})
        _remove_images(daemon, images)
    return [
        *(f"container {container[:12]} of docker" for container in containers),
        *(f"network {network[:12]} of docker" for network in networks),
        *(f"volume {volume} of docker" for volume in volumes),
        *(f"image {image[:19]} of docker" for image in images),
    ]


def _remove_images(daemon: Daemon, images: list[str]) -> None:
    """Children go before what they were made of, and none before a container that the daemon still takes apart."""
    left, deadline = set(images), time.monotonic() + _PATIENCE
    while left:
        gone = {image for image in left if daemon.remove_image(image)}
        left -= gone
        if not gone:
            if time.monotonic() > deadline:
                raise SandboxTimeout(f"docker still uses {len(left)} images of sandboxes that are gone")
            time.sleep(0.02)


def rows() -> list[dict[str, Any]]:
    """The live sandboxes and snapshots of all clients at this machine's daemon; none where no daemon answers."""
    try:
        daemon = Daemon()
    except BackendUnavailable:
        return []
    found = [(row, Owner.of(row["Labels"])) for row in daemon.containers(OWNER)]
    return [_row(daemon, row, owner) for row, owner in found if owner is not None]


def _row(daemon: Daemon, container: dict[str, Any], owner: Owner) -> dict[str, Any]:
    labels = container["Labels"]
    memory = 0
    if container["State"] == "running":
        with contextlib.suppress(SandboxError):  # it ends just now
            pid = int(daemon.inspect(container["Id"])["State"]["Pid"])
            memory = Groups(container["Id"], pid).memory_bytes()
    return {
        "id": labels.get(ID, ""),
        "name": labels.get(NAME, ""),
        "state": "snapshot" if labels.get(KIND) == "snapshot" else container["State"],
        "age": time.time() - container["Created"],
        "parent": labels.get(PARENT),
        "memory_bytes": memory,
        "owner_pid": owner.pid,
    }
