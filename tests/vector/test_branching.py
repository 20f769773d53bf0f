"""Lanes as copies of lanes, and of snapshots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sandbox_gym._snapshot import Snapshot
from sandbox_gym.errors import SnapshotError
from tests.vector import toys

Lanes = Callable[..., Any]


def play(env: Any, steps: int, start: int = 0) -> list[Any]:
    """What some steps gave, the same action in every lane."""
    rows = []
    for step in range(start, start + steps):
        observations, rewards, terminations, *_ = env.step(np.full(env.num_envs, step % 2))
        rows.append((observations.tolist(), rewards.tolist(), terminations.tolist()))
    return rows


def test_branches_replay_their_source(lanes: Lanes) -> None:
    env = lanes(4, "CartPole-v1")
    env.reset(seed=0)
    play(env, 3)
    observations, infos = env.branch(3, [0, 1, 2])
    assert (observations == observations[3]).all()
    assert infos == {}
    for step in range(40):  # over the end of the episode: its successor is the same, too
        observations, _, terminations, *_ = env.step(np.full(4, step % 2))
        assert (observations == observations[3]).all()
        assert terminations.all() or not terminations.any()


def test_branches_that_diverge(lanes: Lanes) -> None:
    env = lanes(3, "Shapes", env_kwargs={"kind": "image"})
    env.reset(seed=0)
    env.step(np.zeros(3, np.int64))
    env.branch(0, [1, 2], rng=7)
    first = env.step(np.zeros(3, np.int64))[0]
    assert len({row.tobytes() for row in first}) == 3
    observations, _ = env.branch(0, [1, 2])
    assert len({row.tobytes() for row in observations}) == 1


def test_a_branch_takes_the_elapsed_steps_and_the_end_along(lanes: Lanes) -> None:
    env = lanes(2, "Trouble")
    env.reset(seed=0)
    env.step(np.array([0, toys.RAISE]))
    env.step(np.zeros(2, np.int64))
    for _ in range(toys.LENGTH - 3):
        env.step(np.zeros(2, np.int64))
    observations, _ = env.branch(0, [1])
    assert observations[:, 0].tolist() == [toys.LENGTH - 1] * 2
    assert env.step(np.zeros(2, np.int64))[2].all()
    env.branch(0, [1])
    observations, rewards, *_ = env.step(np.zeros(2, np.int64))
    assert observations[:, 0].tolist() == [0, 0], "an end that awaits its reset was copied"
    assert rewards.tolist() == [0, 0]


def test_snapshots_are_gone_back_to(lanes: Lanes) -> None:
    env = lanes(3, "CartPole-v1")
    env.reset(seed=0)
    play(env, 2)
    snapshots = env.snapshot()
    assert all(isinstance(snapshot, Snapshot) for snapshot in snapshots)
    later = play(env, 60, start=2)
    env.restore(snapshots)
    assert play(env, 60, start=2) == later
    env.restore([None, snapshots[1], None])
    chosen = env.snapshot(np.array([False, True, False]))
    assert [snapshot is None for snapshot in chosen] == [True, False, True]
    with pytest.raises(ValueError, match="3 snapshots"):
        env.restore(snapshots[:1])
    env.close()
    assert not snapshots[0].deleted


def test_lanes_left_alone_stay(lanes: Lanes) -> None:
    env = lanes(2, "Trouble")
    env.reset(seed=0)
    start = env.snapshot(np.array([True, False]))
    env.step(np.zeros(2, np.int64))
    observations, infos = env.restore(start)
    assert observations[:, 0].tolist() == [0, 1]
    assert infos["_left"].tolist() == [True, False]


def test_a_failed_lane_has_no_snapshot(lanes: Lanes) -> None:
    env = lanes(2, "Trouble")
    env.reset(seed=0)
    env.step(np.array([0, toys.EXIT]))
    with pytest.raises(SnapshotError, match="reset it first"):
        env.snapshot()
    observations, _ = env.branch(0, [1])
    assert observations[:, 0].tolist() == [1, 1]
    assert env.step(np.zeros(2, np.int64))[1].tolist() == [1.0, 1.0]
