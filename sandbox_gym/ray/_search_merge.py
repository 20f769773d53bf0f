"""Several searches from one state, made into one result: what each found at its root, and the merged statistics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sandbox_gym.search.model import Transition
from sandbox_gym.search.result import SearchResult, make_result
from sandbox_gym.search.tree import Bools, Floats, Ints, Node, Tree


@dataclass(frozen=True)
class Step:
    """A node of a line, without those around it."""

    action: int
    transition: Transition[None]
    visits: int
    value: float
    raw_value: float


@dataclass(frozen=True)
class Findings:
    """Of one search. Arrays are [num_actions], of the root. `lines`: by the root's action, the best line that begins
    with it; `found`: the line to the node that met `stop_when`.
    """

    visits: int
    value: float
    children_visits: Ints
    children_values: Floats
    open: Bools
    prior_logits: Floats
    lines: dict[int, list[Step]]
    found: list[Step] | None
    discount: float
    num_simulations: int
    num_nodes: int
    num_steps: int


def findings(result: SearchResult) -> Findings:
    """What of a result travels: a tree of many nodes would take longer than its search."""
    tree, root = result.tree, result.tree.root
    return Findings(
        root.visits,
        root.value,
        root.children_visits,
        root.children_values,
        root.open,
        root.children_prior_logits,
        {action: _line(tree.best_line(action)) for action in root.children},
        None if result.found is None else _line(result.found.path()),
        tree.discount,
        result.num_simulations,
        result.num_nodes,
        result.num_steps,
    )


def merge(parts: Sequence[Findings]) -> SearchResult:
    """One result: visits are added, values are means weighted by visits, the action is the most visited.

    Its tree holds the root, its children, and below each the best line of the search that visited it most.
    """
    visits: Ints = np.array([part.children_visits for part in parts])  # [parts, num_actions]
    tree = Tree(visits.shape[1], parts[0].discount)
    root = tree.root
    root.set_prior(parts[0].prior_logits)
    root.open = np.any([part.open for part in parts], axis=0)
    root.visits = sum(part.visits for part in parts)
    root.value = sum(part.visits * part.value for part in parts) / root.visits
    for action in sorted({action for part in parts for action in part.lines}):
        best = max(parts, key=lambda part: part.children_visits[action] if action in part.lines else -1)
        child = _grow(tree, best.lines[action])[0]
        child.visits = int(visits[:, action].sum())
        weighted = sum(part.children_visits[action] * part.children_values[action] for part in parts)
        child.value = float(weighted / max(1, child.visits))
        root.children_visits[action], root.children_values[action] = child.visits, child.value
    lines = [part.found for part in parts if part.found is not None]
    found = _grow(tree, min(lines, key=len))[-1] if lines else None
    return replace(
        make_result(
            tree,
            tree.best_line() if found is None else found.path(),
            value=root.value,
            num_simulations=sum(part.num_simulations for part in parts),
            num_steps=sum(part.num_steps for part in parts),
            found=found,
        ),
        num_nodes=sum(part.num_nodes for part in parts),
    )


def _line(nodes: Sequence[Node]) -> list[Step]:
    return [
        Step(
            node.action,
            Transition(None, node.reward, node.terminated, node.truncated, node.observation, node.info),
            node.visits,
            node.value,
            node.raw_value,
        )
        for node in nodes
    ]


def _grow(tree: Tree, line: Sequence[Step]) -> list[Node]:
    """The nodes of a line from the root; those that the tree has stay as they are."""
    nodes: list[Node] = []
    node = tree.root
    for step in line:
        parent: Any = node
        node = parent.children.get(step.action) or tree.add(parent, step.action, step.transition)
        if node.visits == 0:
            node.visits, node.value, node.raw_value = step.visits, step.value, step.raw_value
            parent.children_visits[step.action] = step.visits
            parent.children_values[step.action] = step.value
        nodes.append(node)
    return nodes
