"""The states a tree owns: a bounded number of them, made again where they were given up, all released at the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sandbox_gym.search.model import Model, ParallelModel, Transition
from sandbox_gym.search.tree import Node, Tree


class States:
    """The live states of a tree, at most `max_snapshots`, by node.

    When there is no room, the state of the least visited leaf is released, never the root's or one that is pinned.
    Should search come back to that node, its state is made again by stepping from the nearest ancestor that has
    one, which costs a step for each level between.
    """

    def __init__(self, model: Model[Any], tree: Tree, max_snapshots: int) -> None:
        self._model = model
        self._parallel: ParallelModel[Any] | None = model if isinstance(model, ParallelModel) else None
        self._tree = tree
        self._max = max_snapshots
        self._live: dict[Node, Any] = {}
        self._arriving: list[Transition[Any]] = []
        self.pinned: set[Node] = {tree.root}
        self.num_steps = 0

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, node: Node) -> bool:
        return node in self._live

    def start(self) -> None:
        """Captures the root. Raises RuntimeError where the model can make no state below it."""
        if self._model.max_depth < 1:
            raise RuntimeError(
                "no state can be made below the present one (max_depth is 0): search from a fresh copy"
            )
        self._live[self._tree.root] = self._model.root()

    def get(self, node: Node) -> Any:
        """The state of `node`, made again if it had been given up."""
        lost: list[Node] = []
        while node not in self._live:
            if node.parent is None:
                raise RuntimeError(
                    "the states of this search have been released: use it inside its `with` block"
                )
            lost.append(node)
            node = node.parent
        for child in reversed(lost):
            self._make_room(1, keep=node)
            self._step([(node, [child.action])])
            state = self._arriving.pop().state
            if state is None:
                raise RuntimeError(
                    f"{child} ended its episode when it was made again: the model isn't deterministic"
                )
            self._live[child] = state
            node = child
        return self._live[node]

    def expand(self, parent: Node, actions: list[int]) -> list[Node]:
        """Steps `parent` by each action; the new nodes are in the tree, and their states owned, when this returns."""
        return self._expand([(parent, actions)])

    def expand_many(self, chosen: dict[Node, list[int]]) -> list[Node]:
        """`expand` for each node and its actions, as many at once as the model can and there is room for. The new
        nodes are pinned.
        """
        made: list[Node] = []
        waiting = list(chosen.items())
        while waiting:
            count = self._num_at_once(waiting)
            children = self._expand(waiting[:count])
            self.pinned.update(children)
            made += children
            del waiting[:count]
        return made

    def release(self, node: Node) -> None:
        if node in self._live:
            self._model.release(self._live.pop(node))

    def release_all(self) -> None:
        """Releases every state, the youngest first, even where some fail; raises the first failure at the end."""
        failure: BaseException | None = None
        # An interrupt can fall between the model's return and the states' entry in _live.
        states = [*self._live.values(), *(step.state for step in self._arriving if step.state is not None)]
        self._live.clear()
        self._arriving = []
        for state in reversed(states):
            try:
                self._model.release(state)
            except BaseException as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def _num_at_once(self, waiting: Sequence[tuple[Node, list[int]]]) -> int:
        """How many of the first jobs have room, for the states they begin from and for those they make."""
        count = 0
        if self._parallel is not None:
            needed = len(self.pinned)
            for parent, actions in waiting:
                needed += len(actions) + (parent not in self.pinned)
                if needed > self._max:
                    break
                count += 1
        return max(1, count)

    def _expand(self, jobs: Sequence[tuple[Node, list[int]]]) -> list[Node]:
        # All of them have to be there at once, and making one again must not cost another.
        held = {parent for parent, _ in jobs} - self.pinned
        try:
            for parent, _ in jobs:
                self.get(parent)
                self.pinned.add(parent)
            self._make_room(sum(len(actions) for _, actions in jobs), keep=jobs[0][0])
            self._step(jobs)
        finally:
            self.pinned -= held
        children: list[Node] = []
        for parent, actions in jobs:
            for action in actions:
                step = self._arriving.pop(0)
                child = self._tree.add(parent, action, step)
                if step.state is not None:
                    self._live[child] = step.state
                children.append(child)
        return children

    def _step(self, jobs: Sequence[tuple[Node, list[int]]]) -> None:
        self.num_steps += sum(len(actions) for _, actions in jobs)
        states = [(self._live[parent], actions) for parent, actions in jobs]
        if self._parallel is not None:
            self._arriving = [step for steps in self._parallel.step_many(states) for step in steps]
            return
        ((state, actions),) = states
        if len(actions) == 1:
            self._arriving = [self._model.step(state, actions[0])]
        else:
            self._arriving = list(self._model.step_all(state, actions))

    def _make_room(self, count: int, *, keep: Node) -> None:
        while len(self._live) + count > self._max:
            spare = [node for node in self._live if node is not keep and node not in self.pinned]
            if not spare:
                raise RuntimeError(f"max_snapshots={self._max} is too small for {count} more states at once")
            self.release(min(spare, key=self._worth))

    def _worth(self, node: Node) -> tuple[bool, int, int]:
        # A state with live ones below it goes last: they could only be made again from further up.
        return any(child in self._live for child in node.children.values()), node.visits, -node.depth
