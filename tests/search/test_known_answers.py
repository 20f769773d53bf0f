"""Searches of small decision problems whose answers are known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sandbox_gym.search import MCTS, PUCT, Gumbel, Node
from sandbox_gym.search.testing import Rule, TableModel

POLICIES = ["puct", "gumbel"]


def bandit(place: int, action: int) -> tuple[int, float, bool, bool]:
    return place, [0.1, 0.9, 0.5][action], True, False


def chain(place: int, action: int) -> tuple[int, float, bool, bool]:
    """Action 1 walks to the goal at 2; action 0 takes 0.1 and ends."""
    if action == 0:
        return place, 0.1, True, False
    return place + 1, float(place + 1 == 2), place + 1 == 2, False


def zeros(observations: list[Any]) -> tuple[None, list[float]]:
    return None, [0.0] * len(observations)


@pytest.mark.parametrize("policy", POLICIES)
def test_bandit(policy: str) -> None:
    result = MCTS(num_simulations=60, action_selection=policy).search(TableModel(bandit, num_actions=3))
    assert result.action == 1
    assert result.visit_counts.sum() == result.num_simulations == 60
    np.testing.assert_allclose(result.q_values, [0.1, 0.9, 0.5])
    assert result.principal_variation == [1]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("discount", "action"), [(0.9, 1), (0.05, 0)])
def test_chain_is_walked_unless_the_goal_is_discounted_away(
    policy: str, discount: float, action: int
) -> None:
    mcts = MCTS(num_simulations=300, discount=discount, action_selection=policy, seed=1)
    result = mcts.search(TableModel(chain, num_actions=2))
    assert result.action == action
    if action == 1:
        assert result.principal_variation == [1] * 2
        # The line's own return is 0.9; the mean lies below it for what was explored.
        assert 0.6 < result.q_values[1] < 0.9


def test_value_of_one_line_is_exact() -> None:
    model = TableModel(lambda place, _: (place + 1, 1.0, place == 3, False), num_actions=1)
    result = MCTS(num_simulations=1, discount=0.5, rollout_max_steps=10).search(model)
    # Both the root's playout and the one below it see rewards 1, 1/2, 1/4, 1/8.
    assert result.value == pytest.approx(1.875)
    assert result.q_values[0] == pytest.approx(1.875)


def ended(*, truncated: bool) -> Rule:
    return lambda place, action: (7, 0.0, not truncated, truncated)


def test_terminated_is_worth_nothing_and_truncated_what_evaluate_says() -> None:
    def evaluate(observations: list[Any]) -> tuple[None, list[float]]:
        return None, [5.0 if observation == 7 else 0.0 for observation in observations]

    for truncated, q in ((False, 0.0), (True, 2.5)):
        model = TableModel(ended(truncated=truncated), num_actions=2)
        result = MCTS(num_simulations=8, discount=0.5, evaluate=evaluate).search(model)
        np.testing.assert_allclose(result.q_values, [q, q])


def test_truncated_is_worth_nothing_to_playouts() -> None:
    result = MCTS(num_simulations=8).search(TableModel(ended(truncated=True), num_actions=2))
    np.testing.assert_allclose(result.q_values, [0.0, 0.0])


def test_prior_leads_where_values_say_nothing() -> None:
    def evaluate(observations: list[Any]) -> tuple[list[list[float]], list[float]]:
        return [[0.0, 3.0, -np.inf]] * len(observations), [0.0] * len(observations)

    model = TableModel(lambda place, action: (place + action + 1, 0.0, False, False), num_actions=3)
    for policy in POLICIES:
        result = MCTS(num_simulations=40, evaluate=evaluate, action_selection=policy).search(model)
        assert result.action == 1
        assert result.visit_counts[2] == 0, "a logit of -inf marks an invalid action"
        assert np.isnan(result.q_values[2])


def test_no_valid_action_is_an_error() -> None:
    model = TableModel(bandit, num_actions=3)
    with pytest.raises(RuntimeError, match="no action"):
        MCTS(evaluate=lambda seen: ([[-np.inf] * 3] * len(seen), [0.0] * len(seen))).search(model)
    assert model.num_alive == 0


@pytest.mark.parametrize(
    ("logits", "values", "message"),
    [
        ([[0.0, 0.0]], [0.0], "shape"),
        ([[0.0, 0.0, 0.0]], [0.0, 0.0], "shape"),
        ([[0.0, 0.0, np.nan]], [0.0], "NaN"),
        ([[0.0, 0.0, 0.0]], [np.inf], "infinite"),
    ],
)
def test_evaluation_is_checked(logits: list[list[float]], values: list[float], message: str) -> None:
    model = TableModel(bandit, num_actions=3)
    with pytest.raises(ValueError, match=message):
        MCTS(evaluate=lambda _: (logits, values)).search(model)
    assert model.num_alive == 0


# The same problem and evaluation searched by mctx 0.0.71 (jax 0.10.2), without noise.
@pytest.mark.parametrize(
    ("policy", "num_simulations", "visits", "value", "q"),
    [
        (Gumbel(gumbel_scale=0), 12, [1, 1, 5, 5], 1.3658365, [0.9412699, 0.2396826, 1.6750693, 1.4684867]),
        (Gumbel(gumbel_scale=0), 30, [3, 3, 12, 12], 2.1452630, [1.1339365, 0.6704444, 2.5381334, 2.4812715]),
        (PUCT(), 12, [0, 0, 11, 1], 2.0668263, [np.nan, np.nan, 2.2977357, 0.7365079]),
        (PUCT(), 30, [0, 1, 27, 2], 2.4818220, [np.nan, 0.2396826, 2.7542670, 0.7372222]),
    ],
)
def test_equals_mctx(
    policy: PUCT | Gumbel, num_simulations: int, visits: list[int], value: float, q: list[float]
) -> None:
    def evaluate(observations: list[Any]) -> tuple[list[list[float]], list[float]]:
        logits = [[(p * 3 + a * a * 2) % 5 / 2.5 + a * 0.01 for a in range(4)] for p in observations]
        return logits, [(p * 5 + 3) % 7 / 7 for p in observations]

    model = TableModel(
        lambda p, a: ((3 * p + a + 1) % 11, (p * 7 + a * 5) % 9 / 9, False, False), num_actions=4, start=2
    )
    mcts = MCTS(num_simulations=num_simulations, discount=0.9, evaluate=evaluate, action_selection=policy)
    result = mcts.search(model)
    assert result.visit_counts.tolist() == visits
    assert result.action == 2
    np.testing.assert_allclose(result.value, value, rtol=1e-5)
    np.testing.assert_allclose(result.q_values, q, rtol=1e-5)


def test_stops_at_the_node_that_was_wanted() -> None:
    def at_goal(node: Node) -> bool:
        return node.reward >= 1

    model = TableModel(
        lambda place, a: (place + 1, float(place == 4), not a or place == 4, False), num_actions=2
    )
    result = MCTS(num_simulations=500, evaluate=zeros, stop_when=at_goal).search(model)
    assert result.found is not None and result.found.terminated
    assert result.principal_variation[:4] == [1] * 4
    assert len(result.principal_variation) == 5
    assert result.num_simulations < 500


def test_leaves_at_the_depth_limit_are_evaluated_and_not_expanded() -> None:
    model = TableModel(lambda place, action: (place + action, 0.0, False, False), num_actions=2, max_depth=3)
    result = MCTS(num_simulations=200).search(model)
    assert max(node.depth for node in result.tree) == 3
    assert len(result.tree) == 15
    assert result.visit_counts.sum() == 200
    assert MCTS(max_depth=2, num_simulations=50).search(model).num_nodes == 7


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_simulations": 0}, "num_simulations"),
        ({"batch_size": 0}, "batch_size"),
        ({"discount": 1.5}, "discount"),
        ({"max_depth": 0}, "max_depth"),
        ({"max_snapshots": 4, "batch_size": 3}, "max_snapshots"),
        ({"action_selection": "ucb"}, "gumbel"),
    ],
)
def test_settings_are_checked(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MCTS(**wrong)
