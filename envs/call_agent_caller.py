"""The simulated caller of `CallAgent-v0`: who he is, how a call stands, and what each action does to it.

Everything random comes from `draw`, a function that gives numbers in [0, 1): a call is plain data, and can be copied.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from sandbox_gym.envs.call_agent_lines import heard, said

Draw = Callable[[], float]

ACTIONS = (
    *("greet", "ask_need", "ask_budget", "ask_area", "ask_time", "describe_home"),
    *("book_viewing", "offer_discount", "offer_callback", "apologise", "transfer", "close"),
)
NEEDS = ("rent", "buy", "sell", "repair", "browse")
AREAS = ("centre", "north", "riverside")
TIMES = ("mornings", "evenings", "weekends")
REPLIES = (
    *("greets", "tells", "evades", "interested", "doubts", "declines", "warms", "unmoved", "annoyed", "ends"),
)
SEEKERS = ("rent", "buy")
MAX_TURNS = 24

TURN_COST = 0.1
ANNOYANCE_COST = 2.0  # for all of a caller's good mood
HANG_UP = -3.0
VIEWING, DISCOUNT = 10.0, 3.0
CALLBACK = {"rent": 3.0, "buy": 3.0, "sell": 6.0, "repair": -2.0, "browse": 0.5}
TRANSFER = {"rent": -1.0, "buy": -1.0, "sell": 2.0, "repair": 4.0, "browse": -1.0}
CLOSE = {"rent": 0.0, "buy": 0.0, "sell": 0.0, "repair": -1.0, "browse": 1.0}


@dataclass(frozen=True)
class Caller:
    """Hidden from the assistant until he tells. `budget` 0 to 1 of what homes cost; `temper` 0 to 1; `patience` in
    turns.
    """

    need: str
    budget: float
    area: str
    time: str
    temper: float
    patience: int


@dataclass
class Call:
    """All of a call's state. `mood` and `interest` lie in 0 to 1; `tone` is the mood as it sounds."""

    caller: Caller
    mood: float
    interest: float
    tone: float = 0.5
    turns: int = 0
    earned: float = 0.0
    known: set[str] = field(default_factory=set)  # of need, budget, area, time
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ACTIONS, 0))
    discount: bool = False
    reply: str = "greets"
    outcome: str | None = None  # viewing, callback, transfer, closed, hung_up
    transcript: list[tuple[str, str]] = field(default_factory=list)  # (assistant or caller, what was said)

    @property
    def decision(self) -> bool:
        """What comes next matters: the caller's wish is known, and he waits for an answer."""
        waits = self.reply in ("interested", "doubts", "declines", "annoyed")
        told_why = self.reply == "tells" and self.counts["ask_need"] > 0 and self.known == {"need"}
        return self.outcome is None and "need" in self.known and (waits or told_why)


def begin(draw: Draw) -> Call:
    """Somebody calls."""
    need = _pick(NEEDS, draw, (0.3, 0.55, 0.72, 0.88, 1.0))
    temper, calm = draw(), draw()
    caller = Caller(
        need=need,
        budget=round(0.2 + 0.8 * draw(), 2),
        area=_pick(AREAS, draw),
        time=_pick(TIMES, draw),
        temper=temper,
        patience=int(7 + 9 * draw()),
    )
    mood = 0.3 + 0.15 * calm if need == "repair" else 0.55 + 0.3 * calm
    call = Call(caller, mood, interest=0.2 + 0.3 * draw())
    call.tone = _tone(call, draw)
    call.transcript.append(("caller", heard("rings", caller, draw())))
    return call


def advance(call: Call, action: str, draw: Draw) -> float:
    """The assistant says something, the caller answers. The reward.

    Raises ValueError for an action that isn't one of ACTIONS, or when the call is over.
    """
    if action not in ACTIONS:
        raise ValueError(f"there is no action {action!r}: there are {', '.join(ACTIONS)}")
    if call.outcome is not None:
        raise ValueError(f"the call is over ({call.outcome}): begin another")
    mood = call.mood
    call.transcript.append(("assistant", said(action, call.caller, call.known, draw())))
    gained = _DEEDS[action](call, action, draw)
    call.counts[action] += 1
    call.turns += 1
    reward = gained - TURN_COST - ANNOYANCE_COST * max(0.0, mood - call.mood)
    if call.outcome is None and _hangs_up(call, draw):
        call.outcome, call.reply = "hung_up", "ends"
        reward += HANG_UP
    call.tone = _tone(call, draw)
    call.transcript.append(("caller", heard(call.outcome or _line(call, action), call.caller, draw())))
    call.earned += reward
    return reward


def worth(call: Call) -> float:
    """What the best ending would bring on average if it came now; 0 once the call is over. It knows the caller."""
    if call.outcome is not None:
        return 0.0
    need = call.caller.need
    endings = [CLOSE[need], TRANSFER[need], _callback_chance(call) * CALLBACK[need]]
    if need in SEEKERS:
        endings.append(_viewing_chance(call) * _viewing_value(call))
    return max(endings)


# ---- what actions do: each gives what it gained beyond moods and time ---------------------------------------------


