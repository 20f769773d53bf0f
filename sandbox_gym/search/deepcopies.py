"""The model for environments that `copy.deepcopy` can copy: no isolation, no sandbox. For tests and as a peer."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np

from sandbox_gym.search.model import Playout, Transition

_UNKNOWN = object()


@dataclass(frozen=True, slots=True)
class EnvCopy:
    """A copy of the environment and the observation it last gave."""

    env: gymnasium.Env[Any, Any]
    observation: Any


class DeepcopyModel:
    """Searches deep copies of `env`.

    A Gymnasium environment doesn't say what it last observed, so an `evaluate` or `key` function, which is shown
    the root too, needs that `observation` passed here.

    Raises:
        TypeError: the action space isn't `Discrete`.
    """

    def __init__(
        self, env: gymnasium.Env[Any, Any], *, observation: Any = _UNKNOWN, max_depth: int = 1_000_000
    ) -> None:
        space = env.action_space
        if not isinstance(space, gymnasium.spaces.Discrete):
            raise TypeError(f"search needs a Discrete action space; {env} has {space}")
        self.num_actions = int(space.n)
        self.max_depth = max_depth
        self._start = int(space.start)
        self._env = env
        self._observation = observation

    def root(self) -> EnvCopy:
        return EnvCopy(copy.deepcopy(self._env), self._observation)

    def step(self, state: EnvCopy, action: int) -> Transition[EnvCopy]:
        env = copy.deepcopy(state.env)
        observation, reward, terminated, truncated, info = env.step(self._start + action)
        kept = None if terminated or truncated else EnvCopy(env, observation)
        return Transition(kept, float(reward), bool(terminated), bool(truncated), observation, info)

    def step_all(self, state: EnvCopy, actions: Sequence[int]) -> list[Transition[EnvCopy]]:
        return [self.step(state, action) for action in actions]

    def rollout(self, state: EnvCopy, *, max_steps: int, discount: float, seed: int) -> Playout:
        env = copy.deepcopy(state.env)
        rng = np.random.default_rng(seed)
        value, weight = 0.0, 1.0
        actions: list[int] = []
        for _ in range(max_steps):
            actions.append(int(rng.integers(self.num_actions)))
            _, reward, terminated, truncated, _ = env.step(self._start + actions[-1])
            value += weight * float(reward)
            weight *= discount
            if terminated or truncated:
                break
        return Playout(value, tuple(actions))

    def observe(self, state: EnvCopy) -> Any:
        if state.observation is _UNKNOWN:
            raise ValueError(
                "the observation at the root is not known: search DeepcopyModel(env, observation=obs), "
                "with obs as reset() or step() gave it"
            )
        return state.observation

    def release(self, state: EnvCopy) -> None:
        """Nothing to give back: the copy goes with its last reference. Closing it could close what copies share."""
