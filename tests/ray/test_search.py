"""Search over a cluster finds what a search by itself finds, wherever its states are, whatever is lost on the way."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import ray
import torch

from sandbox_gym.backends import lookup
from sandbox_gym.errors import BackendUnavailable, SandboxDied, SandboxTimeout
from sandbox_gym.ray._search_remote import RemoteModel
from sandbox_gym.ray.scorer import PolicyScorer
from sandbox_gym.ray.search import leaf_parallel, root_parallel, search_all
from sandbox_gym.search import MCTS, Node, SearchResult, observation_key
from sandbox_gym.search.testing import TableModel, check_model

CARTPOLE: dict[str, Any] = {"env_id": "CartPole-v1"}
MINIGRID: dict[str, Any] = {
    "entry_point": "sandbox_gym.envs.fully_observable:make",
    "env_kwargs": {"env_id": "MiniGrid-DoorKey-5x5-v0"},
}
KEY = 5  # among MiniGrid's objects


@pytest.fixture(scope="module")
def cartpole() -> Iterator[gym.Env[Any, Any]]:
    """Some steps into an episode."""
    env = gym.make("sandbox_gym:Sandbox-v0", **CARTPOLE)
    env.reset(seed=3)
    for _ in range(5):
        env.step(0)
    yield env
    env.close()


@pytest.fixture(scope="module")
def minigrid() -> Iterator[gym.Env[Any, Any]]:
    env = gym.make("sandbox_gym:Sandbox-v0", **MINIGRID)
    env.reset(seed=1)
    yield env
    env.close()


def numbers(result: SearchResult) -> tuple[Any, ...]:
    return (
        result.action,
        result.value,
        result.visit_counts.tolist(),
        result.principal_variation,
        result.num_nodes,
    )


def free_cpus() -> float:
    return float(ray.available_resources().get("CPU", 0))


def wait_for_cpus(n: float) -> None:
    """Until what was started has ended."""
    for _ in range(200):
        if free_cpus() >= n:
            return
        threading.Event().wait(0.05)
    raise AssertionError(f"{free_cpus()} CPUs are free of {n}")


# ---- several trees, one scorer ----------------------------------------------------------------------------------


class Lean(torch.nn.Module):
    """Each observation by itself, without sums whose order a batch could change."""

    def forward(self, observations: Any) -> tuple[Any, Any]:
        lean = observations[:, 2]
        return torch.stack([-8 * lean, 8 * lean], dim=1), 1 - lean.abs()


def test_trees_that_share_a_scorer_find_what_each_finds_alone(cluster: Any, cartpole: Any) -> None:
    def evaluate(observations: list[Any]) -> tuple[Any, Any]:
        logits, values = Lean()(torch.tensor(np.array(observations)))
        return logits.numpy(), values.numpy()

    envs = cartpole.unwrapped.branch(3)
    try:
        for env, action in zip(envs, (0, 1, 1), strict=True):
            env.step(action)
        configs = [MCTS(num_simulations=40, batch_size=6, seed=seed) for seed in range(3)]
        with PolicyScorer(Lean(), max_wait=0, timeout=30) as scorer:
            together = search_all(envs, configs, scorer)
            assert scorer.stats().num_requests > 18
        alone = [replace(c, evaluate=evaluate).search(env) for c, env in zip(configs, envs, strict=True)]
        assert [numbers(result) for result in together] == [numbers(result) for result in alone]
    finally:
        for env in envs:
            env.close()


class Ledger:
    """Scores for a table's places, and how many batches were under way."""

    def __init__(self, *, fail_at: int = -1) -> None:
        self.under_way = 0
        self.most = 0
        self._left = fail_at

    def submit(self, observations: list[Any]) -> Any:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        ledger = self

        class Scores:
            def result(self) -> tuple[None, list[float]]:
                ledger.under_way -= 1
                ledger._left -= 1
                if ledger._left == 0:
                    raise OSError("no scores")
                return None, [float(place % 7) for place in observations]

        return Scores()


def table() -> TableModel:
    return TableModel(
        lambda place, action: (2 * place + action, 0.0, place > 500, False), num_actions=2, start=1
    )


