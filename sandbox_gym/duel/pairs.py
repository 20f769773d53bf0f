"""Where duels come from: two branches of one environment, played on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sandbox_gym.branching import Branch
from sandbox_gym.env import SandboxEnv
from sandbox_gym.envs.call_agent import ACTIONS
from sandbox_gym.envs.call_agent_policy import MAX_POINTS, receptionist

_WANDERS = 0.15  # of the actions after the first are random, so that continuations differ


@dataclass(frozen=True)
class Duel:
    """Texts of what both have in common, and of each continuation. `about`: plain data to store with the choice."""

    prefix: str
    a: str
    b: str
    about: dict[str, Any] = field(default_factory=dict)


def call_agent_duels(*, seed: int = 0) -> Iterator[Duel]:
    """Duels of `CallAgent-v0` without end: a call at a decision point, branched by two different actions, each
    played on by a receptionist who sometimes wanders. `about`: seed, both returns, and both lists of actions, by name.

    Close it (`close()`), or drop it, to end its sandbox. Raises what branching does.
    """
    rng = np.random.default_rng(seed)
    env = SandboxEnv("sandbox_gym:CallAgent-v0")
    try:
        while True:
            call = int(rng.integers(2**31))
            points = 1 + int(rng.integers(MAX_POINTS))
            _, info = env.reset(seed=call, options={"decision": points})
            prefix = info["transcript"]
            first = rng.choice(len(ACTIONS), size=2, replace=False)
            branches = env.branch(actions=list(first))
            try:
                ends = [_play_on(branch, int(action), rng) for branch, action in zip(branches, first)]
            finally:
                for branch in branches:
                    branch.env.close()
            (a, actions_a, return_a), (b, actions_b, return_b) = ends
            about = {"seed": call, "decision": points, "actions_a": actions_a, "actions_b": actions_b}
            about |= {"return_a": return_a, "return_b": return_b}
            yield Duel(prefix, a[len(prefix) :].strip(), b[len(prefix) :].strip(), about)
    finally:
        env.close()


def _play_on(branch: Branch, action: int, rng: np.random.Generator) -> tuple[str, list[str], float]:
    """To the call's end: its transcript, its actions, its return from the branch on."""
    observation, info, over = branch.observation, branch.info, branch.terminated
    actions, gained = [ACTIONS[action]], branch.reward
    while not over:
        wanders = rng.random() < _WANDERS
        number = int(rng.integers(len(ACTIONS))) if wanders else receptionist(observation)
        observation, reward, over, _, info = branch.env.step(np.int64(number))
        actions.append(ACTIONS[number])
        gained += reward
    return info["transcript"], actions, round(gained, 3)
