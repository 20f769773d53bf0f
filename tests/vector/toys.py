"""Environments that misbehave when told to, and ones whose observations are no plain arrays. They run in guests."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

STEP, RAISE, HANG, EXIT, BAD_SHAPE, FILL_DISK, BAD_REWARD, SPILL = range(8)
LENGTH = 10  # steps of an episode


class Trouble(gymnasium.Env[Any, Any]):
    """Counts its steps; each action but STEP is a way to go wrong. The first observation tells what an earlier episode
    has left behind: in the class, and on the disk.
    """

    observation_space = spaces.Box(0.0, 1e6, (3,), np.float32)
    action_space = spaces.Discrete(8)
    left = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        if options and options.get("refuse"):
            raise ValueError("these options are refused")
        self.steps = 0
        self.draw = float(self.np_random.integers(1000))
        return self._observe(Trouble.left + Path("/tmp/left").exists()), {"left": Trouble.left}

    def _observe(self, left: float) -> Any:
        return np.array([self.steps, left, self.draw], np.float32)

    def step(self, action: Any) -> Any:
        self.steps += 1
        if action == RAISE:
            raise RuntimeError("told to raise")
        if action == HANG:
            time.sleep(3600)
        if action == EXIT:
            os._exit(3)
        if action == BAD_SHAPE:
            return np.zeros(7, np.float32), 1.0, False, False, {}
        if action == FILL_DISK:
            with open("/tmp/big", "wb") as file:
                while True:
                    file.write(bytes(1 << 20))
                    file.flush()
        if action == SPILL:
            Trouble.left += 1
            Path("/tmp/left").touch()
        reward = float("nan") if action == BAD_REWARD else 1.0
        return self._observe(0), reward, self.steps >= LENGTH, False, {}


class Shapes(gymnasium.Env[Any, Any]):
    """Draws observations from one of `SPACES`, and now and then an info."""

    SPACES: dict[str, gymnasium.Space[Any]] = {  # noqa: RUF012
        "dict": spaces.Dict({"a": spaces.Box(-1.0, 1.0, (2, 3), np.float64), "b": spaces.Discrete(5)}),
        "tuple": spaces.Tuple((spaces.MultiBinary(3), spaces.MultiDiscrete([4, 5]))),
        "text": spaces.Text(12),
        "image": spaces.Box(0, 255, (96, 96, 3), np.uint8),
        "large": spaces.Box(0, 255, (400, 400, 3), np.uint8),
        "scalar": spaces.Box(-1.0, 1.0, (), np.float32),
        "discrete": spaces.Discrete(7, start=-2),
        "flags": spaces.MultiBinary((2, 2)),
        "nested": spaces.Dict({"t": spaces.Text(5), "x": spaces.Box(0.0, 1.0, (2,), np.float32)}),
        "sequence": spaces.Sequence(spaces.Box(0.0, 1.0, (2,), np.float32)),
    }
    metadata: dict[str, Any] = {"render_modes": ["rgb_array"]}  # noqa: RUF012

    def __init__(self, kind: str = "dict", actions: str = "discrete", render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self.observation_space = self.SPACES[kind]
        self.action_space = self.SPACES[actions]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return self._draw(), {"began": True, "options": sorted(options or ())}

    def _draw(self, space: Any = None) -> Any:
        space = space or self.observation_space
        if isinstance(space, spaces.Dict):
            return {key: self._draw(part) for key, part in space.items()}
        if isinstance(
            space, spaces.Text
        ):  # whose own sampling goes by the order of a set, in older Gymnasiums
            return "".join(self.np_random.choice(list("abcd"), int(self.np_random.integers(1, 5))))
        if isinstance(space, spaces.Box) and space.dtype == np.uint8:  # sampling is slow
            return self.np_random.integers(0, 256, space.shape, np.uint8)
        space.seed(int(self.np_random.integers(2**31)))
        return space.sample()

    def step(self, action: Any) -> Any:
        self.steps += 1
        chance = self.np_random.random()
        info: dict[str, Any] = {}
        if chance < 0.5:
            info = {"chance": chance, "nested": {"steps": self.steps}, "array": np.arange(3) * self.steps}
        if chance < 0.2:
            info["text"] = f"step {self.steps}"
        return self._draw(), chance, chance > 0.9, self.steps >= 12, info

    def render(self) -> Any:
        return np.full((4, 4, 3), self.steps, np.uint8)
