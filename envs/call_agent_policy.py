"""A plain receptionist for `CallAgent-v0`: fixed rules over what is known, nothing that the caller hides."""

from __future__ import annotations

from sandbox_gym.envs.call_agent_caller import SEEKERS, Call, Draw, advance, begin

MAX_POINTS = 3


def receptionist(call: Call) -> str:
    """The action of a polite assistant who works through a list and never looks ahead."""
    known, counts = call.known, call.counts
    if not counts["greet"]:
        return "greet"
    if call.tone < 0.3 and counts["apologise"] < 2:
        return "apologise"
    if "need" not in known:
        return "ask_need"
    if call.caller.need not in SEEKERS:  # he has said so
        return {"sell": "offer_callback", "repair": "transfer"}.get(call.caller.need, "close")
    for fact in ("budget", "area", "time"):
        if fact not in known and counts[f"ask_{fact}"] < 2:
            return f"ask_{fact}"
    if not counts["describe_home"]:
        return "describe_home"
    return "book_viewing" if counts["book_viewing"] < 2 else "offer_callback"


def play_to_decision(draw: Draw, points: int) -> Call:
    """A call that the receptionist has played to its n-th decision point; for 0, one that has just begun. Calls that
    end before are left for the next. Raises ValueError for more than MAX_POINTS.
    """
    if not 0 <= points <= MAX_POINTS:
        raise ValueError(f"decision is 0 to {MAX_POINTS}, not {points}")
    call, seen = begin(draw), 0
    while seen < points:
        advance(call, receptionist(call), draw)
        seen += call.decision
        if call.outcome is not None:
            call, seen = begin(draw), 0
    return call
