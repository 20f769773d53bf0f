"""Nodes that join a cluster while a map runs, and that leave it."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import ray

from sandbox_gym.backends.shared import registry
from sandbox_gym.ray import job
from tests.ray.test_jobs import nothing_runs, until


def test_a_node_joins_and_another_leaves(cluster: Any, tmp_path: Path) -> None:
    """Each node takes one item at a time, and items wait until the first node's worker is gone."""

    @job(cpus=1, resources={"spot": 1}, retries=1)
    def play(number: int) -> tuple[int, str]:
        node = ray.get_runtime_context().get_node_id()
        (tmp_path / f"{node}-{number}-{os.getpid()}").touch()
        until((tmp_path / "go").exists, 60)
        return number, node

    added = [cluster.add_node(num_cpus=1, resources={"spot": 1}, object_store_memory=100 << 20)]
    try:
        first = added[0].node_id

        def began(node: str) -> list[Path]:
            return list(tmp_path.glob(f"{node}-*"))

        results = play.map(range(6), window=6)
        taking: list[Any] = []
        taker = threading.Thread(target=lambda: taking.extend(results))
        taker.start()
        until(lambda: began(first), 60)
        added.append(cluster.add_node(num_cpus=1, resources={"spot": 1}, object_store_memory=100 << 20))
        until(lambda: began(added[1].node_id), 60)
        cluster.remove_node(added.pop(0), allow_graceful=False)
        (worker,) = (int(path.name.rpartition("-")[2]) for path in began(first))
        until(lambda: registry.start_time(worker) is None)
        (tmp_path / "go").touch()
        taker.join(60)
        assert [number for number, _ in taking] == list(range(6))
        assert {node for _, node in taking} == {added[0].node_id}
        assert len(list(tmp_path.glob("*-0-*"))) == 2  # begun there, and here again
    finally:
        for node in added:
            cluster.remove_node(node, allow_graceful=False)
    until(nothing_runs)
