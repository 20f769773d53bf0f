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

from sandbox_gym.backends.native import registry

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
    before = _supervisors()
    try:
        made.add_node(**node, resources={"second": 1})
        ray.init(address=made.address, log_to_driver=False)
        yield made
    finally:
        ray.shutdown()
        made.shutdown()
        shutil.rmtree(place, ignore_errors=True)
    deadline = time.monotonic() + _PATIENCE
    while (left := _supervisors() - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, f"supervisors of workers that are gone: {left}"


def _supervisors() -> set[str]:
    """The run folders of all clients but this process, whose own end is waited for by `nothing_left_on_the_machine`."""
    home = registry.home()
    return {row for row in os.listdir(home) if _owner(row) != os.getpid()} if home.exists() else set()


def _owner(folder: str) -> int:
    try:
        return int(json.loads((registry.home() / folder / "info.json").read_text())["owner_pid"])
    except OSError:  # it is just going
        return 0
