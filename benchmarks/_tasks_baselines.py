"""Mean returns of plain policies in CallAgent-v0 and ShellQuest-v0, each on the same seeds."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks._report import Row, progress
from sandbox_gym.envs.call_agent import ACTIONS, CallAgentEnv
from sandbox_gym.envs.call_agent_caller import MAX_TURNS
from sandbox_gym.envs.call_agent_policy import receptionist
from sandbox_gym.envs.shell_quest import KINDS, ShellQuestEnv
from sandbox_gym.envs.shell_quest_making import MENU_SIZE
from sandbox_gym.search import best_of_n

Policy = Callable[[CallAgentEnv, Any, np.random.Generator], int]


def _random(env: CallAgentEnv, _: Any, rng: np.random.Generator) -> int:
    return int(rng.integers(len(ACTIONS)))


def _rules(_: CallAgentEnv, observation: Any, __: np.random.Generator) -> int:
    return receptionist(observation)


def _greedy(env: CallAgentEnv, _: Any, rng: np.random.Generator) -> int:
    """The action with the greatest reward now, each tried in a copy."""
    return best_of_n(env, n=len(ACTIONS), max_steps=1, seed=int(rng.integers(2**31))).action


def _search(env: CallAgentEnv, _: Any, rng: np.random.Generator) -> int:
    """The first action of the best of 60 random playouts from here; planned anew after each step."""
    return best_of_n(env, n=60, max_steps=MAX_TURNS, seed=int(rng.integers(2**31))).action


def calls(policy: Policy, number: int) -> list[float]:
    env = CallAgentEnv()
    returns = []
    for seed in range(number):
        rng = np.random.default_rng(seed)
        observation, _ = env.reset(seed=seed)
        total, over = 0.0, False
        while not over:
            observation, reward, over, _, _ = env.step(np.int64(policy(env, observation, rng)))
            total += reward
        returns.append(total)
    return returns


def quests(per_kind: int, *, reference: bool) -> float:
    """The share of quests that are solved: by random play of the menu, or by the reference."""
    env = ShellQuestEnv()
    rng = np.random.default_rng(0)
    solved = total = 0
    try:
        for kind in KINDS:
            for seed in range(per_kind):
                env.reset(seed=seed, options={"kind": kind})
                plan = [env.quest.menu.index(command) for command in env.quest.reference] if reference else []
                over = False
                while not over:
                    action = plan.pop(0) if plan else int(rng.integers(MENU_SIZE))
                    _, _, done, truncated, _ = env.step(np.int64(action))
                    over = done or truncated
                solved += done
                total += 1
    finally:
        env.close()
    return solved / total


def run(quick: bool) -> list[Row]:
    rows = []
    number = 100 if quick else 1000
    policies: list[tuple[str, Policy, int]] = [
        ("random", _random, number),
        ("one-step greedy", _greedy, number // 2),
        ("rules", _rules, number),
        ("search, best of 60 random playouts", _search, number // 5),
    ]
    for name, policy, episodes in policies:
        progress(f"CallAgent-v0: {name}")
        returns = calls(policy, episodes)
        error = statistics.stdev(returns) / len(returns) ** 0.5
        label = f"CallAgent-v0, {name} (+-{1.96 * error:.2f}, {episodes} calls)"
        rows.append(Row(label, statistics.mean(returns), "return"))
    per_kind = 1 if quick else 20
    progress("ShellQuest-v0: random and reference")
    chance = quests(per_kind, reference=False)
    rows.append(Row(f"ShellQuest-v0, random, {per_kind * len(KINDS)} quests", chance, "solved"))
    rows.append(
        Row("ShellQuest-v0, reference", quests(per_kind, reference=True), "solved", "all", 1.0, 1.0, True)
    )
    return rows
