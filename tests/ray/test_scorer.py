"""A policy's scores for many callers: what the module itself gives, whoever asks and however it is batched."""

from __future__ import annotations

import collections
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from sandbox_gym.errors import BackendUnavailable, SandboxDied, SandboxError, SandboxTimeout
from sandbox_gym.ray.scorer import PolicyScorer
from sandbox_gym.search import MCTS
from sandbox_gym.search.testing import TableModel


class Network(torch.nn.Module):
    """From [b, 4] to two logits and a value, the value with the weight `scale`."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(4, 8)
        self.policy = torch.nn.Linear(8, 2)
        self.scale = torch.nn.Parameter(torch.tensor(1.0))

    def forward(self, observations: Any) -> tuple[Any, Any]:
        hidden = torch.relu(self.body(observations.float()))
        return self.policy(hidden), self.scale * observations.float().sum(dim=1)


class Wrong(torch.nn.Module):
    """Wrong in the way that the largest first number in a batch says, for Ray may swap requests; right for 0."""

    def forward(self, observations: Any) -> Any:
        b = len(observations)
        logits, values = torch.zeros(b, 2), torch.zeros(b)
        kind = int(observations[:, 0].max())
        if kind == 1:
            return logits, torch.zeros(b, 1)
        if kind == 2:
            return logits
        if kind == 3:
            raise OverflowError("out of range")
        if kind == 4:
            logits[:, 1] = -torch.inf
        return logits, torch.where(observations[:, 1] == 1, torch.nan, values)


MODULE = Network()


@pytest.fixture(scope="module")
def scorer(cluster: Any) -> Iterator[PolicyScorer]:
    with PolicyScorer(MODULE, num_replicas=2, max_batch=16, max_wait=0.01, timeout=30) as made:
        yield made


def observations(n: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).normal(size=(n, 4)).astype(np.float32)


def check(scores: tuple[Any, Any], seen: np.ndarray[Any, Any]) -> None:
    """Are they what the module gives for `seen`?"""
    with torch.no_grad():
        logits, values = MODULE(torch.tensor(seen))
    np.testing.assert_allclose(scores[0], logits.numpy(), atol=1e-5)
    np.testing.assert_allclose(scores[1], values.numpy(), atol=1e-5)


def test_scores_are_the_modules_own(scorer: PolicyScorer) -> None:
    for n in (1, 16, 41):
        check(scorer.evaluate(observations(n)), observations(n))
    check(scorer.evaluate(list(observations(3))), observations(3))
    check(scorer.evaluate(observations(3).astype(np.float64)), observations(3))
    pixels = np.arange(8, dtype=np.uint8).reshape(2, 4)
    check(scorer.evaluate(pixels), pixels)
    assert max(scorer.stats().batch_sizes) == 16  # of the 41 too
    assert scorer.stats().devices == ["cpu", "cpu"]  # the cluster has no GPU


def test_requests_of_many_callers_share_batches(scorer: PolicyScorer) -> None:
    before = scorer.stats()
    waiting = [scorer.submit(observations(2, seed)) for seed in range(200)]
    other = scorer.submit(observations(3).astype(np.int32))  # of another form: a batch of its own
    for seed, scores in enumerate(waiting):
        check(scores.result(), observations(2, seed))
        assert scores.version == 0
    assert len(other.result()[1]) == 3
    after = scorer.stats()
    sizes = collections.Counter(after.batch_sizes)
    sizes.subtract(before.batch_sizes)
    assert after.num_requests - before.num_requests == 201
    assert sum(size * n for size, n in sizes.items()) == 403
    assert 403 / sizes.total() > 6
    assert max(sizes) <= 16
    assert 1 <= after.mean_batch_size <= 16
    assert 0 < after.latency_p50 <= after.latency_p99 < 30


@ray.remote(num_cpus=0)
def ask(scorer: PolicyScorer, rounds: int, seed: int) -> tuple[str, list[Any]]:
    """Elsewhere in the cluster, with the handle."""
    found = [scorer.evaluate(observations(3, seed + i)) for i in range(rounds)]
    return ray.get_runtime_context().get_node_id(), found


def test_callers_on_both_nodes(cluster: Any, scorer: PolicyScorer) -> None:
    before = scorer.stats().num_requests
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    asked = [
        ask.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(
            scorer, 20, 100 * i
        )
        for i, node in enumerate(nodes)
    ]
    answers = ray.get(asked, timeout=60)
    assert [node for node, _ in answers] == nodes and len(nodes) == 2
    assert scorer.stats().num_requests == before + 40
    for i, (_, found) in enumerate(answers):
        for j, scores in enumerate(found):
            check(scores, observations(3, 100 * i + j))


def test_search_with_it(scorer: PolicyScorer) -> None:
    """Observations are integers here, as a search over a table has them; the last place is worth the most."""
    model = TableModel(
        lambda place, action: (place + action, float(action), place >= 5, False), num_actions=2
    )

    def evaluate(places: list[int]) -> tuple[Any, Any]:
        return scorer.evaluate([np.full(4, place, np.float32) for place in places])

    result = MCTS(num_simulations=60, batch_size=4, evaluate=evaluate).search(model)
    assert result.action == 1
    assert model.num_alive == 0


# ---- weights ----------------------------------------------------------------------------------------------------


def scaled(factor: float) -> dict[str, Any]:
    return {**Network().state_dict(), "scale": torch.tensor(factor)}


def test_weights_change_under_load(scorer: PolicyScorer) -> None:
    """Every request is answered, by the version that it says."""
    one = np.ones((5, 4), np.float32)
    stop = threading.Event()

    def ask_on() -> list[tuple[int | None, set[float]]]:
        seen = []
        while not stop.is_set():
            waiting = [scorer.submit(one) for _ in range(10)]
            for scores in waiting:
                _, values = scores.result()
                seen.append((scores.version, set(values.tolist())))
        return seen

    with ThreadPoolExecutor(3) as pool:
        asking = [pool.submit(ask_on) for _ in range(3)]
        try:
            for version in range(1, 6):
                scorer.set_weights(scaled(version), version=version)
                # Nothing older is seen from here on.
                last = scorer.submit(one)
                last.result()
                assert last.version == version
        finally:
            stop.set()
        seen = [answer for future in asking for answer in future.result(timeout=60)]
    assert {version for version, _ in seen} <= set(range(6))
    for used, values in seen:
        assert values == {4.0 * (used or 1)}
    assert scorer.stats().versions == [5, 5]
    scorer.set_weights(MODULE.state_dict(), version=0)


def test_weights_that_do_not_fit_change_nothing(scorer: PolicyScorer) -> None:
    wrong = scaled(7.0)
    del wrong["policy.bias"]
    with pytest.raises(ValueError, match=r"don't fit .*Network, which keeps its version 0"):
        scorer.set_weights(wrong, version=1)
    check(scorer.evaluate(observations(4)), observations(4))
    assert scorer.stats().versions == [0, 0]


# ---- what goes wrong --------------------------------------------------------------------------------------------


def test_wrong_outputs_name_the_module(cluster: Any) -> None:
    def batch(kind: int, *bad: int) -> np.ndarray[Any, Any]:
        return np.array([[kind, one] for one in bad], np.float32)

    # A batch is two observations, however long they have to be waited for.
    with PolicyScorer(Wrong(), max_batch=2, max_wait=20, timeout=30) as scorer:
        with pytest.raises(
            ValueError, match=r"Wrong gave .* values of shape \(2, 1\); expected \(2, num_actions\)"
        ):
            scorer.evaluate(batch(1, 0, 0))
        with pytest.raises(ValueError, match="Wrong gave Tensor; expected"):
            scorer.evaluate(batch(2, 0, 0))
        with pytest.raises(SandboxError, match=r"Wrong can't score observations \[2, 2\] .*OverflowError"):
            scorer.evaluate(batch(3, 0, 0))
        assert scorer.evaluate(batch(4, 0, 0))[0].tolist() == [[0.0, -np.inf]] * 2
        good, bad = scorer.submit(batch(0, 0)), scorer.submit(batch(0, 1))
        with pytest.raises(ValueError, match="Wrong, version 0, gave a NaN"):
            bad.result()
        assert good.result()[1].tolist() == [0.0]
        assert scorer.stats().batch_sizes == {2: 2}  # they shared one
        bad, good = scorer.submit(batch(3, 0)), scorer.submit(batch(0, 0))
        with pytest.raises(SandboxError, match=r"can't score observations \[1, 2\]"):
            bad.result()
        assert good.result()[1].tolist() == [0.0]
        with pytest.raises(ValueError, match="numbers of one shape"):
            scorer.evaluate([{"image": 1}])
        with pytest.raises(ValueError, match="one observation or more"):
            scorer.evaluate([])
        scorer.timeout = 0.2
        with pytest.raises(SandboxTimeout, match="scores: no answer in time"):
            scorer.evaluate(batch(0, 0))


def test_replicas_that_die(cluster: Any) -> None:
    with PolicyScorer(MODULE, num_replicas=2, timeout=30) as scorer:
        ray.kill(scorer._replicas[0])
        for seed in range(4):
            check(scorer.evaluate(observations(2, seed)), observations(2, seed))
        scorer.set_weights(MODULE.state_dict(), version=3)
        assert scorer.stats().versions == [3]
        shared = ray.put(scorer)
        scorer.close()
        for gone in (scorer, ray.get(shared)):
            with pytest.raises(SandboxDied, match="make another PolicyScorer"):
                gone.evaluate(observations(1))
            with pytest.raises(SandboxDied, match="make another PolicyScorer"):
                gone.stats()


AFTER_RAY = """
import ray
import torch
from sandbox_gym.errors import SandboxDied
from sandbox_gym.ray import PolicyScorer

