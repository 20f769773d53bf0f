"""`CallAgent-v0` as a script in an interpreter: play to a decision point, freeze the process, try what comes next.

box.run_code("from sandbox_gym.envs.call_agent_script import *; play(seed=7)")
box.run_code("step('ask_budget'); print(score())")
"""

from __future__ import annotations

import random

from sandbox_gym.envs.call_agent_caller import Call, advance, worth
from sandbox_gym.envs.call_agent_policy import play_to_decision

__all__ = ["call", "play", "score", "step", "transcript"]

_calls: list[
    Call
] = []  # the present one; random numbers are those of Python's `random`, which copies can diverge in


def play(seed: int, decision: int = 1) -> None:
    """Plays a call by a plain receptionist to its n-th decision point. Prints what was said."""
    random.seed(seed)
    _calls[:] = [play_to_decision(random.random, decision)]
    print(transcript())


def call() -> Call:
    """The present call. Raises RuntimeError before the first."""
    if not _calls:
        raise RuntimeError("nobody has called yet: play(seed=0)")
    return _calls[-1]


def step(action: str) -> str:
    """Says something; what the caller answers. Raises ValueError for what can't be said."""
    advance(call(), action, random.random)
    return call().transcript[-1][1]


def score() -> float:
    """What the call has brought so far, and what its best ending would bring on average if it came now."""
    return round(call().earned + worth(call()), 3)


def transcript() -> str:
    return "\n".join(f"{who}: {text}" for who, text in call().transcript)
