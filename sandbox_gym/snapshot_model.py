"""A sandboxed environment as `sandbox_gym.search` sees it: states that are frozen copies of the guest."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np

from sandbox_gym._snapshot import Snapshot
from sandbox_gym.sandbox import Sandbox
from sandbox_gym.search.model import Playout, Transition

if TYPE_CHECKING:
    from sandbox_gym.env import SandboxEnv


@dataclass(frozen=True, slots=True)
class Frozen:
    """A state: a guest that was stopped where it stood, and the observation it had last given."""

    snapshot: Snapshot
    observation: Any


class SnapshotModel:
    """Searches from where `env` stands now. Its sandbox is captured once, for the root, and goes on; every other state
    is a copy that took one step and was frozen, so that an expansion costs one restore.

    Copies keep the random state of their origin: the same action from the same state gives the same result.

    Raises:
        TypeError: the action space isn't `Discrete`.
    """

    def __init__(self, env: SandboxEnv) -> None:
        space = env.action_space
        if not isinstance(space, gymnasium.spaces.Discrete):
            raise TypeError(f"search needs a Discrete action space; {env} has {space}")
        self.num_actions = int(space.n)
        self._first = int(space.start)
        self._number = np.dtype(space.dtype).type
        self._env = env
        self._remote = env._remote
        self._step_timeout = env._step_timeout

    @property
    def max_depth(self) -> int:
        """How deep states may nest below the root, which takes one level itself."""
        parent = self._env.sandbox.parent
        assert parent is not None
        return max(0, parent.depth_left - 1)

    def root(self) -> Frozen:
        env = self._env
        observation, _ = self._remote.reset(env.sandbox, timeout=self._step_timeout, what="again")
        return Frozen(env.snapshot("search root"), observation)

    def step(self, state: Frozen, action: int) -> Transition[Frozen]:
        return self.step_all(state, [action])[0]

    def step_all(self, state: Frozen, actions: Sequence[int]) -> list[Transition[Frozen]]:
        made: list[Transition[Frozen]] = []
        with ExitStack() as undo:  # what is to be taken back if a step raises; copies are, in any case
            copies = Sandbox.restore_many(state.snapshot, len(actions))
            for box in copies:
                undo.callback(box.terminate)
            for box, action in zip(copies, actions, strict=True):
                transition = self._advance(box, action)
                if transition.state is not None:
                    undo.callback(transition.state.snapshot.delete)
                made.append(transition)
            undo.pop_all()
            for box in copies:
                box.terminate()  # does nothing to those that were frozen
        return made

    def _advance(self, box: Sandbox, action: int) -> Transition[Frozen]:
        number = self._number(self._first + action)
        observation, reward, terminated, truncated, info = self._remote.step(
            box, number, timeout=self._step_timeout
        )
        kept = None if terminated or truncated else Frozen(box.freeze(), observation)
        return Transition(kept, reward, terminated, truncated, observation, info)

    def rollout(self, state: Frozen, *, max_steps: int, discount: float, seed: int) -> Playout:
        request = {"policy": "random", "max_steps": max_steps, "discount": discount, "seed": seed}
        with Sandbox.restore(state.snapshot) as box:
            played = self._remote.rollout(box, request, timeout=self._env.rollout_timeout(max_steps))
        return Playout(played.value, tuple(int(action) - self._first for action in played.actions))

    def observe(self, state: Frozen) -> Any:
        return state.observation

    def release(self, state: Frozen) -> None:
        state.snapshot.delete()
