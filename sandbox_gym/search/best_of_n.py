"""Best of n: independent playouts, of which the one with the greatest return is kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from sandbox_gym.search.model import Model, as_model
from sandbox_gym.search.result import SearchResult, make_result
from sandbox_gym.search.states import States
from sandbox_gym.search.tree import Node, Tree

PolicyFunction = Callable[[Any, np.random.Generator], int]


def best_of_n(
    env: object,
    *,
    n: int = 16,
    max_steps: int = 100,
    discount: float = 1.0,
    policy: PolicyFunction | None = None,
    seed: int = 0,
) -> SearchResult:
    """Plays `n` times from the present state of `env` and keeps the playout with the greatest discounted return.

    Its actions are the principal variation, and its return is `value`. No state outlives the call.

    Args:
        env: whatever `as_model` takes; left as it is.
        n: number of playouts.
        max_steps: the length of each at most.
        discount: of rewards, for each step.
        policy: from an observation and a generator to an action. It is stepped from here, state by state, so no
            deeper than the model's `max_depth`; playouts that begin alike share their nodes. None: uniformly random
            actions, played where the states are, with the first actions spread evenly.
        seed: equal seeds give equal results.

    Raises:
        ValueError: `n` or `max_steps` isn't positive.
    """
    if n < 1 or max_steps < 1:
        raise ValueError(f"n and max_steps must be at least 1, not {n} and {max_steps}")
    model = as_model(env)
    tree = Tree(model.num_actions, discount)
    # The path of one playout, the root, and every first action.
    states = States(model, tree, max_snapshots=model.num_actions + 3)
    rng = np.random.default_rng(seed)
    best: tuple[float, list[Node], tuple[int, ...]] | None = None
    try:
        states.start()
        for i in range(n):
            if policy is None:
                played = _random_playout(model, tree, states, i, max_steps, rng)
            else:
                played = _policy_playout(model, tree, states, policy, max_steps, rng)
            if best is None or played[0] > best[0]:
                best = played
    finally:
        states.release_all()
    assert best is not None
    value, line, tail = best
    return make_result(tree, line, value=value, tail=tail, num_simulations=n, num_steps=states.num_steps)


def _random_playout(
    model: Model[Any], tree: Tree, states: States, i: int, max_steps: int, rng: np.random.Generator
) -> tuple[float, list[Node], tuple[int, ...]]:
    if i == 0:
        states.pinned.update(states.expand(tree.root, list(range(model.num_actions))))
    child = tree.root.children[i % model.num_actions]
    value, actions = 0.0, tuple[int, ...]()
    if not child.ended and max_steps > 1:
        value, actions = model.rollout(
            states.get(child), max_steps=max_steps - 1, discount=tree.discount, seed=int(rng.integers(2**32))
        )
    tree.backup(child, value)
    return child.reward + tree.discount * value, [child], actions


def _policy_playout(
    model: Model[Any],
    tree: Tree,
    states: States,
    policy: PolicyFunction,
    max_steps: int,
    rng: np.random.Generator,
) -> tuple[float, list[Node], tuple[int, ...]]:
    node = tree.root
    while not node.ended and node.depth < min(max_steps, model.max_depth):
        observation = model.observe(states.get(node)) if node.parent is None else node.observation
        action = int(policy(observation, rng))
        node = node.children.get(action) or states.expand(node, [action])[0]
    tree.backup(node, 0.0)
    return node.path_return, node.path(), ()
