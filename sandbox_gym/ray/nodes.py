"""How many workers a cluster holds, and where the next ones go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import ray
from ray._private.state import available_resources_per_node

from sandbox_gym.errors import BackendUnavailable
from sandbox_gym.ray.worker import Share

Resources = Mapping[str, float]


@dataclass(frozen=True)
class Needs:
    """What one worker takes of its node, and how many sandboxes a node's workers may have together."""

    cpus: float
    memory_bytes: int | None
    gpus: float
    resources: Resources
    sandboxes_per_node: int

    @property
    def options(self) -> dict[str, Any]:
        """As Ray's actors take them."""
        given: dict[str, Any] = {
            "num_cpus": self.cpus,
            "num_gpus": self.gpus,
            "resources": dict(self.resources),
        }
        return given if self.memory_bytes is None else {**given, "memory": self.memory_bytes}

    def fit(self, there: Resources) -> int:
        """How many such workers these resources hold."""
        wanted = {"CPU": self.cpus, "memory": self.memory_bytes or 0, "GPU": self.gpus, **self.resources}
        # A little is added since Ray counts in ten-thousandths, and a third of a CPU three times is one.
        return min(int(there.get(name, 0.0) / much + 1e-3) for name, much in wanted.items() if much)

    def share(self, total: Resources) -> Share | None:
        """Of a node with so much in total; None where no worker fits."""
        workers = min(self.fit(total), self.sandboxes_per_node)
        return Share(self.sandboxes_per_node, workers) if workers > 0 else None

    def __str__(self) -> str:
        memory = [] if self.memory_bytes is None else [f"{self.memory_bytes / 2**30:.3g} GiB of memory"]
        gpus = [f"{self.gpus:g} GPUs"] if self.gpus else []
        more = [f"{much:g} {name}" for name, much in self.resources.items()]
        return ", ".join([f"{self.cpus:g} CPUs", *memory, *gpus, *more])


def shares(needs: Needs) -> dict[str, Share]:
    """The nodes (by id) that are there and hold a worker at least, used as they may be."""
    found = {node: needs.share(total) for node, total in _totals().items()}
    return {node: share for node, share in found.items() if share is not None}


def capacity(needs: Needs) -> int:
    """The workers that all nodes hold. Raises BackendUnavailable when that is none."""
    found = sum(share.workers for share in shares(needs).values())
    if not found:
        there = "; ".join(
            f"{total.get('CPU', 0):g} CPUs, {total.get('memory', 0) / 2**30:.3g} GiB, {total.get('GPU', 0):g} GPUs"
            for total in _totals().values()
        )
        raise BackendUnavailable(
            f"no node of this cluster can ever run a worker of this job, which needs {needs}: they have {there}. Ask "
            "for less in @job(...), or add a node first"
        )
    return found


def vacancies(
    needs: Needs, there: Counter[str], avoid: AbstractSet[str], most: int
) -> list[tuple[str, Share]]:
    """Nodes for up to `most` more workers, the emptiest first; `there` are already on them. What others use of a node
    is left to them.
    """
    room, free = shares(needs), available_resources_per_node()
    left = {
        node: min(share.workers - there[node], needs.fit(free.get(node, {})))
        for node, share in room.items()
        if node not in avoid
    }
    chosen: list[tuple[str, Share]] = []
    counts = Counter(there)
    while len(chosen) < most and (fitting := [node for node, more in left.items() if more > 0]):
        node = min(fitting, key=lambda node: counts[node])
        counts[node] += 1
        left[node] -= 1
        chosen.append((node, room[node]))
    return chosen


def describe_use() -> str:
    """For an error: what is free of what there is."""
    free, total = ray.available_resources(), ray.cluster_resources()
    names = [name for name in ("CPU", "memory", "GPU") if name in total]
    return ", ".join(f"{free.get(name, 0):g} of {total[name]:g} {name}" for name in names)


def _totals() -> dict[str, dict[str, float]]:
    return {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
