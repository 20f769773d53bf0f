"""Beam search: level by level, the best few states of each."""

from __future__ import annotations

from collections.abc import Callable

from sandbox_gym.search.keys import KeyFunction, Seen
from sandbox_gym.search.model import as_model
from sandbox_gym.search.result import SearchResult, make_result
from sandbox_gym.search.states import States
from sandbox_gym.search.tree import Node, Tree

ScoreFunction = Callable[[Node], float]


def beam_search(
    env: object,
    *,
    width: int = 8,
    depth: int = 20,
    score: ScoreFunction | None = None,
    discount: float = 0.99,
    key: KeyFunction | None = None,
    stop_when: Callable[[Node], bool] | None = None,
) -> SearchResult:
    """Takes every action in the `width` best states of each level, down to `depth`, and returns the best line.

    The line ends where the episode did, or at the last level; the one with the highest score wins, the shorter of
    equals. `value` is its discounted return. A node's visits are the states kept at or below it. At most
    2 * width + num_actions + 1 states are alive at once, and none outlives the call.

    Args:
        env: whatever `as_model` takes; left as it is.
        width: states kept of each level.
        depth: levels at most, bounded by the model's `max_depth` too.
        score: of a node, higher is better; None: its discounted return so far, `Node.path_return`.
        discount: of rewards, for each step.
        key: as in `MCTS`: states that were met before, with no more steps and no smaller return, are dropped.
        stop_when: the search ends at the first node for which it is true, and that node's line is returned.

    Raises:
        ValueError: `width` or `depth` isn't positive.
    """
    if width < 1 or depth < 1:
        raise ValueError(f"width and depth must be at least 1, not {width} and {depth}")
    model = as_model(env)
    tree = Tree(model.num_actions, discount)
    states = States(model, tree, max_snapshots=2 * width + model.num_actions + 1)
    beam = _Beam(tree, states, width, score, stop_when, None if key is None else Seen(key))
    try:
        states.start()
        if beam.seen is not None:
            beam.seen.is_duplicate(tree.root, model.observe(states.get(tree.root)))
        for _ in range(min(depth, model.max_depth)):
            if not beam.descend():
                break
    finally:
        states.release_all()
    line = beam.best().path()
    return make_result(
        tree,
        line,
        value=line[-1].path_return if line else 0.0,
        num_simulations=len(tree) - 1,
        num_steps=states.num_steps,
        found=beam.found,
    )


class _Beam:
    def __init__(
        self,
        tree: Tree,
        states: States,
        width: int,
        score: ScoreFunction | None,
        stop_when: Callable[[Node], bool] | None,
        seen: Seen | None,
    ) -> None:
        self._tree = tree
        self._states = states
        self._width = width
        self._score: ScoreFunction = score or (lambda node: node.path_return)
        self._stop_when = stop_when
        self.seen = seen
        self._level: list[tuple[float, Node]] = [(0.0, tree.root)]
        self._finished: list[tuple[float, Node]] = []
        self.found: Node | None = None

    def descend(self) -> bool:
        """Replaces the level by the best of the next one; False where the search is at its end."""
        below: list[tuple[float, Node]] = []
        for _, parent in self._level:
            below += self._expand(parent)
            # Cut between parents too, or a level would hold width * num_actions states.
            below.sort(key=lambda scored: -scored[0])
            for _, node in below[self._width :]:
                self._states.release(node)
            del below[self._width :]
            if self.found is not None:
                return False
        for _, node in below:
            self._tree.backup(node, 0.0)
        if below or self._finished:
            # Where every line has ended, a state they left behind is no result, though its score may be higher.
            self._level = below
        return bool(below)

    def best(self) -> Node:
        if self.found is not None:
            return self.found
        return max([*self._finished, *self._level], key=lambda scored: (scored[0], -scored[1].depth))[1]

    def _expand(self, parent: Node) -> list[tuple[float, Node]]:
        """The children worth keeping, with their scores."""
        kept: list[tuple[float, Node]] = []
        children = self._states.expand(parent, list(range(self._tree.num_actions)))
        self._states.pinned.update(children)
        for node in children:
            if self.found is None and self._stop_when is not None and self._stop_when(node):
                self.found = node
            if node.ended:
                self._finished.append((self._score(node), node))
                self._tree.backup(node, 0.0)
            elif self.seen is None or not self.seen.is_duplicate(node, node.observation):
                kept.append((self._score(node), node))
            else:
                self._states.release(node)
        if parent is not self._tree.root:
            self._states.release(parent)
        return kept
