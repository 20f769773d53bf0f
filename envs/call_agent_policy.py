"""A plain receptionist for `CallAgent-v0`: fixed rules over what is observed."""

from __future__ import annotations

from typing import Any

from sandbox_gym.envs.call_agent_caller import ACTIONS, NEEDS, SEEKERS, Call, Draw, advance, begin
from sandbox_gym.envs.call_agent_observation import FACTS, named, observe

MAX_POINTS = 3


def receptionist(observation: Any) -> int:
    """The action of a polite assistant who works through a list and never looks ahead. `observation`: [SIZE]."""
    return ACTIONS.index(_receptionist(named(observation)))


def _receptionist(seen: dict[str, float]) -> str:
    if not seen["count greet"]:
        return "greet"
    if seen["tone"] < 0.3 and seen["count apologise"] < 2:
        return "apologise"
    need = next((need for need in NEEDS if seen[f"need {need}"]), None)
    if need is None:
        return "ask_need"
    if need not in SEEKERS:
        return {"sell": "offer_callback", "repair": "transfer"}.get(need, "close")
    for fact in FACTS:
        if not seen[f"knows {fact}"] and seen[f"count ask_{fact}"] < 2:
            return f"ask_{fact}"
    if not seen["count describe_home"]:
        return "describe_home"
    return "book_viewing" if seen["count book_viewing"] < 2 else "offer_callback"


def play_to_decision(draw: Draw, points: int) -> Call:
    """A call that the receptionist has played to its n-th decision point; for 0, one that has just begun. Calls that
    end before are left for the next. Raises ValueError for more than MAX_POINTS.
    """
    if not 0 <= points <= MAX_POINTS:
        raise ValueError(f"decision is 0 to {MAX_POINTS}, not {points}")
    call, seen = begin(draw), 0
    while seen < points:
        advance(call, ACTIONS[receptionist(observe(call))], draw)
        seen += call.decision
        if call.outcome is not None:
            call, seen = begin(draw), 0
    return call
