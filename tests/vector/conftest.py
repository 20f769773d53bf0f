"""Vector environments that close themselves at the end of a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import pytest

from sandbox_gym._spares import forget
from sandbox_gym.vector import SandboxVectorEnv

TOYS, LIARS = "tests.vector.toys", "tests.vector.liars"


@pytest.fixture
def lanes() -> Iterator[Callable[..., SandboxVectorEnv]]:
    """`lanes(n, "Trouble", **kwargs)`: a class of `toys` or `liars`, or an id, through `gymnasium.make_vec`."""
    made: list[Any] = []

    def make(n: int, name: str, **kwargs: Any) -> SandboxVectorEnv:
        home = LIARS if name in ("Liar", "Slow", "Bits") else TOYS
        what: dict[str, Any] = {"entry_point": f"{home}:{name}"} if name.isalpha() else {"env_id": name}
        env: Any = gymnasium.make_vec("Sandbox-v0", num_envs=n, **what, **kwargs)
        made.append(env)
        assert isinstance(env, SandboxVectorEnv)
        return env

    yield make
    for env in made:
        env.close()


@pytest.fixture(scope="package", autouse=True)
def no_warm_guests_left() -> Iterator[None]:
    """Other tests count snapshots."""
    yield
    forget()
