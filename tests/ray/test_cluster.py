"""What all the rest stands on: a process of Ray has sandboxes of its own, and they end with it."""

from __future__ import annotations

from typing import Any

import ray

from sandbox_gym.sandbox import Sandbox


@ray.remote(num_cpus=0)
def answer() -> tuple[str, str | None]:
    with Sandbox.create() as box:
        return ray.get_runtime_context().get_node_id(), box.run_code("6 * 7").value


def test_sandboxes_on_each_node(cluster: Any) -> None:
    nodes = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    on_second = answer.options(resources={"second": 1}).remote()
    answers = dict(ray.get([answer.remote(), on_second], timeout=60))
    assert set(answers.values()) == {"42"}
    assert len(nodes) == 2 and answers.keys() <= nodes
