"""Which action a simulation takes at a node, and which one the search returns: PUCT and Gumbel, as mctx has them.

Visits that were begun and not told yet count as visits that came back with the least value there is: in PUCT they
scale the normalised Q-value down, so that the loss needs no unit; in the Gumbel rules visits alone decide.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import numpy as np

from sandbox_gym.search.tree import Floats, Ints, Node, Tree

_EPSILON = 1e-8


class Selector(Protocol):
    """The choices of one search."""

    def select(self, node: Node) -> int:
        """The action to simulate next at `node`, among its open ones."""

    def choose(self, root: Node) -> int | None:
        """The action to return; None where no action was visited."""


class Policy(Protocol):
    """What makes a Selector, once the root's prior is known."""

    def start(self, tree: Tree, num_simulations: int, rng: np.random.Generator) -> Selector:
        """Called when the root has been evaluated; may change its prior."""


@dataclass(frozen=True)
class PUCT:
    """MuZero's rule (Schrittwieser et al. 2020, appendix B), with Q-values scaled to [0, 1] among siblings.

    `dirichlet_fraction` of the root's prior is noise; mctx's 0.25 is for training, and planning wants none.
    """

    pb_c_init: float = 1.25
    pb_c_base: float = 19652.0
    dirichlet_fraction: float = 0.0
    dirichlet_alpha: float = 0.3

    def start(self, tree: Tree, num_simulations: int, rng: np.random.Generator) -> Selector:
        root = tree.root
        if self.dirichlet_fraction > 0 and not root.exhausted:
            noise = np.zeros(tree.num_actions)
            noise[root.open] = rng.dirichlet(np.full(int(root.open.sum()), self.dirichlet_alpha))
            root.prior_probs = (
                1 - self.dirichlet_fraction
            ) * root.prior_probs + self.dirichlet_fraction * noise
        return _PUCTSelector(self, tree, rng)


@dataclass(frozen=True)
class Gumbel:
    """Gumbel MuZero (Danihelka et al. 2022): sequential halving at the root, the improved policy below it.

    With few simulations it still improves on the prior, where PUCT may not. `gumbel_scale=0` takes the actions of
    the highest prior instead of a sample. Its q-transform is mctx's `qtransform_completed_by_mix_value`.
    """

    max_num_considered_actions: int = 16
    gumbel_scale: float = 1.0
    value_scale: float = 0.1
    maxvisit_init: float = 50.0

    def start(self, tree: Tree, num_simulations: int, rng: np.random.Generator) -> Selector:
        return _GumbelSelector(
            self, tree, num_simulations, self.gumbel_scale * rng.gumbel(size=tree.num_actions)
        )


class _PUCTSelector:
    def __init__(self, policy: PUCT, tree: Tree, rng: np.random.Generator) -> None:
        self._policy = policy
        self._tree = tree
        self._rng = rng

    def select(self, node: Node) -> int:
        visits = node.children_visits + node.in_flight  # [num_actions]
        total = node.visits + int(node.in_flight.sum())
        pb_c = self._policy.pb_c_init + math.log(
            (total + self._policy.pb_c_base + 1) / self._policy.pb_c_base
        )
        explore = math.sqrt(total) * pb_c * node.prior_probs / (visits + 1)
        exploit = (
            normalised_by_siblings(node, self._tree.discount) * node.children_visits / np.maximum(visits, 1)
        )
        # Ties would otherwise all go to action 0.
        noise = 1e-7 * self._rng.random(len(visits))
        return int(np.argmax(np.where(node.open, explore + exploit + noise, -np.inf)))

    def choose(self, root: Node) -> int | None:
        return self._tree.best_action(root)


