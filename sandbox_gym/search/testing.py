"""For tests of searches and of models: a model of plain integers, and a check that any model can be held to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sandbox_gym.search.model import Model, ParallelModel, Playout, Transition

Rule = Callable[[int, int], tuple[int, float, bool, bool]]


class TableModel:
    """A model whose states are integers, moved by `rule(place, action) -> (place, reward, terminated, truncated)`.

    Each state it gives out is a number of its own, so that it knows which are alive, and refuses those that aren't.

    Attributes:
        num_alive: states given out and not released.
        most_alive: the greatest `num_alive` there has been.
        num_steps: steps taken, playouts not counted.
    """

    def __init__(self, rule: Rule, *, num_actions: int, start: int = 0, max_depth: int = 1_000) -> None:
        self.num_actions = num_actions
        self.max_depth = max_depth
        self.most_alive = 0
        self.num_steps = 0
        self._rule = rule
        self._start = start
        self._places: dict[int, int] = {}
        self._made = 0

    @property
    def num_alive(self) -> int:
        return len(self._places)

    def root(self) -> int:
        return self._give(self._start)

    def step(self, state: int, action: int) -> Transition[int]:
        self.num_steps += 1
        place, reward, terminated, truncated = self._rule(self._places[state], action)
        made = None if terminated or truncated else self._give(place)
        return Transition(made, reward, terminated, truncated, place, {})

    def step_all(self, state: int, actions: Sequence[int]) -> list[Transition[int]]:
        return [self.step(state, action) for action in actions]

    def rollout(self, state: int, *, max_steps: int, discount: float, seed: int) -> Playout:
        place, rng = self._places[state], np.random.default_rng(seed)
        value, weight = 0.0, 1.0
        actions: list[int] = []
        for _ in range(max_steps):
            actions.append(int(rng.integers(self.num_actions)))
            place, reward, terminated, truncated = self._rule(place, actions[-1])
            value += weight * reward
            weight *= discount
            if terminated or truncated:
                break
        return Playout(value, tuple(actions))

    def observe(self, state: int) -> int:
        return self._places[state]

    def release(self, state: int) -> None:
        del self._places[state]

    def _give(self, place: int) -> int:
        self._made += 1
        self._places[self._made] = place
        self.most_alive = max(self.most_alive, len(self._places))
        return self._made


def check_model(model: Model[Any], *, same: Callable[[Any, Any], bool] = np.array_equal) -> None:
    """Holds a model to what search relies on, in its present state, in which no action may end the episode.

    `same` compares observations. Everything it made is released.

    Raises:
        AssertionError: what isn't as `Model` says.
    """
    actions = list(range(model.num_actions))
    root = model.root()
    owned = [root]
    try:
        at_root = model.observe(root)
        first = [model.step(root, action) for action in actions]
        owned += [step.state for step in first]
        assert all(step.state is not None for step in first), (
            "an action ended the episode: check another state"
        )
        again = model.step_all(root, actions)
        owned += [step.state for step in again]
        assert len(again) == len(actions), "step_all gives one transition for each action"
        for action, one, other in zip(actions, first, again, strict=True):
            assert one.reward == other.reward, f"action {action} gave another reward the second time"
            assert same(one.observation, other.observation), (
                f"action {action} gave another observation in step_all"
            )
            assert same(model.observe(one.state), one.observation), (
                f"observe differs from what action {action} gave"
            )
        assert same(model.observe(root), at_root), "stepping changed the state that was stepped"
        played = model.rollout(root, max_steps=5, discount=0.5, seed=1)
        assert played == model.rollout(root, max_steps=5, discount=0.5, seed=1), (
            "the same seed gave another playout"
        )
        assert 1 <= len(played.actions) <= 5, "a playout takes at least one action, and max_steps at most"
        assert set(played.actions) <= set(actions), (
            "a playout gives its actions as the search counts them, from 0"
        )
        assert same(model.observe(root), at_root), "a playout changed the state that it began from"
        value, weight, state = 0.0, 1.0, root
        for action in played.actions:
            step = model.step(state, action)
            value, weight = value + weight * step.reward, weight * 0.5
            if step.state is None:
                break
            state = step.state
            owned.append(state)
        assert np.isclose(value, played.value), "the playout's actions, taken one by one, gave another return"
        if isinstance(model, ParallelModel):
            jobs = [(root, actions), (first[0].state, actions[:1]), (root, actions[:1])]
            many = model.step_many(jobs)
            owned += [step.state for steps in many for step in steps]
            for (state, taken), steps in zip(jobs, many, strict=True):
                for action, step in zip(taken, steps, strict=True):
                    other = model.step(state, action)
                    owned.append(other.state)
                    assert step.reward == other.reward and same(step.observation, other.observation), (
                        f"action {action} gave something else in step_many"
                    )
            both = model.rollout_many([root, first[0].state], max_steps=5, discount=0.5, seeds=[1, 2])
            below = model.rollout(first[0].state, max_steps=5, discount=0.5, seed=2)
            assert both == [played, below], "the same seeds gave other playouts in rollout_many"
    finally:
        for state in owned:
            if state is not None:
                model.release(state)
