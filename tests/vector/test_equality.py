"""SandboxVectorEnv gives what SyncVectorEnv gives: in each autoreset mode, for all kinds of spaces, for real games."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers.vector import RecordEpisodeStatistics

from sandbox_gym.testing import assert_same, check_vector_env
from tests.vector.toys import Shapes

Lanes = Callable[..., Any]
FRESH = ["snapshot", "reuse"]


@pytest.mark.parametrize("fresh", FRESH)
@pytest.mark.parametrize("env_id", ["CartPole-v1", "FrozenLake-v1"])
def test_games_whose_episodes_are_short(lanes: Lanes, env_id: str, fresh: str) -> None:
    ended = check_vector_env(
        lambda mode: lanes(3, env_id, autoreset_mode=mode, fresh=fresh),
        lambda: gymnasium.make(env_id),
        steps=60,
    )
    assert ended > 6


@pytest.mark.parametrize("kind", list(Shapes.SPACES))
def test_observations_of_all_kinds(lanes: Lanes, kind: str) -> None:
    ended = check_vector_env(
        lambda mode: lanes(2, "Shapes", env_kwargs={"kind": kind}, autoreset_mode=mode),
        lambda: Shapes(kind),
        steps=30,
    )
    assert ended > 6


@pytest.mark.parametrize("kind", ["dict", "tuple", "scalar", "flags", "text"])
def test_actions_of_all_kinds(lanes: Lanes, kind: str) -> None:
    kwargs = {"kind": "discrete", "actions": kind}
    check_vector_env(
        lambda mode: lanes(2, "Shapes", env_kwargs=kwargs, autoreset_mode=mode, fresh="reuse"),
        lambda: Shapes(**kwargs),
        steps=10,
        modes=[AutoresetMode.NEXT_STEP],
    )


@pytest.mark.parametrize(
    ("env_id", "home"), [("ALE/Breakout-v5", "ale_py"), ("MiniGrid-Empty-5x5-v0", "minigrid")]
)
def test_games_from_packages(lanes: Lanes, env_id: str, home: str) -> None:
    importlib.import_module(home)
    kwargs: dict[str, Any] = {"max_episode_steps": 8}
    ended = check_vector_env(
        lambda mode: lanes(2, env_id, env_kwargs=kwargs, autoreset_mode=mode),
        lambda: gymnasium.make(env_id, **kwargs),
        steps=20,
        modes=[AutoresetMode.SAME_STEP],
        same_spaces=home != "minigrid",  # its mission is a space of its own class
    )
    assert ended > 2


def test_the_checker_finds_differences(lanes: Lanes) -> None:
    with pytest.raises(AssertionError, match="observations"):
        check_vector_env(
            lambda mode: lanes(
                2, "CartPole-v1", autoreset_mode=mode, env_kwargs={"sutton_barto_reward": True}
            ),
            lambda: gymnasium.make("Acrobot-v1"),
            same_spaces=False,
        )
    with pytest.raises(AssertionError, match="rewards"):
        check_vector_env(
            lambda mode: lanes(
                2, "CartPole-v1", autoreset_mode=mode, env_kwargs={"sutton_barto_reward": True}
            ),
            lambda: gymnasium.make("CartPole-v1"),
        )


def test_actions_in_other_forms(lanes: Lanes) -> None:
    env, reference = lanes(3, "CartPole-v1"), SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 3)
    env.reset(seed=3)
    reference.reset(seed=3)
    for actions in ([0, 1, 1], np.array([1, 0, 1], np.int32), (1, 1, 0), np.array([0, 0, 1], np.uint8)):
        assert_same(env.step(actions), reference.step(np.array(actions)), f"{actions!r}")


def test_episode_statistics(lanes: Lanes) -> None:
    both = lanes(3, "CartPole-v1"), SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 3)
    ours, theirs = (RecordEpisodeStatistics(env) for env in both)
    ours.reset(seed=1)
    theirs.reset(seed=1)
    theirs.action_space.seed(1)
    for _ in range(100):
        actions = theirs.action_space.sample()
        ours_infos, theirs_infos = ours.step(actions)[4], theirs.step(actions)[4]
        for infos in (ours_infos, theirs_infos):
            infos.get("episode", {}).pop("t", None)  # wall time
        assert_same(ours_infos, theirs_infos, "infos")
    assert list(ours.length_queue) == list(theirs.length_queue)
    assert len(ours.length_queue) > 3


def test_without_a_copy_observations_live_for_one_more_step(lanes: Lanes) -> None:
    env = lanes(2, "CartPole-v1", copy=False)
    first, _ = env.reset(seed=0)
    was = first.copy()
    second = env.step(np.array([0, 1]))[0]
    assert np.array_equal(first, was)
    assert not np.array_equal(first, second)
    assert env.step(np.array([0, 1]))[0] is first


def test_seeds(lanes: Lanes) -> None:
    env = lanes(3, "CartPole-v1")
    unseeded, _ = env.reset()
    assert len({row.tobytes() for row in unseeded}) == 3, "lanes must not replay each other"
    again, _ = env.reset()
    assert not (again == unseeded).any(1).any(), "nor an earlier episode"
    first, _ = env.reset(seed=[4, 5, 6])
    same, _ = env.reset(seed=4)
    assert np.array_equal(first, same)
    with pytest.raises(ValueError, match="3 lanes"):
        env.reset(seed=[1, 2])


def test_masks_are_checked_and_left_alone(lanes: Lanes) -> None:
    env = lanes(2, "CartPole-v1")
    before, _ = env.reset(seed=0)
    options = {"reset_mask": np.array([False, True])}
    after, _ = env.reset(seed=9, options=options)
    assert np.array_equal(after[0], before[0])
    assert not np.array_equal(after[1], before[1])
    assert list(options) == ["reset_mask"]
    with pytest.raises(TypeError, match="bools"):
        env.reset(options={"reset_mask": [True, True]})
    with pytest.raises(TypeError, match="bools"):
        env.reset(options={"reset_mask": np.array([1, 1])})
    with pytest.raises(ValueError, match="shape"):
        env.reset(options={"reset_mask": np.array([True])})
    with pytest.raises(ValueError, match="no True"):
        env.reset(options={"reset_mask": np.zeros(2, np.bool_)})


def test_disabled_insists_on_a_reset(lanes: Lanes) -> None:
    env = lanes(1, "Trouble", autoreset_mode=AutoresetMode.DISABLED)
    env.reset()
    while not env.step(np.zeros(1, np.int64))[2].any():
        pass
    with pytest.raises(AssertionError, match="reset"):
        env.step(np.zeros(1, np.int64))


def test_what_it_is_told_and_tells(lanes: Lanes) -> None:
    env = lanes(2, "Shapes", autoreset_mode="Disabled", render_mode="rgb_array")
    assert env.metadata["autoreset_mode"] is AutoresetMode.DISABLED
    assert env.render_mode == "rgb_array"
    _, infos = env.reset(options={"a": 1, "reset_mask": np.ones(2, np.bool_)})
    assert infos["options"].tolist() == [["a"], ["a"]]
    env.step(np.zeros(2, np.int64))
    frames = env.render()
    assert isinstance(frames, tuple)
    assert [frame.tolist() for frame in frames] == [np.ones((4, 4, 3)).tolist()] * 2
    for name, arguments in (("call", ["steps"]), ("get_attr", ["steps"]), ("set_attr", ["steps", 1])):
        with pytest.raises(NotImplementedError, match="inside the sandboxes"):
            getattr(env, name)(*arguments)
    env.close()
    env.close()
    with pytest.raises(gymnasium.error.ClosedEnvironmentError):
        env.reset()


@pytest.mark.parametrize(
    "kwargs", [{"fresh": "maybe"}, {"idle_timeout": 5.0}, {"env_id": None}, {"autoreset_mode": "Never"}]
)
def test_arguments_are_checked(kwargs: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"."):
        gymnasium.make_vec("Sandbox-v0", num_envs=2, **{"env_id": "CartPole-v1", **kwargs})
