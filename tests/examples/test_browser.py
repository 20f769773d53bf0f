"""A browser that is branched: what a page has become in it goes on in every copy, and each is its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from examples.browser.__main__ import make
from examples.browser.boxes import BOXES, HEIGHT, WIDTH
from sandbox_gym.env import SandboxEnv
from tests.examples.conftest import run_example


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def env(stack: ExitStack) -> SandboxEnv:
    return stack.enter_context(closing(make()))


def test_a_page_is_branched_as_it_stands(env: SandboxEnv, stack: ExitStack) -> None:
    """What was typed, where it was scrolled to, what its script holds, its clock, its cookies."""
    picture, before = env.reset(seed=4)
    assert before["name"] == "Ada" and before["scrolled"] > 0 and before["cookie"] == ""
    branches = env.branch(actions=range(BOXES))
    for branch in branches:
        stack.callback(branch.env.close)
        info = branch.info
        assert info["name"] == "Ada" and info["scrolled"] == before["scrolled"]
        assert info["ticks"] >= before["ticks"] > 0
        assert info["heading"] == f"Ada: {branch.reward:.0f} points, 1 more to open"
        assert info["cookie"] == f"total={branch.reward:.0f}"
        assert not np.array_equal(branch.observation, picture)
    assert sorted(branch.reward for branch in branches) == [5, 10, 20]
    assert branches[0].env.sandbox.parent.engine == "criu"
    # A copy of a copy; then the origin, which has seen none of this.
    again = branches[0].env.branch(actions=range(BOXES))
    for branch in again:
        stack.callback(branch.env.close)
    assert sorted(branch.reward for branch in again) == [5, 10, 20] and all(b.terminated for b in again)
    observation, reward, _, _, info = env.step(1)
    assert reward == branches[1].reward and info["cookie"] == branches[1].info["cookie"]
    assert np.array_equal(observation, branches[1].observation)


def test_back_to_an_earlier_page(env: SandboxEnv, stack: ExitStack) -> None:
    env.reset(seed=4)
    snapshot = env.snapshot()
    stack.callback(snapshot.delete)
    first = env.step(0)[4]["heading"]
    env.restore(snapshot)
    assert env.step(0)[4]["heading"] == first
    env.restore(snapshot)
    assert env.step(2)[4]["heading"] != first
    env.reset(seed=4)  # the browser as it was before any page
    assert env.step(0)[4]["heading"] == first


def test_the_example_sees_every_box_before_it_opens_one(tmp_path: Path) -> None:
    said = run_example("examples.browser", "--out", str(tmp_path))
    assert said.rstrip().endswith("Ada: 40 points, 0 more to open"), said
    pictures = []
    for path in sorted(tmp_path.iterdir()):
        with Image.open(path) as picture:
            assert picture.format == "PNG" and picture.size == (WIDTH, HEIGHT)
            pictures.append(picture.tobytes())
    assert len(set(pictures)) == len(pictures) == 2 * BOXES