class _GumbelSelector:
    def __init__(self, policy: Gumbel, tree: Tree, num_simulations: int, gumbel: Floats) -> None:
        self._policy = policy
        self._tree = tree
        self._gumbel = gumbel  # [num_actions]
        considered = min(policy.max_num_considered_actions, int(tree.root.open.sum()))
        self._schedule = considered_visits(considered, num_simulations)

    def select(self, node: Node) -> int:
        visits = node.children_visits + node.in_flight  # [num_actions]
        q = self._completed(node)
        if node.parent is None:
            return self._best(
                node, visits, self._schedule[min(int(visits.sum()), len(self._schedule) - 1)], q
            )
        improved = softmax(np.where(node.open, node.children_prior_logits + q, -np.inf))
        score = improved - visits / (1 + visits.sum())
        return int(np.argmax(np.where(node.open, score, -np.inf)))

    def choose(self, root: Node) -> int | None:
        visits = root.children_visits
        if not visits.any():
            return None
        best = self._best(root, visits, int(visits[root.open].max(initial=0)), self._completed(root))
        # As in Tree.best_action: what is exhausted got no more visits, so it competes by value.
        q = root.qvalues(self._tree.discount)
        candidates = [a for a in range(len(visits)) if visits[a] and (a == best or not root.open[a])]
        return max(candidates, key=lambda a: (q[a], a == best), default=None)

    def _best(self, root: Node, visits: Ints, considered: int, q: Floats) -> int:
        eligible = root.open & (visits == considered)
        if not eligible.any():
            # An action was closed in the middle of its round.
            eligible = root.open
        logits = root.children_prior_logits
        score = np.maximum(-1e9, self._gumbel + logits - logits.max() + q)
        return int(np.argmax(np.where(eligible, score, -np.inf)))

    def _completed(self, node: Node) -> Floats:
        scale = self._policy.value_scale * (self._policy.maxvisit_init + node.children_visits.max())
        completed: Floats = scale * completed_by_mix_value(node, self._tree.discount)
        return completed


def normalised_by_siblings(node: Node, discount: float) -> Floats:
    """Q-values in [0, 1] between the least and greatest of the node's value and its visited children's.

    Unvisited actions get 0. [num_actions], as mctx's `qtransform_by_parent_and_siblings`.
    """
    visited = node.children_visits > 0
    q = node.qvalues(discount)
    low = min(node.value, q.min(where=visited, initial=np.inf))
    high = max(node.value, q.max(where=visited, initial=-np.inf))
    normalised: Floats = np.where(visited, (q - low) / max(high - low, _EPSILON), 0.0)
    return normalised


def completed_by_mix_value(node: Node, discount: float) -> Floats:
    """Q-values in [0, 1], those of unvisited actions taken from the mixed value (Danihelka et al., appendix D).

    [num_actions], as mctx's `qtransform_completed_by_mix_value` before its scaling.
    """
    visited = node.children_visits > 0
    q = node.qvalues(discount)
    total = node.children_visits.sum()
    probs = np.maximum(node.prior_probs, np.finfo(np.float64).tiny)
    weight = probs.sum(where=visited)
    weighted = (probs * q).sum(where=visited) / weight if weight > 0 else 0.0
    completed: Floats = np.where(visited, q, (node.raw_value + total * weighted) / (total + 1))
    low, high = completed.min(), completed.max()
    rescaled: Floats = (completed - low) / max(high - low, _EPSILON)
    return rescaled


def softmax(logits: Floats) -> Floats:
    weights = np.exp(logits - logits.max())
    probs: Floats = weights / weights.sum()
    return probs


@cache
def considered_visits(num_considered: int, num_simulations: int) -> tuple[int, ...]:
    """For each simulation, the visit count an action must have to be next: sequential halving (Karnin et al. 2013).

    `num_considered` actions share a round, then half of them, down to two. [num_simulations].
    """
    if num_considered <= 1:
        return tuple(range(num_simulations))
    num_rounds = math.ceil(math.log2(num_considered))
    visits = [0] * num_considered
    schedule: list[int] = []
    while len(schedule) < num_simulations:
        for _ in range(max(1, num_simulations // (num_rounds * num_considered))):
            schedule += visits[:num_considered]
            visits[:num_considered] = [count + 1 for count in visits[:num_considered]]
        num_considered = max(2, num_considered // 2)
    return tuple(schedule[:num_simulations])