class Zeros(torch.nn.Module):
    def forward(self, observations):
        return torch.zeros(len(observations), 2), torch.zeros(len(observations))

scorer = PolicyScorer(Zeros())
scores = scorer.submit([[1.0]])
ray.shutdown()
for use in (scores.result, lambda: scorer.submit([[1.0]]), scorer.stats, lambda: scorer.set_weights({}, version=1)):
    try:
        use()
    except SandboxDied:
        continue
    raise AssertionError(use)
scorer.close()
assert not ray.is_initialized()
"""


def test_after_ray_was_shut_down(cluster: Any) -> None:
    """In a process of its own, since that of the tests stays connected. No call starts another Ray."""
    environment = {**os.environ, "RAY_ADDRESS": cluster.address}
    done = subprocess.run(
        [sys.executable, "-c", AFTER_RAY],
        check=False,
        env=environment,
        timeout=60,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_more_than_the_cluster_has(cluster: Any) -> None:
    with pytest.raises(BackendUnavailable, match="no node of the cluster has"):
        PolicyScorer(MODULE, gpus=1)
    with pytest.raises(BackendUnavailable, match="free in the cluster"):
        PolicyScorer(MODULE, num_replicas=9, timeout=0.5)


def test_a_gpu_that_torch_can_not_use(cluster: Any) -> None:
    """A node that says it has a GPU is asked for it, and torch, which has no CUDA here, is not trusted in silence."""
    node = cluster.add_node(num_cpus=1, num_gpus=1)
    try:
        cluster.wait_for_nodes()
        with pytest.raises(BackendUnavailable, match="install a torch with CUDA"):
            PolicyScorer(MODULE, timeout=30)
    finally:
        cluster.remove_node(node)
