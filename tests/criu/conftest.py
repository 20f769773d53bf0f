"""Skips where nobody is root, as criu has to be. Sandboxes as in tests/sandbox; `nothing_stays` counts what is left."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox_gym.backends import lookup
from sandbox_gym.sandbox import Snapshot
from tests.conftest import descendants
from tests.criu.memory import _image, copy, image, plain
from tests.sandbox.conftest import (
    _descriptors,
    _holdings,
    _pristine,
    box,
    boxes,
    client,
    pristine,
    run_folder,
)
from tests.sandbox.test_faults import supervisor_of

__all__ = [
    "_image",
    "_pristine",
    "box",
    "boxes",
    "client",
    "copy",
    "image",
    "plain",
    "pristine",
    "run_folder",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.geteuid() != 0:
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="criu is root's"))


def supervisor() -> int:
    """Of this process's sandboxes, as the host numbers it."""
    backend: Any = lookup.get("native")
    return supervisor_of(backend._process.pid)


@pytest.fixture
def nothing_stays(pristine: Snapshot) -> Iterator[None]:
    """Sandboxes, snapshots, descriptors, folders of images, runs of criu and mounts, before and after each test."""
    before, descriptors, pid = _belongings(), _descriptors(), supervisor()
    yield
    if supervisor() != pid:  # the test has killed it
        return
    deadline = time.monotonic() + 5.0
    while (after := _belongings()) != before and time.monotonic() < deadline:
        time.sleep(0.02)
    assert after == before
    backend: Any = lookup.get("native")
    # Connections to the supervisor are kept, one for each thread that ever asked at once.
    assert _descriptors() - len(backend._idle) <= descriptors + 1


def _belongings() -> dict[str, Any]:
    backend: Any = lookup.get("native")
    pid = supervisor()
    disk = Path(f"/proc/{pid}/root{backend._folder}/disk")
    return {
        **_holdings(),
        "images": sorted(path.name for path in disk.glob("image-*")),
        "runs": runs_of_criu(pid),
        "mounts": len(Path(f"/proc/{pid}/mountinfo").read_text().splitlines()),
    }


def runs_of_criu(pid: int) -> list[int]:
    """The processes below `pid` that are criu. Not the dead: the next that ends has the supervisor wait for all."""
    found = []
    for process in descendants(pid):
        try:
            if (
                " (criu) Z " not in (status := Path(f"/proc/{process}/stat").read_text())
                and " (criu) " in status
            ):
                found.append(process)
        except OSError:
            continue
    return sorted(found)


def jobs() -> set[int]:
    """What the supervisor has started beside sandboxes: of its own process namespace, each leads a session. Not the
    network's proxy, which is nobody's and stays.
    """
    found = set()
    for process in descendants(supervisor()):
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{process}/status").read_text()
            depth = len(status.split("NSpid:")[1].splitlines()[0].split())
            nobody = status.split("Uid:")[1].split()[0] == "65534"
            state, _, _, session = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[:4]
            if depth == 2 and int(session) == process and state != "Z" and not nobody:
                found.add(process)
    return found
