"""Environments whose guests lie to the host. They run in guests."""

from __future__ import annotations

import os
import stat
import struct
import sys
import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

GOOD, LONGER, POISONED, ONE, NAME = range(5)
_LATE = 5  # this action, and those above it, take SLOW seconds for each that they are above GOOD
SLOW = 0.1
_HEADER = struct.Struct("<BBHIQ")
_STEP = 32


class Liar(gymnasium.Env[Any, Any]):
    """Counts its steps; all actions but GOOD do harm."""

    observation_space: Any = spaces.Box(0.0, 1e6, (2,), np.float64)
    action_space = spaces.Discrete(20)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.np_random.random()
        self.steps = 0
        return np.zeros(2), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        if action == LONGER:
            _answer_too_much()
        if action == POISONED:
            chance: Any = sys.modules["sandbox_gym_guest.chance"]
            chance.save = lambda env: {"kind": "PCG64", "state": 5, "seed": 1}
        if action >= _LATE:
            time.sleep(SLOW * action)
        info = {ONE: {"x": 1}, NAME: {"x": "one"}}.get(int(action), {})
        return np.full(2, self.steps, np.float64), 1.0, bool(action == POISONED), False, info


class Slow(Liar):
    """With observations that are no single arrays."""

    observation_space = spaces.Dict({"steps": Liar.observation_space})

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        observation, info = super().reset(seed=seed)
        return {"steps": observation}, info

    def step(self, action: Any) -> Any:
        observation, *rest = super().step(action)
        return {"steps": observation}, *rest


class Bits(gymnasium.Env[Any, Any]):
    """Its bools are bytes that are neither."""

    observation_space = spaces.Box(0, 1, (4,), np.bool_)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(4, np.bool_), {}

    def step(self, action: Any) -> Any:
        return np.array([7, 2, 0, 1], np.uint8).view(np.bool_), 1.0, False, False, {}


def _answer_too_much() -> None:
    """The answer to this very step in two parts, with a byte that is one too many."""
    numbers = [int(name) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")]
    sock = next(fd for fd in numbers if stat.S_ISSOCK(os.stat(fd).st_mode))
    frame: Any = sys._getframe()
    while "first" not in frame.f_locals:
        frame = frame.f_back
    data = struct.pack("<2x6xd2d", 7.0, 9.0, 9.0)
    reply = _HEADER.pack(_STEP, 0, frame.f_locals["first"] >> 16 & 0xFFFF, 0, len(data)) + data + b"x"
    os.write(sock, reply[:20])
    time.sleep(0.2)
    os.write(sock, reply[20:])
    time.sleep(60)
