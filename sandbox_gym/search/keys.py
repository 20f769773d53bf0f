"""Telling states apart by what they show, so that none is searched twice."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import numpy as np

from sandbox_gym.search.tree import Node

KeyFunction = Callable[[Any], Hashable]


def observation_key(observation: Any) -> Hashable:
    """A key for any Gymnasium observation: arrays, numbers, text, and dicts, tuples and lists of them."""
    if isinstance(observation, np.ndarray):
        return observation.dtype.str, observation.shape, observation.tobytes()
    if isinstance(observation, Mapping):
        return tuple((name, observation_key(observation[name])) for name in sorted(observation))
    if isinstance(observation, (tuple, list)):
        return tuple(observation_key(part) for part in observation)
    if isinstance(observation, Hashable):
        return observation
    raise TypeError(
        f"no key for an observation of type {type(observation).__name__}: pass your own key function"
    )


class Seen:
    """The states met so far, by key, each with the depth and the return of the best way to it."""

    def __init__(self, key: KeyFunction) -> None:
        self._key = key
        self._best: dict[Hashable, tuple[int, float]] = {}

    def is_duplicate(self, node: Node, observation: Any) -> bool:
        """Whether the state was met before, no deeper and with no smaller return; else this way to it is noted.

        A shorter or a richer way to a known state is thus kept, so that the best line isn't lost to the one that
        happened to be found first.
        """
        key = self._key(observation)
        known = self._best.get(key)
        if known is not None and known[0] <= node.depth and known[1] >= node.path_return:
            return True
        self._best[key] = node.depth, node.path_return
        return False

    def __len__(self) -> int:
        return len(self._best)