def _greet(call: Call, _: str, __: Draw) -> float:
    return _answer(call, "greets", mood=0.1) if not call.counts["greet"] else _annoy(call, 0.15)


def _ask(call: Call, action: str, draw: Draw) -> float:
    fact = action.removeprefix("ask_")
    if fact in call.known:
        return _annoy(call, 0.2)
    if fact != "need" and call.caller.need not in SEEKERS:
        return _annoy(call, 0.2 if call.caller.need == "repair" else 0.1)
    if draw() < 0.12 or (fact == "budget" and "need" not in call.known):
        return _answer(call, "evades", mood=-0.05)
    call.known.add(fact)
    return _answer(call, "tells", mood=-0.02, interest=0.05)


def _describe(call: Call, _: str, draw: Draw) -> float:
    if call.caller.need not in SEEKERS:
        return _annoy(call, 0.2)
    fits_budget = "budget" in call.known or draw() < 0.4
    fits_area = "area" in call.known or draw() < 1 / 3
    tired = 0.15 * call.counts["describe_home"]
    if fits_budget and fits_area:
        return _answer(call, "interested", mood=0.05, interest=0.45 - tired)
    if fits_budget or fits_area:
        return _answer(call, "doubts", mood=-0.03, interest=0.1 - tired)
    return _answer(call, "doubts", mood=-0.12, interest=-0.15)


def _book(call: Call, _: str, draw: Draw) -> float:
    if call.caller.need not in SEEKERS:
        return _annoy(call, 0.25)
    if draw() < _viewing_chance(call):
        return _end(call, "viewing", _viewing_value(call))
    return _answer(call, "declines", mood=-0.12, interest=-0.08)


def _discount(call: Call, _: str, __: Draw) -> float:
    if call.caller.need not in SEEKERS or call.discount:
        return _annoy(call, 0.08)
    call.discount = True
    return _answer(call, "interested", mood=0.1, interest=0.25)


def _callback(call: Call, _: str, draw: Draw) -> float:
    if draw() < _callback_chance(call):
        return _end(call, "callback", CALLBACK[call.caller.need])
    return _answer(call, "declines", mood=-0.1)


def _apologise(call: Call, _: str, __: Draw) -> float:
    if call.mood < 0.5:
        return _answer(call, "warms", mood=0.25 / (1 + call.counts["apologise"]))
    return _answer(call, "unmoved", mood=-0.05)


def _transfer(call: Call, _: str, __: Draw) -> float:
    gained = TRANSFER[call.caller.need]
    return _end(call, "transfer", gained if "need" in call.known or gained < 0 else gained / 2)


def _close(call: Call, _: str, __: Draw) -> float:
    return _end(call, "closed", CLOSE[call.caller.need])


_DEEDS: dict[str, Callable[[Call, str, Draw], float]] = {
    "greet": _greet,
    "ask_need": _ask,
    "ask_budget": _ask,
    "ask_area": _ask,
    "ask_time": _ask,
    "describe_home": _describe,
    "book_viewing": _book,
    "offer_discount": _discount,
    "offer_callback": _callback,
    "apologise": _apologise,
    "transfer": _transfer,
    "close": _close,
}


def _answer(call: Call, reply: str, *, mood: float = 0.0, interest: float = 0.0) -> float:
    scale = 0.5 + call.caller.temper if mood < 0 else 1.0
    call.mood = min(1.0, max(0.0, call.mood + scale * mood))
    call.interest = min(1.0, max(0.0, call.interest + interest))
    call.reply = reply
    return 0.0


def _annoy(call: Call, mood: float) -> float:
    return _answer(call, "annoyed", mood=-mood)


def _end(call: Call, outcome: str, gained: float) -> float:
    call.outcome, call.reply = outcome, "ends"
    return gained


def _viewing_chance(call: Call) -> float:
    known = 0.15 if "time" in call.known else -0.1
    return min(0.97, max(0.02, 0.85 * call.interest + 0.35 * call.mood + known - 0.25))


def _viewing_value(call: Call) -> float:
    return VIEWING - DISCOUNT * call.discount


def _callback_chance(call: Call) -> float:
    base = {"sell": 0.5, "browse": 0.3, "repair": 0.2}.get(call.caller.need, 0.35)
    return min(0.97, base * (0.6 + 0.4 * ("need" in call.known)) + 0.45 * call.mood)


def _hangs_up(call: Call, draw: Draw) -> bool:
    over = call.turns - call.caller.patience
    return call.mood < 0.08 or call.turns >= MAX_TURNS or (over > 0 and draw() < 0.3 * over)


def _tone(call: Call, draw: Draw) -> float:
    return min(1.0, max(0.0, call.mood + 0.3 * (draw() - 0.5)))


def _line(call: Call, action: str) -> str:
    """Which of the caller's lines answers."""
    return f"tells_{action.removeprefix('ask_')}" if call.reply == "tells" else call.reply


def _pick(choices: tuple[str, ...], draw: Draw, below: tuple[float, ...] | None = None) -> str:
    """One of them; `below`: each choice's share, added up."""
    number = draw()
    if below is None:
        return choices[int(number * len(choices))]
    return next(choice for choice, end in zip(choices, below) if number < end)
