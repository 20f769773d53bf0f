"""What a search needs of the world: states that it can't look into, and a few calls on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

import gymnasium

S = TypeVar("S")


@dataclass(frozen=True)
class Transition(Generic[S]):
    """What one step gave. `state` is None where the episode ended: there is nothing to go on from."""

    state: S | None
    reward: float
    terminated: bool
    truncated: bool
    observation: Any
    info: dict[str, Any]


class Playout(NamedTuple):
    """A random playout: its discounted return, and the actions it took, in order."""

    value: float
    actions: tuple[int, ...]


@runtime_checkable
class Model(Protocol[S]):
    """States that can be branched. Actions are `0 .. num_actions - 1`, whatever the space's own start is.

    A state holds everything that decides what comes next, random generators included, so that the same action
    from the same state gives the same result each time: a state the tree has given up for want of room is made
    again from its parent.
    """

    num_actions: int
    max_depth: int  # how many steps below the root a state may lie; a leaf there is evaluated, never expanded

    def root(self) -> S:
        """The present state, captured. The caller's environment is unharmed and goes on."""

    def step(self, state: S, action: int) -> Transition[S]:
        """One action from `state`, which stays as it is; the new state is the caller's to release."""

    def step_all(self, state: S, actions: Sequence[int]) -> list[Transition[S]]:
        """`step` for each action, at once where the model can. One that raises has released what it had made."""

    def rollout(self, state: S, *, max_steps: int, discount: float, seed: int) -> Playout:
        """Uniformly random actions from a copy of `state`, to the episode's end or `max_steps`."""

    def observe(self, state: S) -> Any:
        """The observation at `state`."""

    def release(self, state: S) -> None:
        """Gives a state up. Called once for each."""


@runtime_checkable
class ParallelModel(Model[S], Protocol[S]):
    """A model whose states are in several places, where they can be stepped and played from at once."""

    def step_many(self, jobs: Sequence[tuple[S, Sequence[int]]]) -> list[list[Transition[S]]]:
        """`step_all` of each state with its actions. One that raises has released what it had made."""

    def rollout_many(
        self, states: Sequence[S], *, max_steps: int, discount: float, seeds: Sequence[int]
    ) -> list[Playout]:
        """`rollout` of each state with its seed."""


def rollout_many(
    model: Model[S], states: Sequence[S], *, max_steps: int, discount: float, seeds: Sequence[int]
) -> list[Playout]:
    """A playout from each state with its seed: at once where the model can, else one by one."""
    if isinstance(model, ParallelModel):
        return model.rollout_many(states, max_steps=max_steps, discount=discount, seeds=seeds)
    return [
        model.rollout(state, max_steps=max_steps, discount=discount, seed=seed)
        for state, seed in zip(states, seeds, strict=True)
    ]


def as_model(env: object) -> Model[Any]:
    """The model of `env`: itself, or what its `search_model()` gives, or deep copies of a Gymnasium environment.

    `search_model` is looked for on the environment and on its `unwrapped`: wrappers put around a sandbox from
    outside are no part of what is searched.

    Raises:
        TypeError: `env` offers none of these, or its actions aren't `Discrete`.
    """
    if isinstance(env, Model):
        return env
    for candidate in (env, getattr(env, "unwrapped", None)):
        if hasattr(candidate, "search_model"):
            model: Model[Any] = candidate.search_model()
            return model
    if isinstance(env, gymnasium.Env):
        # Imported here because deepcopies itself needs this module's types.
        from sandbox_gym.search.deepcopies import DeepcopyModel

        return DeepcopyModel(env)
    raise TypeError(
        f"can't search {type(env).__name__}: pass a Gymnasium environment with Discrete actions, an object with "
        "search_model(), or an object with the methods of sandbox_gym.search.Model"
    )