def test_a_tree_that_waits_does_not_hold_up_the_others() -> None:
    models = [table() for _ in range(5)]
    ledger = Ledger()
    config = MCTS(num_simulations=50, batch_size=4)
    results = search_all(models, config, ledger)
    assert ledger.most == 5 and ledger.under_way == 0
    assert {result.num_simulations for result in results} == {50}
    assert len({str(numbers(result)) for result in results}) == 1
    assert search_all([], config, ledger) == []
    with pytest.raises(ValueError, match="2 environments need as many searches"):
        search_all(models[:2], [config], ledger)


def test_no_state_outlives_scores_that_fail() -> None:
    models = [table() for _ in range(3)]
    with pytest.raises(OSError, match="no scores"):
        search_all(models, MCTS(num_simulations=50, batch_size=4), Ledger(fail_at=9))
    assert [model.num_alive for model in models] == [0, 0, 0]
    assert all(model.most_alive > 3 for model in models)


# ---- several trees, one decision --------------------------------------------------------------------------------


@ray.remote(num_cpus=0)
class Places:
    """Where something was done."""

    def __init__(self) -> None:
        self._nodes: set[str] = set()

    def add(self, node: str) -> None:
        self._nodes.add(node)

    def all(self) -> set[str]:
        return self._nodes


def test_root_parallel_adds_up_what_the_searches_found(cluster: Any, cartpole: Any) -> None:
    places = Places.remote()  # type: ignore[attr-defined]

    def evaluate(observations: list[Any]) -> tuple[None, list[float]]:
        ray.get(places.add.remote(ray.get_runtime_context().get_node_id()), timeout=30)
        return None, [1 - abs(float(seen[2])) for seen in observations]

    mcts = MCTS(num_simulations=30, batch_size=4, evaluate=evaluate, seed=5)
    merged = root_parallel(cartpole, mcts, num_workers=3, timeout=60)
    assert len(ray.get(places.all.remote(), timeout=30)) == 2

    seeds = [int(np.random.SeedSequence([5, i]).generate_state(1)[0]) for i in range(3)]
    single = [replace(mcts, seed=seed).search(cartpole) for seed in seeds]
    counts = np.array([result.visit_counts for result in single])
    assert merged.visit_counts.tolist() == counts.sum(axis=0).tolist()
    assert merged.num_simulations == merged.visit_counts.sum() == 90
    assert merged.num_nodes == sum(result.num_nodes for result in single)
    assert merged.action == merged.principal_variation[0] == int(np.argmax(merged.visit_counts))
    assert merged.value == pytest.approx(np.mean([result.value for result in single]))
    q = sum(result.q_values * result.visit_counts for result in single) / merged.visit_counts
    np.testing.assert_allclose(merged.q_values, q)
    best = max(single, key=lambda result: result.visit_counts[merged.action])
    assert merged.principal_variation == [n.action for n in best.tree.best_line(merged.action)]
    assert merged.tree.root.visits == sum(result.tree.root.visits for result in single)


def test_root_parallel_finds_what_one_of_them_finds(cluster: Any, minigrid: Any) -> None:
    """The key is picked up: what `stop_when` met is brought back, with the way to it."""

    def carrying(node: Node) -> bool:
        return not (node.observation[..., 0] == KEY).any()

    mcts = MCTS(num_simulations=300, key=observation_key, stop_when=carrying, rollout_max_steps=0)
    result = root_parallel(minigrid, mcts, num_workers=2, timeout=60)
    assert result.found is not None
    assert result.num_simulations < 600
    env = minigrid.unwrapped.branch(1)[0]
    try:
        for action in result.principal_variation:
            observation, *_ = env.step(action)
        np.testing.assert_array_equal(observation, result.found.observation)
        assert not (observation[..., 0] == KEY).any()
    finally:
        env.close()


