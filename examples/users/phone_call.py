"""A toy of a phone call, for a1 to a6: what the interpreter in the sandbox runs."""

from __future__ import annotations

from sandbox_gym import Sandbox

SCRIPT = """
import random

said, mood, budget = ["customer: I am looking for a flat."], 0.5, None
chance = random.Random(7)

def step(action):
    "What the assistant says next, and how the customer takes it."
    global mood, budget
    said.append(f"assistant: {action}")
    if action == "ask_budget":
        mood -= 0.1 * chance.random()
        budget = 1200
        said.append("customer: 1200 a month, at most.")
    elif action == "book_viewing":
        mood += 0.3 if budget is not None else -0.2
        said.append("customer: Tomorrow would be fine." if budget is not None else "customer: Which flat?")
    else:
        mood -= 0.3
        said.append("customer: No, I will call again.")

def score():
    return round(mood + (0.2 if budget is not None else 0.0), 3)
"""


def play_to_decision_point(box: Sandbox) -> None:
    """Runs the script, and the call up to the moment at which the assistant has a choice."""
    for cell in (SCRIPT, "step('ask_budget')"):
        result = box.run_code(cell)
        if not result.ok:
            raise RuntimeError(f"the call could not be played: {result.error}")
