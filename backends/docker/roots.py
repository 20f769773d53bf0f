"""Root file systems as docker images: this host's Python as a small image with host folders bound over it, or an
unpacked image as a whole, once for each digest.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from sandbox_gym.api import SandboxSpec
from sandbox_gym.backends.native import rootfs
from sandbox_gym.backends.native.overlay import SUBDIR
from sandbox_gym.errors import BackendUnavailable

from .daemon import Daemon
from .mounts import check_apart
from .owners import CACHE, Owner


@dataclass(frozen=True)
class Root:
    """`image`: docker's id of it. `python`: the guest's interpreter, `path`: what goes on its sys.path, inside.
    `attached`: (host path, target), to be bound read-only.
    """

    image: str
    python: str
    path: tuple[str, ...]
    attached: tuple[tuple[str, str], ...]


class Roots:
    """Those of one client: each is made once."""

    def __init__(self, daemon: Daemon, owner: Owner) -> None:
        self._daemon = daemon
        self._owner = owner
        self._made: dict[str, Root] = {}
        self._lock = threading.Lock()

    def get(self, spec: SandboxSpec, deadline: float) -> Root:
        """Raises BackendUnavailable where it can't hold a guest, SandboxTimeout."""
        key = repr((spec.rootfs, spec.env.get("PATH"), spec.mounts, spec.python_path, spec.in_place))
        with self._lock:
            if key not in self._made:
                self._made[key] = self._make(spec, deadline)
            return self._made[key]

    def _make(self, spec: SandboxSpec, deadline: float) -> Root:
        with tempfile.TemporaryDirectory(prefix="sandbox-gym-docker-") as folder:
            if spec.rootfs is None:
                built = rootfs.build(spec, Path(folder) / "root", privileged=False)
                shutil.rmtree(built.skeleton / SUBDIR / "dev")  # docker has its own
                attached = [(source, target) for source, target in built.attached if not _is_device(target)]
                check_apart(attached)
                image = self._import({}, built.skeleton / SUBDIR, None, deadline)
                return Root(image, built.python, tuple(built.path), tuple(attached))
            python = rootfs.find_python(spec)
            ours = Path(folder) / "ours"
            ours.mkdir()
            rootfs.furnish(ours, spec.rootfs)
            attached = [(mount.source, mount.target) for mount in spec.mounts]
            check_apart(attached)
            cached = {CACHE: f"{spec.image}-{_contents(ours)}"} if spec.image is not None else {}
            for found in self._daemon.images(f"{CACHE}={cached[CACHE]}") if cached else ():
                return Root(found["Id"], python, (), tuple(attached))
            return Root(self._import(cached, ours, Path(spec.rootfs), deadline), python, (), tuple(attached))

    def _import(self, labels: Mapping[str, str], ours: Path, below: Path | None, deadline: float) -> str:
        """An image of the folder `below`, with `ours` over it. Without labels it goes with its owner."""
        stated = " ".join(f"{k}={v}" for k, v in (labels or self._owner.labels("image")).items())
        with _archived(ours, below) as archive:
            answer = self._daemon.ask(
                "POST",
                "/images/create",
                params={"fromSrc": "-", "changes": [f"LABEL {stated}"]},
                archive=archive,
                timeout=max(1.0, deadline - time.monotonic()),
            )
        image = str((answer or {}).get("status", ""))
        if not image.startswith("sha256:"):
            raise BackendUnavailable(f"docker did not import a root file system: {answer!r}")
        return image


def _is_device(target: str) -> bool:
    return target.startswith("/dev/")


def _contents(folder: Path) -> str:
    """A digest of all files of ours."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        found.update(f"{path.relative_to(folder)}\0".encode())
        if path.is_file() and not path.is_symlink():
            found.update(path.read_bytes())
    return found.hexdigest()[:16]


@contextlib.contextmanager
def _archived(ours: Path, below: Path | None) -> Iterator[IO[bytes]]:
    """A tar file of `below` and, over it, `ours`; all of it is root's where this process isn't."""
    with tempfile.TemporaryFile() as file:
        with tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as archive:
            if below is not None:
                archive.add(below, ".", filter=_owned)
            for path in sorted(ours.rglob("*")):
                name = path.relative_to(ours)
                if below is None or not path.is_dir() or not os.path.lexists(below / name):
                    archive.add(path, str(name), recursive=False, filter=_owned)
        file.seek(0)
        yield file


def _owned(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    if os.geteuid() != 0:
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = "root"
    return entry
