"""What a search returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sandbox_gym.search.tree import Floats, Ints, Node, Tree


@dataclass(frozen=True)
class SearchResult:
    """What a search found. Actions count from 0; for a `Discrete(n, start=s)` space, add s before `env.step`.

    Attributes:
        action: the one to take.
        value: the return expected from the root on, as the search estimates it.
        visit_counts: [num_actions], by action of the root.
        q_values: [num_actions], the mean return of each action, nan where there were no visits.
        principal_variation: the actions of the best line found, `action` first.
        tree: all nodes; it holds no states.
        num_nodes: how many.
        num_simulations: how many were done, which is fewer than asked where the search stopped early.
        num_steps: environment steps taken to make the tree, playouts not counted.
        found: the node for which `stop_when` was true, or None.
    """

    action: int
    value: float
    visit_counts: Ints
    q_values: Floats
    principal_variation: list[int]
    tree: Tree
    num_nodes: int
    num_simulations: int
    num_steps: int
    found: Node | None = None


def make_result(
    tree: Tree,
    line: list[Node],
    *,
    value: float,
    num_simulations: int,
    num_steps: int,
    tail: Sequence[int] = (),
    found: Node | None = None,
) -> SearchResult:
    """The result whose best line is `line`, and after it the actions of `tail`, for which there are no nodes.

    Raises:
        RuntimeError: the line is empty.
    """
    if not line:
        raise RuntimeError(
            "the search has no action to give: none was open at the root, or none was simulated"
        )
    tree.principal_variation = line
    visits = tree.root.children_visits
    return SearchResult(
        action=line[0].action,
        value=value,
        visit_counts=visits.copy(),
        q_values=np.where(visits > 0, tree.root.qvalues(tree.discount), np.nan),
        principal_variation=[*(node.action for node in line), *tail],
        tree=tree,
        num_nodes=len(tree),
        num_simulations=num_simulations,
        num_steps=num_steps,
        found=found,
    )
