"""Learning from duels: which of two continuations of a phone call a person would choose.

    sandbox-gym duel --n 50 --out preferences.jsonl      # a person chooses, on a local web page
    python -m examples.preferences preferences.jsonl

Without a file a simulated person chooses, who likes what is good for the business.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from pathlib import Path

import numpy as np

from sandbox_gym.duel import Preference, append, call_agent_duels, fit, load
from sandbox_gym.envs.call_agent import ACTIONS


def features(actions: list[str]) -> list[float]:
    """How often each thing was said, and what was said last: [2 * num_actions]."""
    return [float(actions.count(name)) for name in ACTIONS] + [float(actions[-1] == name) for name in ACTIONS]


def simulate(path: Path, number: int) -> None:
    duels = call_agent_duels(seed=0)
    for duel in itertools.islice(duels, number):
        append(path, duel, "a" if duel.about["return_a"] > duel.about["return_b"] else "b")


def arrays(preferences: list[Preference]) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Features of both sides, [n, d] each, and the choices."""
    sides = [
        np.array([features(p.about[f"actions_{side}"]) for p in preferences], np.float64) for side in "ab"
    ]
    return sides[0], sides[1], [p.choice for p in preferences]


def main(path: str | None = None) -> float:
    """Prints what is liked and what not; the share of a held-out third that the weights call right."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(path or f"{folder}/preferences.jsonl")
        if path is None:
            simulate(source, 150)
        preferences = [p for p in load(source) if p.choice != "tie"]
    held_out = len(preferences) // 3
    weights = fit(*arrays(preferences[held_out:]), ridge=1.0)
    a, b, choices = arrays(preferences[:held_out])
    right = np.where((a - b) @ weights > 0, "a", "b") == np.array(choices)
    names = [*ACTIONS, *(f"{name}, last" for name in ACTIONS)]
    ranked = sorted(zip(weights, names), reverse=True)
    print("liked:    ", ", ".join(f"{name} {weight:+.1f}" for weight, name in ranked[:3]))
    print("not liked:", ", ".join(f"{name} {weight:+.1f}" for weight, name in ranked[-3:]))
    print(f"{right.mean():.0%} of {held_out} held-out choices are called right")
    return float(right.mean())


if __name__ == "__main__":
    main(*sys.argv[1:2])
