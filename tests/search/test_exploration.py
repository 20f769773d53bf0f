"""Sparse rewards: duplicate states are closed, novelty guides, and a real task that random play fails is solved."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from sandbox_gym.search import MCTS, PUCT, DeepcopyModel, Novelty, SearchResult, observation_key
from sandbox_gym.search.testing import TableModel, check_model


def place_of(observation: int) -> int:
    return observation


def corridor(place: int, action: int) -> tuple[int, float, bool, bool]:
    """Left, right, and three actions that do nothing; a reward only at the end of 12."""
    place = max(0, place + {0: -1, 1: 1}.get(action, 0))
    return place, float(place == 12), place == 12, False


def test_duplicates_are_closed_and_the_search_explores_the_graph() -> None:
    model = TableModel(corridor, num_actions=5)
    result = MCTS(
        num_simulations=100, key=place_of, rollout_max_steps=0, stop_when=lambda node: node.reward > 0
    ).search(model)
    assert result.principal_variation == [1] * 12
    # Twelve states, in each of which five actions are tried once at most.
    assert result.num_steps <= 12 * 5
    blind = MCTS(num_simulations=100, rollout_max_steps=0).search(TableModel(corridor, num_actions=5))
    assert max(node.depth for node in blind.tree) < 12


def test_an_exhausted_search_ends_early_and_knows_the_best_action() -> None:
    # Action 0 gives a reward and leads nowhere; action 1 leads to many places and to no reward.
    def rule(place: int, action: int) -> tuple[int, float, bool, bool]:
        if place == 0 and action == 0:
            return 100, 1.0, False, False
        return (place if place == 100 else min(place + 1, 30)), 0.0, False, False

    for policy in ("puct", "gumbel"):
        model = TableModel(rule, num_actions=2)
        result = MCTS(num_simulations=500, key=place_of, rollout_max_steps=0, action_selection=policy).search(
            model
        )
        assert result.num_simulations < 100
        assert result.tree.root.exhausted
        assert result.visit_counts[0] < result.visit_counts[1]
        assert result.action == 0
        assert model.num_alive == 0


def test_a_shorter_or_richer_way_to_a_known_state_is_not_closed() -> None:
    # Place 3 is found through 1 and 2 first, then directly, and directly with a reward.
    def rule(place: int, action: int) -> tuple[int, float, bool, bool]:
        ways = {(0, 0): 1, (1, 0): 2, (2, 0): 3, (0, 1): 3, (0, 2): 3}
        return ways.get((place, action), place), float((place, action) == (0, 2)), False, False

    def evaluate(observations: list[int]) -> tuple[list[list[float]], list[float]]:
        return [[4.0, 2.0, 0.0]] * len(observations), [float(place) for place in observations]

    result = MCTS(num_simulations=100, key=place_of, evaluate=evaluate).search(
        TableModel(rule, num_actions=3)
    )
    ways = [[n.action for n in node.path()] for node in result.tree if node.observation == 3 and node.visits]
    assert ways[0] == [0, 0, 0]
    assert [1] in ways and [2] in ways


def test_leaves_at_the_depth_limit_do_not_hold_exploration_up() -> None:
    model = TableModel(corridor, num_actions=5, max_depth=4)
    result = MCTS(num_simulations=500, key=place_of, rollout_max_steps=0).search(model)
    assert result.num_simulations < 50


def test_novelty_values_what_was_seldom_seen() -> None:
    evaluate = Novelty(scale=0.5)
    observations = [np.array([0, 0]), np.array([0, 0]), np.array([0, 1])]
    _, values = evaluate(observations)
    np.testing.assert_allclose(values, [0.5, 0.5 / np.sqrt(2), 0.5])
    _, values = evaluate(
        [{"a": (np.array([1, 2]), 3), "b": "text"}, {"a": (np.array([1, 2]), 3), "b": "new"}]
    )
    np.testing.assert_allclose(values, [0.5, 0.5])


def test_observation_key_tells_apart_what_differs() -> None:
    def observation(x: int) -> dict[str, Any]:
        return {"grid": np.array([[1, x]]), "rest": (x, "text"), "more": [np.float32(1)]}

    assert observation_key(observation(1)) == observation_key(observation(1))
    assert observation_key(observation(1)) != observation_key(observation(2))
    assert observation_key(np.zeros(4)) != observation_key(np.zeros((2, 2)))
    assert observation_key(np.zeros(2, np.int32)) != observation_key(np.zeros(1, np.int64))
    with pytest.raises(TypeError, match="key function"):
        observation_key({1, 2})


def test_key_needs_to_know_the_root() -> None:
    env = gym.make("CartPole-v1")
    env.reset(seed=0)
    with pytest.raises(ValueError, match="observation=obs"):
        MCTS(key=observation_key).search(env)


def doorkey(seed: int) -> tuple[gym.Env[Any, Any], DeepcopyModel]:
    from minigrid.wrappers import FullyObsWrapper

    wrapper: Any = FullyObsWrapper  # untyped
    env = wrapper(gym.make("MiniGrid-DoorKey-6x6-v0"))
    observation, _ = env.reset(seed=seed)
    return env, DeepcopyModel(env, observation=observation, max_depth=28)


def solve_doorkey(model: DeepcopyModel) -> SearchResult:
    return MCTS(
        num_simulations=2_000,
        key=observation_key,
        evaluate=Novelty(),
        action_selection=PUCT(pb_c_init=5),
        stop_when=lambda node: node.reward > 0,
    ).search(model)


def test_doorkey_is_solved_where_random_play_fails() -> None:
    env, model = doorkey(seed=4)
    check_model(model, same=lambda one, other: observation_key(one) == observation_key(other))
    result = solve_doorkey(model)
    assert result.found is not None
    assert result.num_steps < 1_000
    # Random play, with as many steps and the episode begun anew whenever it ends.
    rng, random_env = np.random.default_rng(0), doorkey(seed=4)[0]
    for _ in range(result.num_steps):
        _, reward, terminated, truncated, _ = random_env.step(rng.integers(7))
        assert reward == 0
        if terminated or truncated:
            random_env.reset(seed=4)
    reward = 0.0
    for action in result.principal_variation:
        _, reward, terminated, _, _ = env.step(action)
    assert terminated and float(reward) > 0
