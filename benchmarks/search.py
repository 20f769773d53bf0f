"""The same MCTS over frozen sandboxes and over deep copies of the bare environment: what isolation costs a search.

python -m benchmarks.search [--quick] [--json FILE]
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import gymnasium

from benchmarks._report import Row, main
from sandbox_gym.env import SandboxEnv
from sandbox_gym.search import MCTS


def nodes_per_second(env: gymnasium.Env[Any, Any], planner: MCTS) -> float:
    start = time.perf_counter()
    result = planner.search(env)
    return result.num_nodes / (time.perf_counter() - start)


def compare(planner: MCTS, rounds: int) -> tuple[float, float]:
    """Median nodes/s over sandboxes, and over deep copies, in alternating rounds."""
    bare = gymnasium.make("CartPole-v1")
    ours = SandboxEnv("CartPole-v1")
    sandboxed: list[float] = []
    deepcopied: list[float] = []
    try:
        for seed in range(rounds):
            for env, found in ((ours, sandboxed), (bare, deepcopied)):
                env.reset(seed=seed)
                found.append(nodes_per_second(env, planner))
    finally:
        ours.close()
        bare.close()
    return statistics.median(sandboxed), statistics.median(deepcopied)


def run(quick: bool) -> list[Row]:
    simulations, rounds = (150, 3) if quick else (400, 5)
    rows = []
    for name, steps in (("MCTS, CartPole, no playouts", 0), ("MCTS, CartPole, playouts of 50 steps", 50)):
        planner = MCTS(
            num_simulations=simulations, rollout_max_steps=steps, max_snapshots=2 * simulations, seed=0
        )
        ours, bare = compare(planner, rounds)
        rows.append(Row(name, ours, "nodes/s", "deep copies", bare))
    return rows


if __name__ == "__main__":
    main(__doc__, run)
