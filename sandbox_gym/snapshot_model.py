"""A sandboxed environment as `sandbox_gym.search` sees it: states that are frozen copies of the guest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np

from sandbox_gym._snapshot import Snapshot
from sandbox_gym.sandbox import Sandbox
from sandbox_gym.search.model import Playout, Transition

if TYPE_CHECKING:
    from sandbox_gym.env import SandboxEnv


_ANY_DEPTH = 1_000_000
_LEVELS = 16  # of a search tree that nest without any of its states being rebased


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

    `root` raises gymnasium.error.ResetNeeded where no episode has begun, or it is over.
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
        self._root: Snapshot | None = None
        self._num_alive = 0
        self._player: Sandbox | None = (
            None  # the one sandbox that all playouts rewind; goes with the last state
        )

    @property
    def max_depth(self) -> int:
        """How deep states may nest below the root and still be played on from."""
        if self._env.sandbox._backend.any_depth:
            return _ANY_DEPTH
        if self._root is not None:
            return max(0, self._root.depth_left - 1)
        parent = self._env.sandbox.parent
        assert parent is not None
        return max(0, parent.depth_left - 2)

    def root(self) -> Frozen:
        env = self._env
        observation, _ = self._remote.reset(env.sandbox, timeout=self._step_timeout, what="again")
        now = self._remote.rollout(env.sandbox, {"actions": []}, timeout=self._step_timeout)
        if now.terminated or now.truncated:
            raise gymnasium.error.ResetNeeded(
                "the episode is over, and there is nothing to search: env.reset()"
            )
        self._root = env.sandbox._take(keep=True, label="search root", levels=_LEVELS)
        return self._give(self._root, observation)

    def step(self, state: Frozen, action: int) -> Transition[Frozen]:
        return self.step_all(state, [action])[0]

    def step_all(self, state: Frozen, actions: Sequence[int]) -> list[Transition[Frozen]]:
        made: list[Transition[Frozen]] = []
        copies = Sandbox.restore_many(state.snapshot, len(actions))
        try:
            for box, action in zip(copies, actions, strict=True):
                made.append(self._advance(box, action))
        except BaseException:
            for transition in made:
                if transition.state is not None:
                    self.release(transition.state)
            raise
        finally:
            for box in copies:
                box.terminate()  # does nothing to those that were frozen
        return made

    def _advance(self, box: Sandbox, action: int) -> Transition[Frozen]:
        number = self._number(self._first + action)
        observation, reward, terminated, truncated, info = self._remote.step(
            box, number, timeout=self._step_timeout
        )
        kept = None if terminated or truncated else self._give(box.freeze(), observation)
        return Transition(kept, reward, terminated, truncated, observation, info)

    def rollout(self, state: Frozen, *, max_steps: int, discount: float, seed: int) -> Playout:
        request = {"policy": "random", "max_steps": max_steps, "discount": discount, "seed": seed}
        if self._player is None:
            self._player = Sandbox.restore(state.snapshot)
        else:
            self._player.rewind(state.snapshot)
        played = self._remote.rollout(self._player, request, timeout=self._env.rollout_timeout(max_steps))
        return Playout(played.value, tuple(int(action) - self._first for action in played.actions))

    def observe(self, state: Frozen) -> Any:
        return state.observation

    def release(self, state: Frozen) -> None:
        state.snapshot.delete()
        self._num_alive -= 1
        if self._num_alive == 0 and self._player is not None:
            player, self._player = self._player, None
            player.terminate()

    def _give(self, snapshot: Snapshot, observation: Any) -> Frozen:
        self._num_alive += 1
        return Frozen(snapshot, observation)
