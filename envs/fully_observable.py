"""MiniGrid levels seen from above: an observation that tells the states of a level apart, as a search wants."""

from __future__ import annotations

from typing import Any

import gymnasium


def make(env_id: str, **kwargs: Any) -> gymnasium.Env[Any, Any]:
    """A MiniGrid environment whose observation is the whole grid, [width, height, 3], the agent in it included.

    As `entry_point="sandbox_gym.envs.fully_observable:make", env_kwargs={"env_id": "MiniGrid-DoorKey-6x6-v0"}`.
    """
    from minigrid import wrappers

    level: Any = gymnasium.make(env_id, **kwargs)
    untyped: Any = wrappers  # minigrid's wrappers have no annotations
    seen: gymnasium.Env[Any, Any] = untyped.ImgObsWrapper(untyped.FullyObsWrapper(level))
    return seen
