"""What the assistant of `CallAgent-v0` perceives of a call, as numbers in 0 to 1."""

from __future__ import annotations

from typing import Any

import numpy as np

from sandbox_gym.envs.call_agent_caller import ACTIONS, AREAS, MAX_TURNS, NEEDS, REPLIES, TIMES, Call

FACTS = ("budget", "area", "time")
_MOST = 3  # times that an action was taken: more look the same
_NAMES = (
    *(f"need {need}" for need in NEEDS),
    *(f"area {area}" for area in AREAS),
    *(f"time {time}" for time in TIMES),
    "budget",
    *(f"knows {fact}" for fact in FACTS),
    *(f"reply {reply}" for reply in REPLIES),
    *(f"count {action}" for action in ACTIONS),
    *("tone", "turns", "discount"),
)
SIZE = len(_NAMES)


def observe(call: Call) -> Any:
    """float32 [SIZE]; nothing that the caller hasn't told."""
    caller, known = call.caller, call.known
    row = [float("need" in known and caller.need == need) for need in NEEDS]
    row += [float("area" in known and caller.area == area) for area in AREAS]
    row += [float("time" in known and caller.time == time) for time in TIMES]
    row += [caller.budget if "budget" in known else 0.0]
    row += [float(fact in known) for fact in FACTS]
    row += [float(call.reply == reply) for reply in REPLIES]
    row += [min(call.counts[action], _MOST) / _MOST for action in ACTIONS]
    row += [call.tone, call.turns / MAX_TURNS, float(call.discount)]
    return np.array(row, np.float32)


def named(observation: Any) -> dict[str, float]:
    """An observation's numbers by name: "need rent", "knows area", "reply doubts", "tone"; "count greet" in times."""
    numbers = dict(zip(_NAMES, map(float, observation), strict=True))
    return {
        name: round(_MOST * number) if name.startswith("count ") else number
        for name, number in numbers.items()
    }
