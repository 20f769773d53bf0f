"""One real cluster of Ray for all tests here: two nodes, each with processes of its own, on this machine."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import pytest

from sandbox_gym.backends.shared import registry
from tests.conftest import descendants

_PATIENCE = 20.0  # seconds


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """A `ray.cluster_utils.Cluster` with two nodes, connected. A test that removes a node adds it first."""
    import ray
    from ray.cluster_utils import Cluster

    place = tempfile.mkdtemp(prefix="sg-")  # short: it holds sockets, whose paths have 107 characters at most
    os.environ.update(RAY_TMPDIR=place, RAY_USAGE_STATS_ENABLED="0")
    os.makedirs(f"{place}/ray")
    # Its nodes find each other by this machine's own address, whose packets go over loopback.
    node = {"num_cpus": 4, "object_store_memory": 200 << 20}
    made = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    try:
        made.add_node(**node, resources={"second": 1})
        ray.init(address=made.address, log_to_driver=False)
        yield made
    finally:
        ours = descendants(os.getpid())
        ray.shutdown()
        made.shutdown()
        shutil.rmtree(place, ignore_errors=True)
    deadline = time.monotonic() + _PATIENCE
    while (left := _supervisors(ours)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, f"supervisors of workers that are gone: {left}"


def _supervisors(ours: set[int]) -> list[str]:
    """The run folders of clients that are among `ours`, or dead."""
    home = registry.home()
    owners = {folder: _owner(folder) for folder in (os.listdir(home) if home.exists() else ())}
    return [folder for folder, pid in owners.items() if pid in ours or not os.path.exists(f"/proc/{pid}")]


def _owner(folder: str) -> int:
    try:
        return int(json.loads((registry.home() / folder / "info.json").read_text())["owner_pid"])
    except OSError:  # it is just coming, or going
        return os.getpid()
