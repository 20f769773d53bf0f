"""Environments that close themselves at the end of a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sandbox_gym.branching import BranchableEnv
from sandbox_gym.env import make_env

TOYS = "tests.env.toys"


@pytest.fixture
def sandboxed() -> Iterator[Callable[..., Any]]:
    """`make_env`; "Dice" and the like name a class of `toys`. What it makes is closed in the end, branches too."""
    made: list[BranchableEnv] = []

    def make(name: str | None = None, **kwargs: Any) -> BranchableEnv:
        if name is not None and name.isalpha():
            env = make_env(entry_point=f"{TOYS}:{name}", **kwargs)
        else:
            env = make_env(name, **kwargs)
        made.append(env)
        return env

    yield make
    for env in made:
        env.close()
