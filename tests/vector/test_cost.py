"""What a step costs, counted, not timed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from sandbox_gym.testing.subject import until
from tests.conftest import guest_pid

_STEPS = 50


def _status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def test_a_guest_wakes_once_a_step(lanes: Callable[..., Any]) -> None:
    """And not again when its reply is read."""
    env = lanes(2, "MountainCar-v0")
    env.reset(seed=0)
    guests = [guest_pid(box) for box in env._lanes.boxes(range(2))]

    def sleeps() -> int:
        """How often they have given up the CPU to wait, once all of them do."""
        until(lambda: all(_status(pid)["State"].startswith("S") for pid in guests), "guests that wait")
        return sum(int(_status(pid)["voluntary_ctxt_switches"]) for pid in guests)

    before = sleeps()
    for _ in range(_STEPS):
        env.step(np.ones(2, np.int64))
        after = sleeps()
    assert after - before < 1.5 * 2 * _STEPS
