"""Environments that act on their sandbox from outside: what of an episode is not in there is kept here."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import gymnasium

from sandbox_gym._snapshot import Snapshot
from sandbox_gym.branching import BranchableEnv

if TYPE_CHECKING:
    from sandbox_gym.branch_model import BranchModel

_moments: weakref.WeakKeyDictionary[Snapshot, Any] = weakref.WeakKeyDictionary()


class ActingEnv(BranchableEnv):
    """`_moment` is all of an episode's state that is not in the sandbox: a record that is never changed, only replaced.
    Snapshots keep it, and `_remembered` is that of one; a subclass makes it in `_begin` and `step`.
    """

    _moment: Any = None

    def observation(self) -> Any:
        """The last one, again."""
        raise NotImplementedError

    @property
    def _over(self) -> bool:
        """Whether no step can be taken before a reset."""
        return False

    def snapshot(self, label: str | None = None) -> Snapshot:
        snapshot = super().snapshot(label)
        _moments[snapshot] = self._moment
        return snapshot

    def freeze(self) -> Snapshot:
        """The environment itself becomes the snapshot: costs nothing, and it is over. For search."""
        snapshot = self.sandbox.freeze()
        snapshot.kind = self._kind
        _moments[snapshot] = self._moment
        return snapshot

    def search_model(self) -> BranchModel:
        """This environment as `sandbox_gym.search` sees it. Raises TypeError where actions are text, ResetNeeded where
        no episode is under way.
        """
        from sandbox_gym.branch_model import BranchModel

        model = BranchModel(self)
        if self._over:
            raise gymnasium.error.ResetNeeded("there is nothing to search before env.reset()")
        return model

    def _remembered(self, snapshot: Snapshot) -> Any:
        """None for one that was taken before the first episode, or by something else."""
        return _moments.get(snapshot)

    def _seed_of(self, seed: int | None) -> int:
        """Of an episode: the one that was given, or the next of np_random."""
        return int(self.np_random.integers(2**31)) if seed is None else seed