def test_root_parallel_ends_what_it_began(cluster: Any, cartpole: Any) -> None:
    before = free_cpus()

    def fail(observations: list[Any]) -> Any:
        raise OverflowError("one search fails")

    def wait(observations: list[Any]) -> Any:
        threading.Event().wait(60)

    with pytest.raises(OverflowError, match="one search fails"):
        root_parallel(cartpole, MCTS(evaluate=fail), num_workers=2, timeout=60)
    with pytest.raises(SandboxTimeout, match="root_parallel within 3 s: no answer in time"):
        root_parallel(cartpole, MCTS(evaluate=wait), num_workers=2, timeout=3)
    wait_for_cpus(before)
    with pytest.raises(TypeError, match="only the state of a sandboxed environment can travel, not CartPole"):
        root_parallel(gym.make("CartPole-v1"), MCTS(), num_workers=2)


# ---- one tree, states on the workers ----------------------------------------------------------------------------


def on_worker(model: RemoteModel, worker: int, function: Any) -> Any:
    return ray.get(model._workers[worker].__ray_call__.remote(function), timeout=30)


def test_states_on_workers_are_what_a_search_relies_on(cluster: Any, cartpole: Any) -> None:
    before = free_cpus()
    with RemoteModel(cartpole, num_workers=2, timeout=60) as model:
        nodes = [on_worker(model, w, lambda _: ray.get_runtime_context().get_node_id()) for w in (0, 1)]
        assert len(set(nodes)) == 2
        check_model(model)
        counts = [on_worker(model, worker, lambda it: len(it._states)) for worker in (0, 1)]
        assert counts == [0, 0]

        root = model.root()
        with pytest.raises(AssertionError):  # CartPole's own
            model.step_many([(root, [0, 7]), (root, [1])])
        assert [on_worker(model, worker, lambda it: len(it._states)) for worker in (0, 1)] == [0, 0]

        # What one has is made again at the other, and is the same.
        first = model.step(root, 1).state
        assert first is not None and len(first.holders) == 1
        here = model.step(first, 0)
        (holder,) = first.holders
        on_worker(model, holder, lambda _: lookup.shut_down())  # its supervisor, and every state there
        there = model.step(first, 0)
        np.testing.assert_array_equal(here.observation, there.observation)
        assert list(model._workers) == [1 - holder]
        on_worker(model, 1 - holder, lambda _: lookup.shut_down())
        with pytest.raises(SandboxDied):
            model.step(first, 0)
    wait_for_cpus(before)


def test_leaf_parallel_equals_the_search_by_itself(cluster: Any, minigrid: Any) -> None:
    mcts = MCTS(num_simulations=60, batch_size=8, rollout_max_steps=10, seed=2, max_snapshots=20)
    remote = leaf_parallel(minigrid, mcts, num_workers=2, timeout=60)
    assert numbers(remote) == numbers(mcts.search(minigrid))


def test_a_node_is_lost_in_the_middle(cluster: Any, cartpole: Any) -> None:
    """Each of three nodes has one of the states' workers; one goes, with every state that it had."""
    mcts = MCTS(num_simulations=60, batch_size=8, rollout_max_steps=10, seed=4)
    alone = mcts.search(cartpole)
    rest = ray.util.placement_group([{"CPU": 3}, {"CPU": 3}], strategy="STRICT_SPREAD")
    node = None
    try:
        ray.get(rest.ready(), timeout=30)
        node = cluster.add_node(num_cpus=1, object_store_memory=100 << 20)
        cluster.wait_for_nodes()

        def lose(n: int, tree: Any) -> None:
            nonlocal node
            if n == 30:
                node = cluster.remove_node(node)

        config = replace(mcts, on_simulation=lose)
        with RemoteModel(cartpole, num_workers=3, timeout=60) as model:
            assert numbers(config.search(model)) == numbers(alone)
            assert len(model._workers) == 2
        wait_for_cpus(2)
    finally:
        ray.util.remove_placement_group(rest)
        if node is not None:
            cluster.remove_node(node)


def test_leaf_parallel_where_there_is_no_room(cluster: Any, cartpole: Any) -> None:
    before = free_cpus()
    with pytest.raises(BackendUnavailable, match="free in the cluster"):
        leaf_parallel(cartpole, MCTS(), num_workers=9, timeout=2)
    wait_for_cpus(before)
