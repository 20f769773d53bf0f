"""What the log keeps of environments: how many steps were made, and the last picture."""

from __future__ import annotations

import io
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from PIL import Image

from sandbox_gym import _audit
from sandbox_gym._audit import set_audit
from sandbox_gym.env import SandboxEnv
from sandbox_gym.sandbox import Sandbox


@pytest.fixture
def lanes() -> Iterator[Callable[..., Any]]:
    """`lanes(n)`: of CartPole. Nothing of them is kept for later."""
    made: list[Any] = []

    def make(n: int, **how: Any) -> Any:
        made.append(gym.make_vec("sandbox_gym:Sandbox-v0", num_envs=n, env_id="CartPole-v1", **how))
        return made[-1]

    yield make
    for env in made:
        warm = env._lanes._warm
        env.close()
        warm.snapshot.delete()


def rows(path: Path, query: str) -> dict[str, Any]:
    if _audit._log is not None:
        _audit._log.flush()
    with closing(sqlite3.connect(path)) as db:
        return dict(db.execute(query).fetchall())


def steps(path: Path) -> dict[str, int]:
    return rows(path, "SELECT sandbox, count FROM steps")


def pictures(path: Path) -> dict[str, Any]:
    found = rows(path, "SELECT sandbox, png FROM frames")
    return {sandbox: np.array(Image.open(io.BytesIO(png))) for sandbox, png in found.items()}


def test_steps_of_an_environment_and_its_branches(log: Path) -> None:
    env = SandboxEnv("CartPole-v1")
    try:
        env.reset(seed=0)
        here = env.sandbox.id
        assert steps(log) == {}
        for action in (0, 1, 0):
            env.step(action)
        assert steps(log) == {here: 3}
        (branch,) = env.branch(actions=[1])
        env.rollout(actions=[0, 1])
        assert steps(log) == {here: 5, branch.env.sandbox.id: 1}
        branch.env.close()
        set_audit(None)
        env.step(0)
        set_audit(log)  # goes on from what is there
        env.step(1)
        assert steps(log)[here] == 6
    finally:
        env.close()


def test_steps_of_lanes(log: Path, lanes: Callable[..., Any]) -> None:
    venv = lanes(3)
    venv.reset(seed=0)
    first = [lane.box.id for lane in venv._lanes._lanes]
    lengths = [0, 0, 0]
    for _ in range(12):  # lanes that always go one way end within 11 steps
        venv.step(np.zeros(3, np.int64))
        lengths = [n + (lane.box.id == id) for n, lane, id in zip(lengths, venv._lanes._lanes, first)]
    counted = steps(log)
    assert [counted[id] for id in first] == lengths
    assert all(n < 12 for n in lengths)
    assert sum(counted.values()) == 3 * 12 - 3  # the step of each reset is none


def test_the_last_picture_is_kept(log: Path) -> None:
    env = SandboxEnv("CartPole-v1", render_mode="rgb_array")
    try:
        env.reset(seed=0)
        env.render()
        env.step(0)
        last = env.render()
        last_seen = last.copy()
        last[:] = 0  # it is its caller's
        found = pictures(log)
        assert found.keys() == {env.sandbox.id}
        assert (found[env.sandbox.id] == last_seen).all()
        gone = env.sandbox.id
        env.step(0)
        final = env.render()
    finally:
        env.close()
    assert (pictures(log)[gone] == final).all()


def test_pictures_of_lanes(log: Path, lanes: Callable[..., Any]) -> None:
    venv = lanes(2, render_mode="rgb_array")
    venv.reset(seed=0)
    frames = venv.render()
    found = pictures(log)
    for lane, frame in zip(venv._lanes._lanes, frames):
        assert (found[lane.box.id] == frame).all()


def _noise(*shape: int) -> Any:
    return np.random.default_rng(0).integers(0, 256, shape, np.uint8)


@pytest.mark.parametrize(
    ("frame", "kept"),
    [
        (_noise(5, 7, 3), (5, 7, 3)),
        (_noise(700, 1400, 3), (234, 467, 3)),  # made smaller
        (_noise(1, 5000, 3), (1, 625, 3)),
        ([_noise(2, 2, 3), _noise(3, 3, 3)], (3, 3, 3)),  # of a list, the last
        (_noise(5, 7, 4), None),
        (_noise(5, 7), None),
        (_noise(0, 7, 3), None),
        (_noise(5, 7, 3).astype(np.float32), None),
        ("text", None),
        ([], None),
        (None, None),
    ],
)
def test_what_is_a_picture(frame: Any, kept: Any, log: Path, box: Sandbox) -> None:
    _audit.drawn(box, frame)
    found = pictures(log)
    assert (found[box.id].shape if found else None) == kept
