"""Sandboxes of gVisor's, restored from one snapshot, and the proof after each test that it gave back what it took."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox_gym.backends import lookup
from sandbox_gym.backends.gvisor.client import GvisorBackend
from sandbox_gym.network import Allow
from sandbox_gym.sandbox import Sandbox, Snapshot
from tests.network.conftest import echo, web
from tests.sandbox.conftest import client

__all__ = ["client", "echo", "web"]


def gvisor() -> GvisorBackend:
    backend = lookup.get("gvisor")
    assert isinstance(backend, GvisorBackend)
    return backend


def _first() -> Sandbox:
    return Sandbox.create(backend="gvisor", memory="512Mi", disk="64Mi", pids=64)


@pytest.fixture(scope="session")
def _pristine() -> Iterator[Callable[[], Snapshot]]:
    """A snapshot to restore from; made again when a test has killed its supervisor."""
    kept: list[tuple[Any, Snapshot]] = []

    def get() -> Snapshot:
        backend = gvisor()
        if not kept or kept[-1][0] is not backend:
            kept[:] = [(backend, _first().freeze("pristine"))]
            Sandbox.restore(
                kept[-1][1], network=Allow(["a.test"])
            ).terminate()  # the proxy, once started, stays
        return kept[0][1]

    yield get
    for _, snapshot in kept:
        snapshot.delete()


@pytest.fixture
def pristine(_pristine: Callable[[], Snapshot]) -> Snapshot:
    """Of a fresh sandbox: 512 MiB of memory, 64 MiB of disk, 64 processes."""
    return _pristine()


@pytest.fixture
def box(pristine: Snapshot) -> Iterator[Sandbox]:
    with Sandbox.restore(pristine) as sandbox:
        yield sandbox


def supervisor() -> int:
    """The number that this test has for it."""
    process = gvisor()._process
    assert process is not None
    for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        if Path(f"/proc/{child}/status").read_text().split("NSpid:")[1].splitlines()[0].split()[1:] == ["1"]:
            return int(child)
    raise AssertionError("no supervisor")


def holdings() -> dict[str, Any]:
    """What the supervisor has on the machine: rows, processes, descriptors, mounts, control groups, files."""
    pid, folder = supervisor(), gvisor()._folder
    images = Path(f"/var/tmp/sandbox-gym-{folder.name}")
    groups = [Path("/sys/fs/cgroup"), *Path("/sys/fs/cgroup").iterdir()]
    inside = f"/proc/{pid}/root{folder}"
    return {
        "rows": sorted((row["id"], row["state"]) for row in gvisor().list()),
        "processes": len(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()),
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")) - len(gvisor()._idle),
        # The roots of sandboxes, once mounted, are kept.
        "mounts": [
            line for line in Path(f"/proc/{pid}/mounts").read_text().splitlines() if "/base/" not in line
        ],
        "groups": sorted(str(p) for g in groups for p in g.glob(f"sandbox-gym-{folder.name}/*/tasks")),
        "boxes": sorted(os.listdir(f"{inside}/boxes")),
        "images": sorted(os.listdir(images)),
    }


@pytest.fixture(autouse=True)
def no_leaks(_pristine: Callable[[], Snapshot]) -> Iterator[None]:
    _pristine()
    backend, before = gvisor(), holdings()
    yield
    if gvisor() is not backend:  # the test killed it: the next one starts from nothing
        return
    deadline = time.monotonic() + 5.0
    while (after := holdings()) != before and time.monotonic() < deadline:
        time.sleep(0.02)
    assert after == before
