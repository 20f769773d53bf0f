"""Does search help? One weak policy, random over the menu, on the same quests for the same number of steps: as the
prior of a tree search over branches, and in independent episodes from the start, of which the best is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._report import Row, progress
from sandbox_gym.envs.shell_quest import KINDS, ShellQuestEnv, files_key
from sandbox_gym.envs.shell_quest_making import MENU_SIZE
from sandbox_gym.search import MCTS

_MAX_STEPS = 8  # of an episode, and so of a path in the tree

_SOLVED = 0.999  # an episode's return, sums of thirds and quarters
_LABELS = {
    "search": "tree search over branches, each state once",
    "tree": "tree search over branches, repeats allowed",
    "best-of-N": "best of N episodes from the start",
}
Outcome = int | None
"""Steps until the quest was solved; None where it was not."""
Method = Callable[[ShellQuestEnv, int, int], Outcome]


def _uniform(observations: list[Any]) -> tuple[None, Any]:
    """The weak policy as a prior: equal chances, and no idea what a state is worth beyond what it has earned."""
    return None, np.zeros(len(observations))


def _tree(env: ShellQuestEnv, budget: int, seed: int, *, key: Any) -> Outcome:
    planner = MCTS(
        num_simulations=budget,
        discount=1.0,
        evaluate=_uniform,
        key=key,
        stop_when=lambda node: node.path_return > _SOLVED,
        max_snapshots=budget + 2,
        seed=seed,
    )
    result = planner.search(env)
    return result.num_steps if result.found is not None and result.num_steps <= budget else None


def _search(env: ShellQuestEnv, budget: int, seed: int) -> Outcome:
    return _tree(env, budget, seed, key=files_key)


def _repeating(env: ShellQuestEnv, budget: int, seed: int) -> Outcome:
    return _tree(env, budget, seed, key=None)


def _best_of_n(env: ShellQuestEnv, budget: int, seed: int) -> Outcome:
    """Going back to the start counts as no step."""
    rng = np.random.default_rng(seed)
    start = env.snapshot()
    for step in range(1, budget + 1):
        _, _, solved, truncated, _ = env.step(np.int64(rng.integers(MENU_SIZE)))
        if solved:
            return step
        if truncated:
            env.restore(start)
    return None


def play(methods: dict[str, Method], per_kind: int, budget: int) -> dict[str, list[Outcome]]:
    """Every quest by every method, in the same order in each list."""
    quests = [(kind, 1000 + seed) for kind in KINDS for seed in range(per_kind)]

    def some(part: int) -> dict[tuple[str, str, int], Outcome]:
        found: dict[tuple[str, str, int], Outcome] = {}
        env = ShellQuestEnv(max_steps=_MAX_STEPS)
        try:
            for number, (kind, seed) in enumerate(quests[part::2]):
                for name, method in methods.items():
                    env.reset(seed=seed, options={"kind": kind})
                    found[name, kind, seed] = method(env, budget, seed)
                if part == 0 and number % 8 == 0:
                    progress(f"ShellQuest-v0: {2 * number} of {len(quests)} quests")
        finally:
            env.close()
        return found

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(some, (0, 1))
    everything = first | second
    return {name: [everything[name, kind, seed] for kind, seed in quests] for name in methods}


def mcnemar(ours: list[Outcome], theirs: list[Outcome]) -> tuple[int, int, float]:
    """Quests that only we solve, that only they solve, and the two-sided p of the exact test (McNemar 1947)."""
    won = sum(a is not None and b is None for a, b in zip(ours, theirs))
    lost = sum(a is None and b is not None for a, b in zip(ours, theirs))
    tail = sum(math.comb(won + lost, i) for i in range(min(won, lost) + 1)) / 2 ** (won + lost)
    return won, lost, min(1.0, 2 * tail)


def run(quick: bool, figure: Path | None = None) -> list[Row]:
    methods: dict[str, Method] = {"search": _search, "best-of-N": _best_of_n}
    per_kind, budget, significant = (1, 60, 0.05) if quick else (4, 120, 0.01)
    if not quick:
        methods["tree"] = _repeating
    found = play(methods, per_kind, budget)
    number = per_kind * len(KINDS)
    solved = {name: sum(outcome is not None for outcome in found[name]) for name in methods}
    won, lost, p = mcnemar(found["search"], found["best-of-N"])
    where = f"ShellQuest-v0, {number} quests, {budget} steps each"
    rows = [
        Row(
            f"{where}: {_LABELS['search']}",
            solved["search"] / number,
            "solved",
            _LABELS["best-of-N"],
            solved["best-of-N"] / number,
            bar=1.0,
            more_is_better=True,
        ),
        Row(
            f"only search solves {won}, only best-of-N {lost}: McNemar's exact p",
            p,
            "",
            "significant",
            significant,
            bar=1.0,
        ),
    ]
    if "tree" in solved:
        rows.append(
            Row(
                f"{where}: {_LABELS['tree']}",
                solved["tree"] / number,
                "solved",
                "best-of-N",
                rows[0].reference_value,
            )
        )
    if figure is not None:
        draw(found, budget, p, figure)
    return rows


def draw(found: dict[str, list[Outcome]], budget: int, p: float, path: Path) -> None:
    """Quests solved over steps spent, a line for each method."""
    from matplotlib import pyplot

    pictured, axes = pyplot.subplots(figsize=(6.4, 4.0), dpi=120)
    colours = {"search": "#2a6fbb", "tree": "#8fb6de", "best-of-N": "#c0504d"}
    steps = np.arange(budget + 1)
    for name, outcomes in found.items():
        shares = [sum(o is not None and o <= step for o in outcomes) / len(outcomes) for step in steps]
        axes.plot(steps, shares, color=colours[name], label=_LABELS[name], lw=2)
        error = 1.96 * np.sqrt(np.array(shares) * (1 - np.array(shares)) / len(outcomes))
        axes.fill_between(steps, shares - error, shares + error, color=colours[name], alpha=0.15, lw=0)
    axes.set(xlabel="steps spent on a quest", ylabel="quests solved", xlim=(0, budget), ylim=(0, 1))
    axes.set_title(f"ShellQuest-v0, random policy, {len(found['search'])} quests, p = {p:.1g}", fontsize=10)
    axes.legend(frameon=False, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    pictured.tight_layout()
    pictured.savefig(path)
    pyplot.close(pictured)
