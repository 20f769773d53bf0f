"""Redis in a sandbox, branched while it serves: a migration that greedy play spoils, and that a search gets right.

python -m examples.database [--seed N]
"""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path

import gymnasium

from examples.database.migration import ACTIONS
from sandbox_gym._table import table
from sandbox_gym.env import SandboxEnv
from sandbox_gym.search import Node, SearchResult, beam_search, observation_key


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m examples.database",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seed", type=int, default=0, help="of the customers")
    seed = parser.parse_args().seed
    with contextlib.closing(make()) as env:
        env.reset(seed=seed)
        print("Each action, on a copy of the server and of the connection to it:\n")
        print(show_branches(env))
        greedy = play_greedily(env)
        print(f"\ngreedy    {greedy:5.1f}")
        result = search(env)
        found = sum(env.step(action)[1] for action in result.principal_variation)
        plan = ", ".join(ACTIONS[action] for action in result.principal_variation)
        print(f"searched  {found:5.1f}   {plan} ({result.num_steps} steps on copies)")
    return 0 if found > greedy else 1


def make() -> SandboxEnv:
    here = str(Path(__file__).parents[2])  # where the sandbox finds `examples`
    env = gymnasium.make(
        "sandbox_gym:Sandbox-v0", entry_point="examples.database.migration:MigrationEnv", python_path=[here]
    )
    assert isinstance(env.unwrapped, SandboxEnv)
    return env.unwrapped


def show_branches(env: SandboxEnv) -> str:
    rows = []
    for action, branch in enumerate(env.branch(actions=range(len(ACTIONS)))):
        counts = " ".join(map(str, branch.observation))
        rows.append((ACTIONS[action], counts, f"{branch.reward:.1f}", f"{branch.info['connection']}"))
        branch.env.close()
    return table(("action", "names, split, indexed", "reward", "connection"), rows, right={2, 3})


def play_greedily(env: SandboxEnv) -> float:
    """On a copy, always the action that gives most at once. The return."""
    total, ended = 0.0, False
    (copy,) = env.branch(1)
    while not ended:
        branches = copy.branch(actions=range(len(ACTIONS)))
        best = max(branches, key=lambda branch: branch.reward)
        total, ended = total + best.reward, best.terminated
        for other in {copy, *(branch.env for branch in branches)} - {best.env}:
            other.close()
        copy = best.env
    copy.close()
    return total


def search(env: SandboxEnv) -> SearchResult:
    def passed(node: Node) -> bool:
        return node.reward > 1

    return beam_search(env, width=4, depth=4, discount=1.0, key=observation_key, stop_when=passed)


if __name__ == "__main__":
    raise SystemExit(main())
