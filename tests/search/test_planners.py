"""Best-of-n, beam search, and what can be searched at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from sandbox_gym import search
from sandbox_gym.search import MCTS, DeepcopyModel, Model, SearchResult, as_model, beam_search, best_of_n
from sandbox_gym.search.testing import TableModel, check_model


def counter(place: int, action: int) -> tuple[int, float, bool, bool]:
    """Seven binary digits, rewarded by their sum, the greatest for all ones."""
    depth, ones = divmod(place, 100)
    depth, ones = depth + 1, ones + action
    return depth * 100 + ones, float(ones if depth == 7 else 0), depth == 7, False


def trap(place: int, action: int) -> tuple[int, float, bool, bool]:
    """Action 0 gives 1 and ends; action 1 costs 0.5 twice and then gives 10."""
    if action == 0:
        return place, 1.0, True, False
    return place + 1, (10.0 if place == 2 else -0.5), place == 2, False


def test_best_of_n_keeps_the_best_playout() -> None:
    model = TableModel(counter, num_actions=2)
    result = best_of_n(model, n=200, max_steps=10)
    assert result.principal_variation == [1] * 7
    assert result.value == 7.0
    assert result.visit_counts.tolist() == [100, 100]
    assert best_of_n(model, n=1).principal_variation[0] == 0
    assert model.num_alive == 0
    # One state of the root and one of each first action; the playouts make none.
    assert model.most_alive == 3


def test_best_of_n_plays_a_policy() -> None:
    def policy(observation: int, rng: np.random.Generator) -> int:
        return int(rng.random() < 0.7)

    model = TableModel(counter, num_actions=2)
    result = best_of_n(model, n=30, policy=policy, seed=1)
    assert result.value == sum(result.principal_variation) >= 6
    assert len(result.principal_variation) == 7
    assert model.num_alive == 0
    assert model.most_alive <= 5
    assert best_of_n(model, n=3, policy=policy, max_steps=2).num_nodes <= 7


def test_best_of_n_releases_when_the_policy_raises() -> None:
    def policy(observation: int, rng: np.random.Generator) -> int:
        raise KeyboardInterrupt

    model = TableModel(counter, num_actions=2)
    with pytest.raises(KeyboardInterrupt):
        best_of_n(model, policy=policy)
    assert model.num_alive == 0


def test_beam_search_finds_the_best_line() -> None:
    model = TableModel(counter, num_actions=2)
    result = beam_search(model, width=3, depth=7, score=lambda node: node.observation % 100)
    assert result.principal_variation == [1] * 7
    assert result.value == pytest.approx(7 * 0.99**6)
    assert model.num_alive == 0
    assert model.most_alive <= 2 * 3 + 2 + 1


def test_beam_search_is_greedy_at_width_one_and_not_beyond() -> None:
    for width in (1, 2):
        result = beam_search(TableModel(trap, num_actions=2), width=width, discount=1.0)
        assert result.principal_variation == [1, 1, 1]
        assert result.value == 9.0


def test_beam_search_returns_no_state_that_all_lines_left() -> None:
    # Every second step ends the episode at a cost: the states before it score higher, and are no result.
    model = TableModel(lambda p, a: (p + 1, -1.0, p == 1, False), num_actions=2)
    assert len(beam_search(model, width=4).principal_variation) == 2


def test_beam_search_drops_duplicates() -> None:
    def rule(place: int, action: int) -> tuple[int, float, bool, bool]:
        place = max(0, place + (action == 1) - (action == 0))
        return place, float(place == 9), place == 9, False

    model = TableModel(rule, num_actions=4)
    result = beam_search(
        model, width=2, depth=50, key=lambda place: place, stop_when=lambda node: node.reward > 0
    )
    assert result.principal_variation == [1] * 9
    assert result.found is not None
    assert result.num_steps == 9 * 4


def test_beam_search_ends_where_nothing_is_new() -> None:
    with pytest.raises(RuntimeError, match="no action"):
        beam_search(TableModel(lambda p, a: (p, 0.0, False, False), num_actions=2), key=lambda place: place)


@pytest.mark.parametrize("call", [lambda m: best_of_n(m, n=0), lambda m: beam_search(m, width=0)])
def test_sizes_are_checked(call: Callable[[Any], SearchResult]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        call(TableModel(counter, num_actions=2))


@pytest.mark.parametrize("call", [MCTS().search, best_of_n, beam_search])
def test_a_model_without_depth_is_refused(call: Callable[[Any], SearchResult]) -> None:
    model = TableModel(counter, num_actions=2, max_depth=0)
    with pytest.raises(RuntimeError, match="max_depth"):
        call(model)
    assert model.most_alive == 0


def test_a_model_is_used_as_it_is_and_an_environment_offers_its_own() -> None:
    model = TableModel(counter, num_actions=2)

    class Offers(gym.Env[Any, Any]):
        action_space = gym.spaces.Discrete(2)

        def search_model(self) -> Model[int]:
            return model

    assert as_model(model) is model
    assert as_model(Offers()) is model
    assert as_model(gym.Wrapper(Offers())) is model


def test_what_can_not_be_searched_is_told_what_to_do() -> None:
    with pytest.raises(TypeError, match="search_model"):
        as_model("CartPole-v1")
    with pytest.raises(TypeError, match="Discrete"):
        as_model(gym.make("Pendulum-v1"))


def test_deep_copies_leave_the_environment_as_it_is() -> None:
    env = gym.make("CartPole-v1")
    observation, _ = env.reset(seed=3)
    model = as_model(env)
    assert isinstance(model, DeepcopyModel)
    check_model(DeepcopyModel(env, observation=observation))
    searched = MCTS(num_simulations=30).search(env)
    twin = gym.make("CartPole-v1")
    twin.reset(seed=3)
    np.testing.assert_array_equal(env.step(searched.action)[0], twin.step(searched.action)[0])


def test_mcts_balances_the_pole() -> None:
    env = gym.make("CartPole-v1")
    env.reset(seed=0)
    for _ in range(40):
        action = MCTS(num_simulations=12, rollout_max_steps=30).search(env).action
        assert not env.step(action)[2]


def test_actions_count_from_zero_whatever_the_space_starts_at() -> None:
    class Shifted(gym.Env[Any, Any]):
        action_space = gym.spaces.Discrete(2, start=5)
        observation_space = gym.spaces.Discrete(8)

        def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
            return 0, {5: 0.0, 6: 1.0}[action], False, False, {}

    assert MCTS(num_simulations=20, rollout_max_steps=2).search(Shifted()).action == 1


def test_all_is_what_is_exported() -> None:
    exported = {name for name in vars(search) if not name.startswith("_") and name in search.__all__}
    assert exported == set(search.__all__)
