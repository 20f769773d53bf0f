"""The far end of a search over a cluster: the environment's state as it arrives, and an actor that keeps states."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from sandbox_gym._snapshot import Snapshot
from sandbox_gym.env import SandboxEnv
from sandbox_gym.hosting import Hosting, Remote
from sandbox_gym.ray.travel import Arrivals, Packing, Parcel
from sandbox_gym.sandbox import Sandbox
from sandbox_gym.search.model import Playout, Transition
from sandbox_gym.snapshot_model import Frozen, SnapshotModel


@dataclass(frozen=True)
class Origin:
    """The present state of an environment, and all of it that isn't in its sandbox."""

    snapshot: Snapshot
    fields: dict[str, Any]
    hosting: Hosting


def depart(env: Any) -> Parcel:
    """The present state of `env`, which goes on, for workers to `arrive` at.

    Raises:
        TypeError: it isn't a sandboxed environment.
        SnapshotError, BackendUnavailable: its state can't travel, and why.
    """
    inner = getattr(env, "unwrapped", env)
    if not isinstance(inner, SandboxEnv):
        raise TypeError(
            f"only the state of a sandboxed environment can travel, not {type(inner).__name__}'s: "
            "gymnasium.make('sandbox_gym:Sandbox-v0', env_id=...) puts any environment into a sandbox"
        )
    # Its sandbox stays here, and codecs, which hold functions, are made again there.
    left_out = {"_box", "_pristine", "_remote"}
    fields = {name: value for name, value in vars(inner).items() if name not in left_out}
    snapshot = inner.snapshot("search origin")
    try:
        return Packing().pack(Origin(snapshot, fields, inner.hosted))
    finally:
        snapshot.delete()


def arrive(parcel: Parcel) -> SandboxEnv:
    """The environment in a sandbox of this process, at that state; it can't be reset. Raises what loading does."""
    arrivals = Arrivals()
    arrivals.load(parcel.packed)
    origin: Origin = arrivals.unpack(parcel.data, parcel.outside)
    env = SandboxEnv.__new__(SandboxEnv)
    vars(env).update(copy.copy(origin.fields))
    env._remote = Remote(origin.hosting)
    try:
        env._box = Sandbox.restore(origin.snapshot)
    finally:
        origin.snapshot.delete()
    return env


class Start(NamedTuple):
    """What the model of a search tells of itself before there is any state."""

    num_actions: int
    max_depth: int
    observation: Any


@dataclass(frozen=True)
class Where:
    """A state: its number, and the actions that lead to it from the origin."""

    number: int
    path: tuple[int, ...]


class Worker:
    """The actor. It keeps states by their numbers; one that it hasn't is made by playing its path from the origin."""

    def __init__(self, parcel: Parcel) -> None:
        self._parcel = parcel
        self._states: dict[int, Frozen] = {}

    def start(self) -> Start:
        """Raises what `arrive` and `SnapshotModel` do."""
        self._env = arrive(self._parcel)
        del self._parcel
        self._model = SnapshotModel(self._env)
        self._origin = self._model.root()
        return Start(self._model.num_actions, self._model.max_depth, self._origin.observation)

    def step(self, jobs: Sequence[tuple[Where, list[tuple[int, int]]]]) -> list[list[Transition[Any]]]:
        """From each state, each `(action, number of the state that it leads to)`."""
        return [self._step(where, steps) for where, steps in jobs]

    def play(self, jobs: Sequence[tuple[Where, list[dict[str, Any]]]]) -> list[list[Playout]]:
        """From each state, a playout for each of `Model.rollout`'s arguments."""
        return [
            [self._model.rollout(self._at(where), **request) for request in wanted] for where, wanted in jobs
        ]

    def release(self, numbers: Sequence[int]) -> None:
        """Gives up those that it has."""
        for number in numbers:
            state = self._states.pop(number, None)
            if state is not None:
                self._model.release(state)

    def _step(self, where: Where, steps: list[tuple[int, int]]) -> list[Transition[Any]]:
        made = self._model.step_all(self._at(where), [action for action, _ in steps])
        for (_, number), transition in zip(steps, made, strict=True):
            if transition.state is not None:
                self._states[number] = transition.state
        return [replace(transition, state=None) for transition in made]

    def _at(self, where: Where) -> Frozen:
        if not where.path:
            return self._origin
        if where.number not in self._states:
            self._states[where.number] = self._replay(where.path)
        return self._states[where.number]

    def _replay(self, path: Sequence[int]) -> Frozen:
        """The state that the actions lead to from the origin, played in the guest; its observation stays there."""
        actions = [self._model._number(self._model._first + action) for action in path]
        box = Sandbox.restore(self._origin.snapshot)
        try:
            timeout = self._env.rollout_timeout(len(path))
            played = self._env._remote.rollout(box, {"actions": actions}, timeout=timeout)
            if played.terminated or played.truncated:
                raise RuntimeError(
                    f"the actions {list(path)} ended the episode when they were played again: the environment isn't "
                    "deterministic"
                )
            return self._model._give(box.freeze(), None)
        finally:
            box.terminate()  # does nothing to one that was frozen
