"""What holds of every search, whatever the problem: statistics add up, states are released, seeds decide."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox_gym.search import MCTS, Playout, SearchResult, Transition, Tree, TreeSearch
from sandbox_gym.search.selection import considered_visits
from sandbox_gym.search.testing import TableModel, check_model


def maze(seed: int, num_actions: int, *, endings: float = 0.2) -> TableModel:
    """Twenty places with random ways, rewards and endings."""
    rng = np.random.default_rng(seed)
    shape = (20, num_actions)
    ways, rewards = rng.integers(20, size=shape), rng.normal(size=shape).round(2)
    terminated, truncated = rng.random(shape) < endings / 2, rng.random(shape) < endings / 2
    return TableModel(
        lambda p, a: (int(ways[p, a]), float(rewards[p, a]), bool(terminated[p, a]), bool(truncated[p, a])),
        num_actions=num_actions,
        max_depth=6,
    )


def check_statistics(tree: Tree) -> None:
    for node in tree:
        assert node.in_flight.sum() == 0, "a virtual loss was left behind"
        for action, child in node.children.items():
            assert node.children_visits[action] == child.visits
            assert child.depth == node.depth + 1
            if child.visits:
                assert node.children_values[action] == pytest.approx(child.value)
        if node.visits and node.children_visits.any():
            assert node.visits == 1 + node.children_visits.sum()
            backed_up = node.children_visits @ node.qvalues(tree.discount)
            assert node.value * node.visits == pytest.approx(node.raw_value + backed_up)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    num_actions=st.integers(1, 4),
    num_simulations=st.integers(1, 60),
    batch_size=st.integers(1, 8),
    spare_snapshots=st.integers(2, 40),
    policy=st.sampled_from(["puct", "gumbel"]),
    with_key=st.booleans(),
)
def test_any_search(
    seed: int,
    num_actions: int,
    num_simulations: int,
    batch_size: int,
    spare_snapshots: int,
    policy: str,
    with_key: bool,
) -> None:
    model = maze(seed, num_actions)
    mcts = MCTS(
        num_simulations=num_simulations,
        batch_size=batch_size,
        max_snapshots=batch_size + spare_snapshots,
        action_selection=policy,
        key=(lambda place: place) if with_key else None,
        seed=seed,
    )
    with mcts.tree(model) as search:
        while batch := search.ask_batch(mcts.batch_size):
            assert len(batch) <= batch_size
            assert model.num_alive == len(search.states)
            search.tell(batch, *search.playouts(batch))
    assert model.num_alive == 0
    assert model.most_alive <= mcts.max_snapshots
    check_statistics(search.tree)
    visits = search.tree.root.children_visits.sum()
    if with_key:
        assert visits <= search.num_simulations <= num_simulations
    else:
        assert visits == search.num_simulations == num_simulations
    if visits:
        assert search.result().visit_counts[search.result().action] > 0


def numbers(result: SearchResult) -> tuple[Any, ...]:
    return (
        result.action,
        result.value,
        result.visit_counts.tolist(),
        result.principal_variation,
        result.num_nodes,
    )


@pytest.mark.parametrize("policy", ["puct", "gumbel"])
def test_a_seed_decides(policy: str) -> None:
    def run(seed: int) -> tuple[Any, ...]:
        return numbers(MCTS(num_simulations=80, seed=seed, action_selection=policy).search(maze(3, 3)))

    assert run(1) == run(1)
    assert len({str(run(seed)) for seed in range(5)}) > 1


def test_a_tight_budget_changes_the_cost_and_not_the_answer() -> None:
    wide, tight = maze(5, 3, endings=0), maze(5, 3, endings=0)
    mcts = MCTS(num_simulations=150, max_snapshots=200)
    free = mcts.search(wide)
    bound = MCTS(num_simulations=150, max_snapshots=5).search(tight)
    assert numbers(free) == numbers(bound)
    assert wide.most_alive > 50 and tight.most_alive <= 5
    assert bound.num_steps == tight.num_steps > free.num_steps


class ParallelTable(TableModel):
    """Many states at once: what `ParallelModel` asks for."""

    most_at_once = 0

    def step_many(self, jobs: Sequence[tuple[int, Sequence[int]]]) -> list[list[Transition[int]]]:
        self.most_at_once = max(self.most_at_once, len(jobs))
        return [self.step_all(state, actions) for state, actions in jobs]

    def rollout_many(
        self, states: Sequence[int], *, max_steps: int, discount: float, seeds: Sequence[int]
    ) -> list[Playout]:
        return [
            self.rollout(state, max_steps=max_steps, discount=discount, seed=seed)
            for state, seed in zip(states, seeds, strict=True)
        ]


@settings(max_examples=40)
@given(
    seed=st.integers(0, 1000),
    batch_size=st.integers(1, 8),
    spare_snapshots=st.integers(2, 30),
    policy=st.sampled_from(["puct", "gumbel"]),
)
def test_many_states_at_once_change_nothing(
    seed: int, batch_size: int, spare_snapshots: int, policy: str
) -> None:
    mcts = MCTS(
        num_simulations=60,
        batch_size=batch_size,
        max_snapshots=batch_size + spare_snapshots,
        action_selection=policy,
        seed=seed,
    )
    single = maze(seed, 3)
    parallel = ParallelTable(single._rule, num_actions=3, max_depth=6)
    assert numbers(mcts.search(parallel)) == numbers(mcts.search(single))
    assert parallel.num_alive == 0
    assert parallel.most_alive <= mcts.max_snapshots


def test_a_batch_is_stepped_at_once() -> None:
    model = ParallelTable(maze(1, 3)._rule, num_actions=3)
    check_model(ParallelTable(maze(5, 3, endings=0)._rule, num_actions=3))
    MCTS(num_simulations=60, batch_size=8).search(model)
    assert model.most_at_once > 3


class Interrupted(KeyboardInterrupt):
    pass


def _fail_after(n: int, error: type[BaseException]) -> Callable[..., Any]:
    calls = iter(range(n))

    def fail(*_: object) -> Any:
        if next(calls, None) is None:
            raise error
        return False

    return fail


@pytest.mark.parametrize("error", [RuntimeError, Interrupted])
@pytest.mark.parametrize("where", ["evaluate", "stop_when", "on_simulation", "key", "step", "rollout"])
def test_states_are_released_when_anything_raises(where: str, error: type[BaseException]) -> None:
    model = maze(2, 3, endings=0)
    fail = _fail_after(20, error)
    settings: dict[str, Any] = {}
    if where in ("step", "rollout"):
        genuine = getattr(model, where)

        def failing(*args: Any, **kwargs: Any) -> Any:
            fail()
            return genuine(*args, **kwargs)

        setattr(model, where, failing)
    elif where == "evaluate":
        settings[where] = lambda observations: fail() or (None, [0.0] * len(observations))
    elif where == "key":
        settings[where] = lambda observation: (fail(), observation, np.random.random())
    else:
        settings[where] = fail
    with pytest.raises(error):
        MCTS(num_simulations=200, max_snapshots=50, **settings).search(model)
    assert model.num_alive == 0
    assert model.most_alive > 5


def test_one_failing_release_does_not_keep_the_others() -> None:
    model = maze(2, 3, endings=0)
    release, fail = model.release, _fail_after(3, OSError)

    def failing(state: int) -> None:
        release(state)
        fail()

    model.release = failing  # type: ignore[method-assign]
    with pytest.raises(OSError):  # noqa: PT011
        MCTS(num_simulations=30).search(model)
    assert model.num_alive == 0


@settings(max_examples=20)
@given(seed=st.integers(0, 1000), policy=st.sampled_from(["puct", "gumbel"]))
def test_search_is_ask_and_tell(seed: int, policy: str) -> None:
    def evaluate(observations: list[int]) -> tuple[list[list[float]], list[float]]:
        return [[p % 3 / 2, p % 5 / 4, p % 7 / 6] for p in observations], [p % 11 / 10 for p in observations]

    mcts = MCTS(num_simulations=50, evaluate=evaluate, action_selection=policy, seed=seed)
    with mcts.tree(maze(seed, 3)) as search:
        while batch := search.ask_batch(1):
            search.tell(batch, *evaluate(batch.observations))
    assert numbers(search.result()) == numbers(mcts.search(maze(seed, 3)))


def test_virtual_losses_spread_a_batch_and_are_undone() -> None:
    model = maze(4, 4, endings=0)
    with MCTS(num_simulations=100).tree(model) as search:
        first = search.ask_batch(8)
        assert [leaf.depth for leaf in first.leaves] == [0], "the first batch is the root alone"
        search.tell(first, None, [0.0])
        batch = search.ask_batch(4)
        assert sorted(leaf.action for leaf in batch.leaves) == [0, 1, 2, 3]
        assert search.tree.root.in_flight.tolist() == [1, 1, 1, 1]
        assert search.tree.root.children_visits.sum() == 0
        search.tell(batch, None, [0.0] * 4)
        assert search.tree.root.in_flight.sum() == 0
        assert search.tree.root.children_visits.tolist() == [1, 1, 1, 1]
        deeper = search.ask_batch(64)
        assert 1 < len(deeper) <= 64
        assert len({id(leaf) for leaf in deeper.leaves}) == len(deeper)


def test_misuse_of_ask_and_tell_is_named() -> None:
    model = maze(4, 2, endings=0)
    search = MCTS().tree(model)
    with pytest.raises(RuntimeError, match="with"):
        search.ask_batch()
    with search:
        batch = search.ask_batch()
        with pytest.raises(RuntimeError, match="tell"):
            search.ask_batch()
        with pytest.raises(RuntimeError, match="no action"):
            search.result()
        search.tell(batch, None, [0.0])
        with pytest.raises(ValueError, match="last"):
            search.tell(batch, None, [0.0])
        with pytest.raises(ValueError, match="at least one"):
            search.ask_batch(0)
    with pytest.raises(RuntimeError, match="released"):
        search.ask_batch()
    assert model.num_alive == 0


def test_progress_is_told() -> None:
    seen: list[tuple[int, int]] = []
    MCTS(num_simulations=10, on_simulation=lambda i, tree: seen.append((i, len(tree)))).search(maze(1, 3))
    assert [i for i, _ in seen] == list(range(1, 11))


def test_the_tree_outlives_its_states() -> None:
    def held(search: TreeSearch) -> int:
        return len(search.states)

    model = maze(1, 3, endings=0)
    with MCTS(num_simulations=20).tree(model) as search:
        search.tell(search.ask_batch(), None, [0.0])
        assert held(search) == model.num_alive == 1
    assert held(search) == model.num_alive == 0


@pytest.mark.parametrize(
    ("num_considered", "num_simulations", "schedule"),
    # The table of mctx's own tests of sequential halving.
    [
        (8, 24, [0] * 8 + [1] * 4 + [2] * 4 + [3, 3, 4, 4, 5, 5, 6, 6]),
        (8, 47, [0] * 8 + [1] * 4 + [2] * 4 + [3] * 4 + [v for v in range(4, 18) for _ in range(2)][:27]),
        (8, 2, [0, 0]),
        (8, 13, [0] * 8 + [1] * 4 + [2]),
        (7, 24, [0] * 7 + [1] * 3 + [2] * 3 + [3, 3, 4, 4, 5, 5, 6, 6, 7, 7, 8]),
        (0, 16, list(range(16))),
        (1, 16, list(range(16))),
    ],
)
def test_sequential_halving(num_considered: int, num_simulations: int, schedule: list[int]) -> None:
    assert list(considered_visits(num_considered, num_simulations)) == schedule


def test_gumbel_visits_follow_the_halving() -> None:
    model = TableModel(lambda p, a: (a, a / 8, False, False), num_actions=8)
    result = MCTS(num_simulations=24, action_selection="gumbel", rollout_max_steps=0).search(model)
    assert sorted(result.visit_counts.tolist()) == [1, 1, 1, 1, 3, 3, 7, 7]


def test_the_test_model_is_a_model() -> None:
    model = maze(1, 3, endings=0)
    check_model(model)
    assert model.num_alive == 0
