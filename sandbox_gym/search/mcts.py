"""Monte Carlo tree search over states that can be branched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from sandbox_gym.search.keys import KeyFunction
from sandbox_gym.search.model import as_model
from sandbox_gym.search.result import SearchResult
from sandbox_gym.search.selection import PUCT, Gumbel, Policy
from sandbox_gym.search.session import TreeSearch
from sandbox_gym.search.tree import Node, Tree

EvaluateFunction = Callable[[list[Any]], tuple[npt.ArrayLike | None, npt.ArrayLike]]

_POLICIES: dict[str, Policy] = {"puct": PUCT(), "gumbel": Gumbel()}


@dataclass(frozen=True, kw_only=True)
class MCTS:
    """Monte Carlo tree search, in the terms of mctx (github.com/google-deepmind/mctx).

        result = MCTS(num_simulations=200).search(env)
        env.step(result.action)

    One simulation goes down the tree to an action not tried yet, takes it, evaluates the state it leads to, and
    averages the discounted return into every node on its way. States carry their random generators, so each action
    is searched in the one future that the environment would really go on to have.

    A state in which the episode terminated is worth 0. One that was truncated is worth what `evaluate` says of its
    last observation, since the task would have gone on; playouts can't go on there, so with them it is worth 0.

    Attributes:
        num_simulations: how many, each one step of the environment and one evaluation at most.
        discount: of rewards, for each step.
        evaluate: from a list of observations [b] to `(prior_logits [b, num_actions], values [b])`. A logit of -inf
            marks an invalid action, and None in their place stands for equal logits. No function: equal logits, and
            the return of one random playout from each state. See also `Novelty`.
        seed: equal seeds give equal searches.
        action_selection: "puct", "gumbel", or a `PUCT` or `Gumbel` with its own constants.
        rollout_max_steps: length of a playout at most. 0 plays none: the tree's own rewards are all there is.
        batch_size: leaves evaluated together; virtual losses keep them apart.
        max_depth: steps below the root, where less than the model's own limit is wanted.
        max_snapshots: states kept alive at once, batch_size + 2 at least. Where more are needed, the least visited
            leaves' are released, and made again by stepping from the nearest ancestor if search returns to them.
        key: from an observation to something hashable that tells states apart, such as `observation_key`. An action
            that leads to a state already in the tree, with no fewer steps and no greater return, is closed: that
            simulation finds nothing new, is not averaged into any value, and none goes there again, nor into a
            subtree in which everything is closed. The search becomes an exploration of the graph of states, which
            is what sparse rewards need. It must tell apart all that differs in what comes next; time may be left
            out where it matters only to the time limit.
        stop_when: called with each new node; the search ends at the first for which it is true, and the path to it
            is the principal variation.
        on_simulation: called with the number of simulations done and the tree, after each.
    """

    num_simulations: int = 200
    discount: float = 0.99
    evaluate: EvaluateFunction | None = None
    seed: int = 0
    action_selection: str | Policy = "puct"
    rollout_max_steps: int = 100
    batch_size: int = 1
    max_depth: int | None = None
    max_snapshots: int = 256
    key: KeyFunction | None = None
    stop_when: Callable[[Node], bool] | None = None
    on_simulation: Callable[[int, Tree], object] | None = None

    def __post_init__(self) -> None:
        for name in ("num_simulations", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.max_depth is not None and self.max_depth < 1:
            raise ValueError(f"max_depth must be at least 1, not {self.max_depth}")
        if not 0 <= self.discount <= 1:
            raise ValueError(f"discount must lie in [0, 1], not {self.discount}")
        if self.max_snapshots < self.batch_size + 2:
            raise ValueError(
                f"max_snapshots={self.max_snapshots} is too small: a batch of {self.batch_size} needs "
                f"{self.batch_size + 2}, with the root and the state that is stepped"
            )
        if isinstance(self.action_selection, str) and self.action_selection not in _POLICIES:
            raise ValueError(f"action_selection is one of {sorted(_POLICIES)}, not {self.action_selection!r}")

    @property
    def policy(self) -> Policy:
        return (
            _POLICIES[self.action_selection]
            if isinstance(self.action_selection, str)
            else self.action_selection
        )

    def search(self, env: object) -> SearchResult:
        """Searches from the present state of `env`, which is left as it is. No state outlives the call.

        `env` is whatever `as_model` takes.

        Raises:
            TypeError: `env` can't be searched.
            ValueError: `evaluate` gave a wrong shape or number.
            RuntimeError: no action is open at the root.
        """
        with self.tree(env) as search:
            while batch := search.ask_batch(self.batch_size):
                evaluation = self.evaluate(batch.observations) if self.evaluate else search.playouts(batch)
                search.tell(batch, *evaluation)
        return search.result()

    def tree(self, env: object) -> TreeSearch:
        """The same search by hand, for a slow evaluation or one in batches: see `TreeSearch`."""
        return TreeSearch(self, as_model(env))
