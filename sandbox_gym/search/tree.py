"""The search tree: nodes with their statistics, named as in mctx, and nothing that runs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sandbox_gym.search.model import Transition

if TYPE_CHECKING:
    import networkx

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class Node:
    """One state of the tree, and what is known of its actions.

    Attributes:
        parent, action: where it hangs, and by which action; None and -1 at the root.
        depth: steps below the root.
        reward: of the step that led here.
        path_return: discounted rewards from the root to here.
        terminated, truncated, observation, info: as the step that led here gave them.
        raw_value: what the evaluation said of this state, or 0 where the episode terminated.
        value, visits: the mean of the returns backed up through it, and how many.
        children: by action, those that have been made.
        children_visits, children_values, children_rewards, children_prior_logits: [num_actions].
        in_flight: [num_actions], visits begun and not yet told: the virtual losses.
        open: [num_actions], False for an action that search won't take again: invalid (its prior logit is -inf),
            leading to a state the tree already has, or to a subtree in which nothing is open.
    """

    __slots__ = (
        "action", "children", "children_prior_logits", "children_rewards", "children_values", "children_visits",
        "depth", "in_flight", "info", "observation", "open", "parent", "path_return", "prior_probs", "raw_value",
        "reward", "terminated", "truncated", "value", "visits",
    )  # fmt: skip

    def __init__(
        self, num_actions: int, parent: Node | None, action: int, step: Transition[Any], discount: float
    ) -> None:
        self.parent = parent
        self.action = action
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.reward = step.reward
        self.path_return: float = 0.0
        self.terminated = step.terminated
        self.truncated = step.truncated
        self.observation = step.observation
        self.info = step.info
        self.raw_value = 0.0
        self.value = 0.0
        self.visits = 0
        self.children: dict[int, Node] = {}
        self.children_visits: Ints = np.zeros(num_actions, np.int64)
        self.children_values: Floats = np.zeros(num_actions)
        self.children_rewards: Floats = np.zeros(num_actions)
        self.children_prior_logits: Floats = np.zeros(num_actions)
        self.prior_probs: Floats = np.full(num_actions, 1 / num_actions)
        self.in_flight: Ints = np.zeros(num_actions, np.int64)
        self.open: Bools = np.ones(num_actions, np.bool_)
        if parent is not None:
            self.path_return = parent.path_return + discount**parent.depth * step.reward
            parent.children[action] = self
            parent.children_rewards[action] = step.reward

    @property
    def ended(self) -> bool:
        return self.terminated or self.truncated

    @property
    def exhausted(self) -> bool:
        """Whether no action is open here."""
        return not self.open.any()

    def qvalues(self, discount: float) -> Floats:
        """Mean return by action, 0 where unvisited: [num_actions]."""
        return np.where(
            self.children_visits > 0, self.children_rewards + discount * self.children_values, 0.0
        )

    def set_prior(self, logits: Floats) -> None:
        """Takes prior logits [num_actions]; -inf closes an action."""
        self.children_prior_logits = logits
        self.open &= logits > -np.inf
        if self.open.any():
            weights = np.exp(logits - logits.max())
            self.prior_probs = weights / weights.sum()

    def path(self) -> list[Node]:
        """The nodes from the root's child down to this one; empty at the root."""
        nodes: list[Node] = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def __repr__(self) -> str:
        actions = [node.action for node in self.path()]
        return f"Node(actions={actions}, visits={self.visits}, value={self.value:.4g})"


class Tree:
    """All nodes of a search. It holds no states: it stays good after they have been released.

    Attributes:
        root: its first node.
        nodes: every node, in the order they were made.
        principal_variation: the nodes of the best line found, below the root.
    """

    def __init__(self, num_actions: int, discount: float) -> None:
        self.num_actions = num_actions
        self.discount = discount
        self.root = Node(num_actions, None, -1, Transition(None, 0.0, False, False, None, {}), discount)
        self.nodes: list[Node] = [self.root]
        self.principal_variation: list[Node] = []

    def add(self, parent: Node, action: int, step: Transition[Any]) -> Node:
        node = Node(self.num_actions, parent, action, step, self.discount)
        self.nodes.append(node)
        return node

    def backup(self, leaf: Node, value: float) -> None:
        """Averages `value`, the return from `leaf` on, into the leaf and everything above it."""
        node = leaf
        while True:
            node.value += (value - node.value) / (node.visits + 1)
            node.visits += 1
            if node.parent is None:
                return
            node.parent.children_visits[node.action] = node.visits
            node.parent.children_values[node.action] = node.value
            value = node.reward + self.discount * value
            node = node.parent

    def best_action(self, node: Node) -> int | None:
        """The most visited action, ties by value and then the lowest; None where no child has been visited.

        Exhausted actions get no more visits, however good they are, so they compete by value alone: one is taken
        where its value is above that of the most visited open action.
        """
        q = node.qvalues(self.discount)
        visited = [a for a in range(self.num_actions) if node.children_visits[a] > 0]
        still_open = [a for a in visited if node.open[a]]
        best = max(still_open, key=lambda a: (node.children_visits[a], q[a], -a), default=None)
        candidates = [a for a in visited if a == best or not node.open[a]]
        return max(candidates, key=lambda a: (q[a], -a), default=None)

    def best_line(self, first: int | None = None) -> list[Node]:
        """Follows `best_action` from the root, or from the root's action `first`, as far as there are visits."""
        line: list[Node] = []
        action = self.best_action(self.root) if first is None else first
        node = self.root
        while action is not None and action in node.children:
            node = node.children[action]
            line.append(node)
            action = self.best_action(node)
        return line

    def plot(
        self, path: str | os.PathLike[str], *, max_nodes: int = 60, action_names: Sequence[str] | None = None
    ) -> None:
        """Draws the `max_nodes` most visited nodes into a file, in the format of its suffix.

        Area is visits, colour is value, the labels are the actions, and the principal variation stands out.

        Raises:
            ImportError: matplotlib is missing; `pip install 'sandbox-gym[search]'`.
        """
        from sandbox_gym.search.picture import draw

        draw(self, path, max_nodes=max_nodes, action_names=action_names)

    def to_networkx(self) -> networkx.DiGraph[int]:
        """The tree as a graph; node i is `nodes[i]`, with its statistics as attributes; edges carry the action's.

        Raises:
            ImportError: networkx is missing; `pip install 'sandbox-gym[search]'`.
        """
        from sandbox_gym.search.picture import to_networkx

        return to_networkx(self)

    def __len__(self) -> int:
        return len(self.nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)
