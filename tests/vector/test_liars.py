"""What a guest makes up, or holds back, is its own lane's harm: other lanes step on, and the client raises nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

from sandbox_gym.errors import SandboxError
from tests.vector import liars

Lanes = Callable[..., Any]


@pytest.mark.parametrize("fresh", ["reuse", "snapshot"])
def test_an_answer_with_a_byte_too_many(lanes: Lanes, fresh: str) -> None:
    env = lanes(3, "Liar", fresh=fresh, step_timeout=1.0)
    env.reset(seed=0)
    env.step(np.array([liars.GOOD, liars.LONGER, liars.GOOD]))  # bytes as they should be, but for one more
    observations, rewards, _, truncations, infos = env.step(np.full(3, liars.GOOD))
    assert observations[:, 0].tolist() == [2, 9, 2]
    assert rewards.tolist() == [1, 0, 1] and truncations.tolist() == [False, True, False]
    assert infos["sandbox_error"][1]


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_made_up_random_numbers_end_with_their_episode(lanes: Lanes, mode: AutoresetMode) -> None:
    env = lanes(3, "Liar", autoreset_mode=mode)
    env.reset(seed=0)
    env.step(np.array([liars.GOOD, liars.POISONED, liars.GOOD]))
    observations, *_ = env.step(np.full(3, liars.GOOD))
    assert observations[:, 0].tolist() == [2, 0 if mode is AutoresetMode.NEXT_STEP else 1, 2]


@pytest.mark.parametrize("kind", ["Liar", "Slow"])
def test_all_lanes_together_have_the_time_of_one(lanes: Lanes, kind: str) -> None:
    """In whatever order they come: the last is waited for first."""
    seconds = 0.65
    for slow in ([16, 12, 8, 5], [5, 8, 12, 16]):
        env = lanes(4, kind, fresh="reuse", step_timeout=seconds)
        env.reset(seed=0)
        began = time.monotonic()
        _, _, _, truncations, _ = env.step(np.array(slow))
        assert time.monotonic() - began < liars.SLOW * 12
        assert truncations.tolist() == [liars.SLOW * action > seconds for action in slow]


@pytest.mark.parametrize(("kind", "late", "gone"), [("Liar", [0, 5], 0), ("Slow", [16, 0], 1)])
def test_a_lane_that_was_terminated_beside_a_late_one(
    lanes: Lanes, kind: str, late: list[int], gone: int
) -> None:
    env = lanes(2, kind, fresh="reuse", step_timeout=0.65)
    env.reset(seed=0)
    next(env._lanes.boxes([gone])).terminate()
    _, _, _, truncations, infos = env.step(np.array(late))
    assert truncations[gone] and "SandboxDied" in infos["sandbox_error"][gone]


def test_a_bool_is_true_or_false(lanes: Lanes) -> None:
    env = lanes(2, "Bits")
    env.reset(seed=0)
    observations = env.step(np.zeros(2, np.int64))[0]
    assert observations.view(np.uint8).tolist() == [[1, 1, 0, 1]] * 2


def test_no_room_for_a_new_episode_is_no_muddle(lanes: Lanes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others' answers to that step must not be taken for those to the next."""
    env = lanes(3, "Liar")
    env.reset(seed=0)
    env.step(np.array([liars.GOOD, liars.POISONED, liars.GOOD]))  # ends lane 1's episode

    def full(n: int) -> Any:
        raise SandboxError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(env._lanes._spares, "take", full)
        with pytest.raises(SandboxError, match="no room"):
            env.step(np.full(3, liars.GOOD))
    env.step(np.full(3, liars.GOOD))  # resets them all
    observations, _, _, truncations, infos = env.step(np.full(3, liars.GOOD))
    assert observations[:, 0].tolist() == [1, 1, 1] and not truncations.any() and not infos


def test_infos_that_do_not_go_together_leave_the_lanes_as_they_are(lanes: Lanes) -> None:
    """The error is Gymnasium's; episodes that it cut short have begun anew once, and not again."""
    env = lanes(3, "Liar", autoreset_mode=AutoresetMode.SAME_STEP)
    env.reset(seed=0)
    with pytest.raises(ValueError, match="one"):
        env.step(np.array([liars.POISONED, liars.ONE, liars.NAME]))
    observations, rewards, *_ = env.step(np.full(3, liars.GOOD))
    assert observations[:, 0].tolist() == [1, 2, 2] and rewards.tolist() == [1, 1, 1]
