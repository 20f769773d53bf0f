"""Environments that act on their sandbox from outside, as `sandbox_gym.search` sees them: states are frozen branches.

What `snapshot_model` is for environments that live inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np

from sandbox_gym._snapshot import Snapshot
from sandbox_gym.acting import ActingEnv
from sandbox_gym.sandbox import Sandbox
from sandbox_gym.search.model import Playout, Transition

_ANY_DEPTH = 1_000_000


@dataclass(frozen=True, slots=True)
class Moment:
    """A state: a sandbox that was stopped where it stood, and the observation last given."""

    snapshot: Snapshot
    observation: Any


class BranchModel:
    """Searches from where `env` stands now, which goes on. It is an ActingEnv with Discrete actions.

    `root` raises gymnasium.error.ResetNeeded where no episode has begun, or it is over; the constructor TypeError.
    """

    def __init__(self, env: Any) -> None:
        space = env.action_space
        if not isinstance(space, gymnasium.spaces.Discrete) or not isinstance(env, ActingEnv):
            raise TypeError(f"search needs an environment with a Discrete action space, not {env}, {space}")
        self.num_actions = int(space.n)
        self._first = int(space.start)
        self._env: Any = env
        self._depth_left: int | None = None

    @property
    def max_depth(self) -> int:
        """How deep states may nest below the root and still be played on from."""
        if self._env.sandbox._backend.any_depth:
            return _ANY_DEPTH
        if self._depth_left is None:
            parent = self._env.sandbox.parent
            return max(0, int(parent.depth_left) - 2)
        return max(0, self._depth_left - 1)

    def root(self) -> Moment:
        snapshot = self._env.snapshot("search root")
        self._depth_left = snapshot.depth_left
        return Moment(snapshot, self._env.observation())

    def step(self, state: Moment, action: int) -> Transition[Moment]:
        return self.step_all(state, [action])[0]

    def step_all(self, state: Moment, actions: Sequence[int]) -> list[Transition[Moment]]:
        made: list[Transition[Moment]] = []
        try:
            for action in actions:
                made.append(self._advance(state, action))
        except BaseException:
            for transition in made:
                if transition.state is not None:
                    self.release(transition.state)
            raise
        return made

    def rollout(self, state: Moment, *, max_steps: int, discount: float, seed: int) -> Playout:
        rng = np.random.default_rng(seed)
        value, weight, actions = 0.0, 1.0, list[int]()
        child = self._branch(state)
        try:
            over = False
            while len(actions) < max_steps and not over:
                actions.append(int(rng.integers(self.num_actions)))
                _, reward, terminated, truncated, _ = child.step(self._first + actions[-1])
                over = terminated or truncated
                value += weight * reward
                weight *= discount
        finally:
            child.close()
        return Playout(value, tuple(actions))

    def observe(self, state: Moment) -> Any:
        return state.observation

    def release(self, state: Moment) -> None:
        state.snapshot.delete()

    def _advance(self, state: Moment, action: int) -> Transition[Moment]:
        child = self._branch(state)
        try:
            observation, reward, terminated, truncated, info = child.step(self._first + action)
            over = terminated or truncated
            kept = None if over else Moment(child.freeze(), observation)
            return Transition(kept, reward, terminated, truncated, observation, info)
        finally:
            child.close()  # what was frozen stays

    def _branch(self, state: Moment) -> Any:
        child = self._env._adopt(Sandbox.restore(state.snapshot), None)
        try:
            child._recall(state.snapshot)
        except BaseException:
            child.close()
            raise
        return child
