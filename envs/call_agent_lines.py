"""What assistant and caller say, in `CallAgent-v0`: a few wordings of each line."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sandbox_gym.envs.call_agent_caller import Caller

_HOMES = {"rent": "flat", "buy": "house"}
_SAID = {
    "greet": ("Good day, Linden Homes, how can I help?", "Hello, this is Linden Homes. Good that you call."),
    "ask_need": ("What is it about?", "Tell me, what can we do for you?"),
    "ask_budget": ("What may it cost?", "Which price did you have in mind?"),
    "ask_area": ("Which part of town should it be in?", "Where would you like to live?"),
    "ask_time": ("When could you come and see it?", "Which days suit you?"),
    "describe_home": ("We have a bright {home} {place}{price}.", "There is a lovely {home} {place}{price}."),
    "book_viewing": ("Shall I put you down for a viewing{when}?", "May I book you a viewing{when}?"),
    "offer_discount": (
        "I could take something off the fee for you.",
        "If you decide now, half the fee is ours.",
    ),
    "offer_callback": ("May a colleague call you back?", "Shall we ring you later today?"),
    "apologise": ("I am sorry about that.", "Please excuse us, that should not have happened."),
    "transfer": ("I put you through to a colleague.", "One moment, my colleague takes over."),
    "close": ("Thank you for calling. Goodbye.", "Then I wish you a good day."),
}
_HEARD: dict[str, tuple[str, ...] | dict[str, tuple[str, ...]]] = {
    "rings": ("Hello?", "Yes, good day.", "Am I speaking to Linden Homes?"),
    "greets": ("Good day.", "Hello, nice to get through."),
    "tells_need": {
        "rent": ("I am looking for a flat to rent.", "We need a flat, to rent."),
        "buy": ("We would like to buy a house.", "I want to buy, a house if possible."),
        "sell": ("I think of selling my house.", "What would you get me for my house?"),
        "repair": ("My heating has been off for three days!", "The ceiling drips, and nobody comes!"),
        "browse": ("I only wanted to hear what there is.", "Nothing special. What do you have?"),
    },
    "tells_budget": ("About {budget}, not more.", "It may cost {budget}."),
    "tells_area": ("In the {area}, if I can choose.", "The {area} would be best."),
    "tells_time": ("I am free {time}.", "Only {time}, I am afraid."),
    "evades": ("Hm, that depends.", "I would rather not say yet."),
    "interested": ("That sounds good!", "Oh, tell me more."),
    "doubts": ("Hm, that is not quite it.", "I don't know. It isn't what I had in mind."),
    "declines": ("No, that is too soon.", "I don't think so."),
    "warms": ("All right. Thank you for saying that.", "Well. It happens."),
    "unmoved": ("What for?", "No harm done."),
    "annoyed": ("What has that to do with it?", "I said so already.", "Are you listening at all?"),
    "viewing": ("Yes, gladly! Until then.", "Good, I will be there."),
    "callback": ("Yes, please do. Goodbye.", "Good, I wait for your call."),
    "transfer": ("Fine.", "At last."),
    "closed": ("Goodbye.", "Bye."),
    "hung_up": ("That's enough. (hangs up)", "(hangs up)"),
}


def said(action: str, caller: Caller, known: set[str], number: float) -> str:
    """The assistant's words; they use what is known of the caller. `number` in [0, 1) chooses the wording."""
    return _choose(_SAID[action], number).format(
        home=_HOMES.get(caller.need, "home") if "need" in known else "home",
        place=f"in the {caller.area}" if "area" in known else "not far from here",
        price=f" for {_price(caller)}" if "budget" in known else "",
        when=f" {caller.time}" if "time" in known else "",
    )


def heard(line: str, caller: Caller, number: float) -> str:
    """The caller's words."""
    wordings = _HEARD[line]
    if isinstance(wordings, dict):
        wordings = wordings[caller.need]
    return _choose(wordings, number).format(budget=_price(caller), area=caller.area, time=caller.time)


def _price(caller: Caller) -> str:
    if caller.need == "rent":
        return f"{int(500 + 100 * round(15 * caller.budget))} a month"
    return f"{int(150 + 10 * round(50 * caller.budget))} thousand"


def _choose(wordings: tuple[str, ...], number: float) -> str:
    return wordings[int(number * len(wordings))]
