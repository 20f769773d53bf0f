"""Small environments for the tests to host: the guests import this module."""

from __future__ import annotations

import random
import time
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

# Text takes its letters as a string: a set has another order in each process before gymnasium 1.4.
SPACES: dict[str, spaces.Space[Any]] = {
    "dict": spaces.Dict(place=spaces.Box(-1, 1, (2,)), seen=spaces.MultiBinary(3)),
    "tuple": spaces.Tuple((spaces.Discrete(3, start=1), spaces.Box(0, 255, (2, 2), np.uint8))),
    "text": spaces.Text(8, min_length=0, charset="abcé"),
    "sequence": spaces.Sequence(spaces.Box(0, 1, (2,))),
    "graph": spaces.Graph(spaces.Box(0, 1, (2,)), spaces.Discrete(3)),
    "oneof": spaces.OneOf((spaces.Discrete(3), spaces.Text(4, charset="abcd"))),
    "mixed": spaces.Dict(
        note=spaces.Text(4, charset="abcd"),
        rest=spaces.Tuple((spaces.Discrete(2), spaces.MultiDiscrete([2, 3]))),
    ),
}


class Sampler(gym.Env[Any, Any]):
    """Observations and actions of any space, drawn from np_random; tells in its info what action it got."""

    metadata: dict[str, Any] = {"render_modes": ["rgb_array", "ansi"], "render_fps": 4}  # noqa: RUF012

    def __init__(self, kind: str = "dict", render_mode: str | None = None) -> None:
        self.observation_space = _copy(SPACES[kind])
        self.action_space = _copy(SPACES[kind])
        self.render_mode = render_mode

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self._observe(), {"options": options} if options else {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        reward = float(self.np_random.random())
        return (
            self._observe(),
            reward,
            False,
            False,
            {"action": action, "array": np.arange(3, dtype=np.int16)},
        )

    def render(self) -> Any:
        return np.zeros((2, 2, 3), np.uint8) if self.render_mode == "rgb_array" else "text"

    def _observe(self) -> Any:
        self.observation_space.seed(int(self.np_random.integers(2**31)))
        return self.observation_space.sample()


def _copy(space: spaces.Space[Any]) -> spaces.Space[Any]:
    import copy

    return copy.deepcopy(space)


class Dice(gym.Env[Any, Any]):
    """Every kind of chance at each step, in the info: np_random, a generator of its own, `random`, NumPy's global."""

    observation_space: spaces.Space[Any] = spaces.Discrete(1000)
    action_space: spaces.Space[Any] = spaces.Discrete(2)

    def __init__(self) -> None:
        self._own = random.Random(5)
        self._legacy = np.random.RandomState(5)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[int, dict[str, Any]]:
        super().reset(seed=seed)
        return int(self.np_random.integers(1000)), {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        rolled = {
            "own": self._own.random(),
            "legacy": float(self._legacy.rand()),
            "random": random.random(),
            "numpy": float(np.random.rand()),
        }
        return int(self.np_random.integers(1000)), 0.0, False, False, rolled


class Trouble(gym.Env[Any, Any]):
    """Does what its actions say, most of it wrong."""

    observation_space: spaces.Space[Any] = spaces.Discrete(5)
    action_space: spaces.Space[Any] = spaces.Discrete(10)

    def __init__(self, start: str = "") -> None:
        if start == "raise":
            raise RuntimeError("no such world")

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[int, dict[str, Any]]:
        super().reset(seed=seed)
        if options and options.get("hang"):
            time.sleep(60)
        return 0, {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation: Any = 1
        reward = 1.0
        if action == 1:
            reward = float("nan")
        elif action == 2:
            reward = float("inf")
        elif action == 3:
            raise ZeroDivisionError("a guest's own")
        elif action == 4:
            observation = "not a number"
        elif action == 5:
            time.sleep(60)
        elif action == 6:
            import os

            os._exit(3)
        elif action == 7:
            raise gym.error.InvalidAction("seven")
        elif action == 8:
            self._hoard = bytearray(b"x") * (1 << 30)
        return observation, reward, action == 9, False, {}
