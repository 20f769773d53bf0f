"""Environments that run in guests, for the tests of RLlib."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

LENGTH = 10  # steps of an episode


def tell_seeds(*, episode: Any, metrics_logger: Any, **kwargs: Any) -> None:
    """RLlib's `on_episode_start`: what the guest was seeded with, and its first random number, among the metrics."""
    info = episode.get_infos(0)
    if info["seed"] >= 0:
        metrics_logger.log_value("seeds", info["seed"], reduce="item_series")
    metrics_logger.log_value("draws", info["draw"], reduce="item_series")


class Counter(gymnasium.Env[Any, Any]):
    """Counts its steps, and tells in the first info how it was seeded."""

    observation_space: gymnasium.Space[Any] = spaces.Box(0.0, 1e3, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        self.draw = float(self.np_random.random())
        return self._observe(), {"seed": -1 if seed is None else seed, "draw": self.draw}

    def _observe(self) -> Any:
        return np.array([self.steps, self.draw], np.float32)

    def step(self, action: Any) -> Any:
        self.steps += 1
        return self._observe(), 1.0, self.steps >= LENGTH, False, {}


class Broken(Counter):
    """Fails at every step."""

    def step(self, action: Any) -> Any:
        raise RuntimeError("broken for good")


class Mixed(Counter):
    """Observations of all kinds: a picture of cells, words, numbers, flags."""

    observation_space = spaces.Dict(
        {
            "cells": spaces.Box(0, 255, (7, 7, 3), np.uint8),
            "mission": spaces.Text(200),
            "pair": spaces.Tuple((spaces.Discrete(4, start=-1), spaces.MultiBinary(3))),
            "kinds": spaces.MultiDiscrete([2, 3]),
        }
    )

    def _observe(self) -> Any:
        return {
            "cells": np.full((7, 7, 3), self.steps, np.uint8),
            "mission": f"go to the red ball, then take {self.steps} steps",
            "pair": (-1 + self.steps % 4, np.array([1, 0, 1], np.int8)),
            "kinds": np.array([self.steps % 2, self.steps % 3]),
        }


class Picture(Counter):
    """A picture as large as Atari's."""

    observation_space = spaces.Box(0, 255, (210, 160, 3), np.uint8)

    def _observe(self) -> Any:
        return np.full((210, 160, 3), self.steps, np.uint8)
