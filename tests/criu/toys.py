"""An environment that the fork engine can't capture: the guests import this module."""

from __future__ import annotations

import queue
import subprocess
import threading
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class Busy(gym.Env[Any, Any]):
    """Adds actions and chance up, with a thread and a child process in between."""

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012
    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float64)
    action_space = spaces.Discrete(5)

    def __init__(self) -> None:
        self._child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._asked: queue.Queue[int] = queue.Queue()
        self._answers: queue.Queue[int] = queue.Queue()
        self._sum = 0
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        total = 0
        while True:
            total += self._asked.get()
            self._answers.put(total)

    def _through_the_child(self, number: int) -> int:
        assert self._child.stdin is not None and self._child.stdout is not None
        self._child.stdin.write(b"%d\n" % number)
        self._child.stdin.flush()
        return int(self._child.stdout.readline())

    def _observe(self, action: int) -> Any:
        self._sum += action
        self._asked.put(action)
        return np.array([self._through_the_child(self._sum), self._answers.get(), self.np_random.random()])

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self._observe(0), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self._observe(int(action)), float(self._sum), False, False, {}
