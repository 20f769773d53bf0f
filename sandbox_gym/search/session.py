"""One search in the making: leaves are asked for in batches and told their values; `MCTS.search` does no more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sandbox_gym.search.keys import Seen
from sandbox_gym.search.model import Model, rollout_many
from sandbox_gym.search.result import SearchResult, make_result
from sandbox_gym.search.selection import Selector
from sandbox_gym.search.states import States
from sandbox_gym.search.tree import Floats, Node, Tree

if TYPE_CHECKING:
    from sandbox_gym.search.mcts import MCTS


@dataclass(frozen=True)
class Batch:
    """Leaves that wait for their evaluation. It is false when empty, which is when the search is done."""

    leaves: tuple[Node, ...]
    _observe: Callable[[Node], Any]

    @property
    def observations(self) -> list[Any]:
        """[batch], in the order of the leaves."""
        return [self._observe(leaf) for leaf in self.leaves]

    def __len__(self) -> int:
        return len(self.leaves)


class TreeSearch:
    """A search that owns its states for the length of a `with` block; made by `MCTS.tree`.

        with mcts.tree(env) as search:
            while batch := search.ask_batch(32):
                search.tell(batch, *network(batch.observations))
        result = search.result()

    Attributes:
        tree: what has been found so far.
        num_simulations: how many simulations have come to their end.
    """

    def __init__(self, config: MCTS, model: Model[Any]) -> None:
        self._config = config
        self._model = model
        self._max_depth = min(model.max_depth, config.max_depth or model.max_depth)
        self._rng = np.random.default_rng(config.seed)
        self._seen = None if config.key is None else Seen(config.key)
        self._selector: Selector | None = None
        self._batch: Batch | None = None
        self._started = 0
        self._num_playouts = 0
        self.tree = Tree(model.num_actions, config.discount)
        self.states = States(model, self.tree, config.max_snapshots)
        self.num_simulations = 0
        self.found: Node | None = None

    def __enter__(self) -> TreeSearch:
        self.states.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.states.release_all()

    @property
    def done(self) -> bool:
        """Whether nothing is left to simulate: the number is reached, `stop_when` was met, all is exhausted."""
        return (
            self._started >= self._config.num_simulations
            or self.found is not None
            or (self.tree.root.visits > 0 and self.tree.root.exhausted)
        )

    def ask_batch(self, n: int = 1) -> Batch:
        """Up to `n` leaves to evaluate, at least one unless the search is done; the first batch is the root alone.

        Each selection within a batch leaves a virtual loss on its path until `tell`, which turns the next away from
        it. The batch is smaller than `n` where that isn't enough, or `max_snapshots` leaves no room. Simulations
        that end in an episode's end need no evaluation and are over when this returns.

        Raises:
            RuntimeError: the last batch hasn't been told, or this is outside the `with` block.
            ValueError: `n` isn't positive.
        """
        if n < 1:
            raise ValueError(f"a batch needs at least one leaf, not {n}")
        if self._batch is not None:
            raise RuntimeError("tell() the values of the last batch before asking for another")
        leaves: list[Node] = []
        if self._selector is None:
            self.states.get(self.tree.root)
            if self._seen is not None:
                self._seen.is_duplicate(self.tree.root, self._observe(self.tree.root))
            leaves = [self.tree.root]
        while not leaves and not self.done:
            leaves = self._make(self._select(min(n, self._config.max_snapshots - 2)))
        batch = Batch(tuple(leaves), self._observe)
        if leaves:
            self._batch = batch
            self.states.pinned.update(leaves)
        return batch

    def tell(self, batch: Batch, prior_logits: npt.ArrayLike | None, values: npt.ArrayLike) -> None:
        """Takes the evaluation of a batch: `prior_logits` [batch, num_actions] and `values` [batch].

        A logit of -inf marks an action as invalid; None stands for equal logits. A value is the return expected
        from the leaf on; at a truncated leaf it is what the episode would have gone on to give. See `MCTS`.

        Raises:
            ValueError: it isn't the last batch, or a shape or a number (NaN, infinite) is wrong.
        """
        if batch is not self._batch:
            raise ValueError("not the batch that was asked for last")
        logits, numbers = _checked(prior_logits, values, len(batch), self.tree.num_actions)
        self._batch = None
        for leaf, row, value in zip(batch.leaves, logits, numbers, strict=True):
            leaf.raw_value = float(value)
            leaf.set_prior(row)
            if leaf.parent is None:
                self.tree.backup(leaf, leaf.raw_value)
                self._selector = self._config.policy.start(self.tree, self._config.num_simulations, self._rng)
                continue
            self.states.pinned.discard(leaf)
            if leaf.ended or leaf.depth >= self._max_depth:
                self.states.release(leaf)
            if leaf.exhausted or (self._seen is not None and leaf.depth >= self._max_depth):
                # With keys, a search for what is new would only be held up by leaves it can't go on from.
                self._close(leaf)
            self._finish(leaf)

    def playouts(self, batch: Batch) -> tuple[None, Floats]:
        """The evaluation that needs no network: equal logits, and the return of one random playout from each leaf.

        `MCTS.rollout_max_steps` bounds their length; 0 plays none. (None, values [batch]).
        """
        values = np.zeros(len(batch))
        playing: dict[int, int] = {}  # the leaf's place in the batch: its seed
        for i, leaf in enumerate(batch.leaves):
            self._num_playouts += 1
            if self._config.rollout_max_steps > 0 and not leaf.ended:
                # One generator for all would tie each playout to the order of those before it.
                sequence = np.random.SeedSequence([self._config.seed, self._num_playouts])
                playing[i] = int(sequence.generate_state(1)[0])
        played = rollout_many(
            self._model,
            [self.states.get(batch.leaves[i]) for i in playing],
            max_steps=self._config.rollout_max_steps,
            discount=self._config.discount,
            seeds=list(playing.values()),
        )
        values[list(playing)] = [playout.value for playout in played]
        return None, values

    def result(self) -> SearchResult:
        """What has been found so far.

        Raises:
            RuntimeError: no action has been visited.
        """
        if self.found is not None:
            line = self.found.path()
        else:
            line = self.tree.best_line(
                None if self._selector is None else self._selector.choose(self.tree.root)
            )
        return make_result(
            self.tree,
            line,
            value=self.tree.root.value,
            num_simulations=self.num_simulations,
            num_steps=self.states.num_steps,
            found=self.found,
        )

    def _select(self, n: int) -> dict[Node, list[int]]:
        """Up to `n` unmade actions, by node, each with a virtual loss on its path."""
        assert self._selector is not None
        chosen: dict[Node, list[int]] = {}
        for _ in range(n):
            if self.done:
                break
            node = self.tree.root
            while True:
                action = self._selector.select(node)
                child = node.children.get(action)
                if child is None or child.visits == 0 or self._is_leaf(child):
                    break
                node = child
            if child is None and node.in_flight[action] == 0:
                self._started += 1
                self._add_in_flight(node, action, 1)
                chosen.setdefault(node, []).append(action)
            elif child is not None and child.visits > 0:
                # A leaf for good: its value counts once more.
                self._started += 1
                self._add_in_flight(node, action, 1)
                self._finish(child)
            else:
                # It waits for its evaluation in this very batch.
                break
        return chosen

    def _make(self, chosen: dict[Node, list[int]]) -> list[Node]:
        """Steps what was selected. Returns the leaves to evaluate; the others' simulations are over."""
        leaves: list[Node] = []
        for node in self.states.expand_many(chosen):
            if self.found is None and self._config.stop_when is not None and self._config.stop_when(node):
                self.found = node
            if node.terminated:
                self.states.pinned.discard(node)
                self._finish(node)
            elif (
                self._seen is not None
                and not node.truncated
                and self._seen.is_duplicate(node, node.observation)
            ):
                self.states.pinned.discard(node)
                self._close(node)
                self._finish(node, counts=False)
            else:
                leaves.append(node)
        return leaves

    def _finish(self, leaf: Node, *, counts: bool = True) -> None:
        assert leaf.parent is not None
        self._add_in_flight(leaf.parent, leaf.action, -1)
        if counts:
            self.tree.backup(leaf, leaf.raw_value)
        self.num_simulations += 1
        if self._config.on_simulation is not None:
            self._config.on_simulation(self.num_simulations, self.tree)

    def _close(self, node: Node) -> None:
        """Takes a node out of the search for good, and each ancestor in which nothing is left open."""
        self.states.release(node)
        while node.parent is not None:
            node.parent.open[node.action] = False
            node = node.parent
            if not node.exhausted:
                return
            if node.parent is not None:
                self.states.release(node)

    def _add_in_flight(self, node: Node, action: int, change: int) -> None:
        above: Node | None = node
        while above is not None:
            above.in_flight[action] += change
            action, above = above.action, above.parent

    def _is_leaf(self, node: Node) -> bool:
        return node.ended or node.depth >= self._max_depth

    def _observe(self, node: Node) -> Any:
        return self._model.observe(self.states.get(node)) if node.parent is None else node.observation


def _checked(
    prior_logits: npt.ArrayLike | None, values: npt.ArrayLike, batch: int, num_actions: int
) -> tuple[Floats, Sequence[float]]:
    logits: Floats = (
        np.zeros((batch, num_actions)) if prior_logits is None else np.array(prior_logits, np.float64)
    )
    numbers: Floats = np.array(values, np.float64)
    if logits.shape != (batch, num_actions) or numbers.shape != (batch,):
        raise ValueError(
            f"evaluation gave prior_logits of shape {logits.shape} and values of shape {numbers.shape}; "
            f"expected ({batch}, {num_actions}) and ({batch},)"
        )
    if np.isnan(logits).any() or (logits == np.inf).any() or not np.isfinite(numbers).all():
        raise ValueError("evaluation gave a NaN or an infinite number; only a prior logit may be -inf")
    return logits, numbers.tolist()
