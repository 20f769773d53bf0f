"""What people have chosen: one JSON line each, and a Bradley-Terry fit to learn from them."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sandbox_gym.duel.pairs import Duel

CHOICES = ("a", "b", "tie")


@dataclass(frozen=True)
class Preference:
    """`choice`: "a", "b" or "tie"; `time`: seconds since 1970; `about`: the duel's own."""

    prefix: str
    a: str
    b: str
    choice: str
    time: float
    about: dict[str, Any] = field(default_factory=dict)


def append(path: str | os.PathLike[str], duel: Duel, choice: str) -> Preference:
    """Adds a line to the file, which is made where it is missing. The line is on the disk, whole, when this returns;
    where it can't be, nothing of it is. Several processes may add to one file.

    Raises OSError, and ValueError for a choice that isn't one of CHOICES.
    """
    if choice not in CHOICES:
        raise ValueError(f"a choice is one of {', '.join(CHOICES)}, not {choice!r}")
    made = Preference(duel.prefix, duel.a, duel.b, choice, round(time.time(), 3), dict(duel.about))
    line = json.dumps(asdict(made)).encode() + b"\n"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        size = _whole(fd)
        try:
            while line:
                line = line[os.write(fd, line) :]
            os.fsync(fd)
        except BaseException:
            os.ftruncate(fd, size)
            raise
    finally:
        os.close(fd)  # and with it the lock
    return made


def _whole(fd: int) -> int:
    """The size of a file's whole lines; what a process that was killed has left behind them is cut off."""
    size = os.fstat(fd).st_size
    end = size
    while end:
        start = max(0, end - 4096)
        found = os.pread(fd, end - start, start).rfind(b"\n")
        if found >= 0:
            end = start + found + 1
            break
        end = start
    if end != size:
        os.ftruncate(fd, end)
    return end


def load(path: str | os.PathLike[str]) -> list[Preference]:
    """All preferences of a file, oldest first. A last line without its end, which a process that was killed may leave,
    isn't one. Raises OSError, and ValueError, with its number, for a line that is no preference.
    """
    made = []
    for number, line in enumerate(Path(path).read_bytes().split(b"\n")[:-1], 1):
        try:
            found = Preference(**json.loads(line))
            if found.choice not in CHOICES:
                raise ValueError(f"its choice is {found.choice!r}")
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}, line {number}, is no preference: {error}") from None
        made.append(found)
    return made


def fit(
    features_a: Any, features_b: Any, choices: Sequence[str], *, ridge: float = 1e-2, steps: int = 50
) -> Any:
    """Weights [d] of a Bradley-Terry model: "a" is chosen with probability sigmoid(w @ (features_a - features_b)); a
    tie is half of each. By Newton's method (Bradley and Terry 1952; Hunter 2004), with `ridge` on the squared weights.

    `features_a`, `features_b`: [n, d], of each preference's two sides. Raises ValueError for shapes that don't fit.
    """
    import numpy as np

    difference = np.asarray(features_a, float) - np.asarray(features_b, float)  # [n, d]
    if difference.ndim != 2 or len(difference) != len(choices) or not len(choices):
        raise ValueError(f"features are [n, d] and choices n, not {difference.shape} and {len(choices)}")
    target = np.array([{"a": 1.0, "b": 0.0, "tie": 0.5}[choice] for choice in choices])  # [n]
    weights = np.zeros(difference.shape[1])
    for _ in range(steps):
        chance = 1 / (1 + np.exp(-np.clip(difference @ weights, -30, 30)))
        gradient = difference.T @ (target - chance) - ridge * weights
        curvature = (difference * (chance * (1 - chance))[:, None]).T @ difference
        step = np.linalg.solve(curvature + ridge * np.eye(len(weights)), gradient)
        weights += step
        if np.abs(step).max() < 1e-9:
            break
    return weights
