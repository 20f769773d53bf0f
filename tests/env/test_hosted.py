"""Hosted environments behave as the bare ones do: same values, same errors, same checker."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env, data_equivalence

from sandbox_gym.env import SandboxEnv
from sandbox_gym.errors import LimitExceeded, SandboxDied, SandboxError, SandboxTimeout
from sandbox_gym.guest.hosted import Hosted
from sandbox_gym.guest.wire import Op
from sandbox_gym.sandbox import Sandbox
from tests.env import toys
from tests.env.test_spaces import same, travel

Make = Callable[..., SandboxEnv]

GAMES = ["CartPole-v1", "FrozenLake-v1", "HalfCheetah-v5", "MiniGrid-DoorKey-6x6-v0", "ALE/Breakout-v5"]


def bare(name: str, **kwargs: Any) -> gym.Env[Any, Any]:
    if name in toys.SPACES:
        return toys.Sampler(name, **kwargs)
    Hosted().handle(Op.MAKE, {"env_id": name})  # imports what registers it
    return gym.make(name, disable_env_checker=True, **kwargs)


@pytest.mark.parametrize("kind", ["CartPole-v1", *toys.SPACES])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_gymnasiums_own_checker_is_content(kind: str) -> None:
    if kind in toys.SPACES:
        kwargs: dict[str, Any] = {"entry_point": "tests.env.toys:Sampler", "env_kwargs": {"kind": kind}}
    else:
        kwargs = {"env_id": kind}
    env = gym.make("sandbox_gym:Sandbox-v0", disable_env_checker=True, **kwargs)
    try:
        # Rendering makes an environment a mode: once is enough.
        check_env(env.unwrapped, skip_render_check=kind not in ("CartPole-v1", "dict"))
    finally:
        env.close()


@pytest.mark.parametrize("name", [*GAMES, *toys.SPACES])
def test_equal_to_the_bare_environment_step_for_step(name: str, sandboxed: Make) -> None:
    """Over several episodes, the later ones not seeded."""
    reference = bare(name)
    toy = name in toys.SPACES
    env = sandboxed("Sampler", env_kwargs={"kind": name}) if toy else sandboxed(name)
    assert env.action_space == reference.action_space
    if "MiniGrid" not in name:  # whose missions have a space class of their own
        assert env.observation_space == reference.observation_space
    reference.action_space.seed(3)
    for seed in (11, None, None):
        assert_same(env.reset(seed=seed), reference.reset(seed=seed))
        for _ in range(25):
            action = reference.action_space.sample()
            ours, theirs = env.step(action), reference.step(action)
            assert_same(ours, theirs)
            assert (type(ours[1]), type(ours[2]), type(ours[3])) == (float, bool, bool)
            if ours[2] or ours[3]:
                break
    reference.close()


def assert_same(ours: tuple[Any, ...], theirs: tuple[Any, ...]) -> None:
    """Equal; a number of Python's and one of the space's dtype count as the same observation."""
    observation, expected = ours[0], theirs[0]
    if isinstance(expected, (int, np.integer)):
        assert observation == expected
    elif isinstance(expected, dict) and "mission" in expected:
        assert observation["mission"] == expected["mission"]
        assert np.array_equal(observation["image"], expected["image"])
    else:
        assert same(observation, expected)
    assert ours[1:-1] == theirs[1:-1]
    assert data_equivalence(ours[-1], travel(theirs[-1]))  # whose named tuples are tuples


def test_the_same_seed_gives_the_same_unseeded_episodes_after_it(sandboxed: Make) -> None:
    env, other = sandboxed("Dice"), sandboxed("Dice")

    def play(env: SandboxEnv) -> list[Any]:
        first = [env.reset(seed=4), env.step(0)[0], env.reset(), env.step(0)[0]]
        env.sandbox.terminate()  # the next reset can't ask this copy for its np_random
        return [*first, env.reset(), env.step(0)[0]]

    assert play(env) == play(other)


def test_unseeded_episodes_differ_in_every_kind_of_chance(sandboxed: Make) -> None:
    env = sandboxed("Dice")
    env.reset(seed=4)
    first = env.step(0)[-1]
    env.reset()
    assert env.reset()[0] != env.reset()[0]
    assert set(first) == {"own", "legacy", "random", "numpy"}


def test_reset_forgets_everything_but_np_random(sandboxed: Make) -> None:
    env = sandboxed("CartPole-v1")
    env.reset(seed=0)
    env.sandbox.run_code("leak = 1; open('/tmp/leak', 'w').close()")
    env.reset()
    seen = env.sandbox.run_code("import os; 'leak' in globals(), os.path.exists('/tmp/leak')")
    assert seen.value == "(False, False)"


def test_options_and_keywords_reach_the_environment(sandboxed: Make) -> None:
    env = sandboxed("Sampler", env_kwargs={"kind": "text"})
    options = {"level": 3, "map": np.eye(2)}
    assert data_equivalence(env.reset(seed=1, options=options)[1], {"options": options})
    limited = sandboxed("CartPole-v1", env_kwargs={"max_episode_steps": 3, "sutton_barto_reward": True})
    limited.reset(seed=0)
    assert [limited.step(0)[1:4] for _ in range(3)] == [(0.0, False, False)] * 2 + [(0.0, False, True)]
    assert limited.hosted.spec["max_episode_steps"] == 3
    with pytest.raises(TypeError, match="plain data"):
        sandboxed("Sampler", env_kwargs={"kind": object()})
    with pytest.raises(TypeError, match="plain data"):
        env.reset(options={"callback": print})


def test_rendering(sandboxed: Make) -> None:
    env = sandboxed("Sampler", render_mode="rgb_array")
    env.reset()
    assert env.render().shape == (2, 2, 3)
    assert env.metadata["render_modes"] == ["rgb_array", "ansi"]
    text = sandboxed("Sampler", render_mode="ansi")
    with pytest.raises(gym.error.ResetNeeded):
        text.render()
    text.reset()
    assert text.render() == "text"
    frames = gym.make(
        "sandbox_gym:Sandbox-v0", entry_point="tests.env.toys:Sampler", render_mode="rgb_array_list"
    )
    frames.reset()
    assert isinstance(frames.render(), list)
    frames.close()
    with pytest.raises(ValueError, match="no screen"):
        SandboxEnv("CartPole-v1", render_mode="human")


@pytest.mark.parametrize("action", [1, np.int64(1), np.int32(1), np.array(1)], ids=repr)
def test_actions_of_any_form_act_as_in_the_bare_environment(action: Any, sandboxed: Make) -> None:
    env, reference = sandboxed("CartPole-v1"), bare("CartPole-v1")
    env.reset(seed=0)
    reference.reset(seed=0)
    assert_same(env.step(action), reference.step(action))


@pytest.mark.parametrize(
    ("action", "error", "message"),
    [
        (1, ValueError, "nan"),
        (2, ValueError, "inf"),
        (3, SandboxError, "ZeroDivisionError: a guest's own"),
        (4, ValueError, "does not fit its space"),
        (7, gym.error.InvalidAction, "seven"),
        ("left", None, ""),
    ],
)
def test_what_it_raises_is_raised_and_it_lives_on(
    action: Any, error: type[Exception] | None, message: str, sandboxed: Make
) -> None:
    env = sandboxed("Trouble")
    env.reset()
    if error is None:
        assert env.step(action)[0] == 1
        return
    with pytest.raises(error, match=message) as raised:
        env.step(action)
    assert "toys.py" in raised.value.__notes__[0] or action in (1, 2, 4)  # type: ignore[attr-defined]
    assert env.step(0)[0] == 1


def test_errors_of_the_usual_kind(sandboxed: Make) -> None:
    env = sandboxed("CartPole-v1")
    with pytest.raises(gym.error.ResetNeeded):
        env.step(0)
    env.reset(seed=0)
    with pytest.raises(AssertionError, match="invalid"):
        env.step(5)
    with pytest.raises(gym.error.NameNotFound):
        sandboxed("NoSuchGame-v0")
    with pytest.raises(RuntimeError, match="no such world"):
        sandboxed("Trouble", env_kwargs={"start": "raise"})
    with pytest.raises(ModuleNotFoundError, match="nowhere"):
        SandboxEnv(entry_point="nowhere:Env")
    with pytest.raises(ValueError, match="env_id"):
        SandboxEnv()
    assert Sandbox.list() == [env.sandbox]


@pytest.mark.parametrize(("action", "error"), [(5, SandboxTimeout), (6, SandboxDied), (8, LimitExceeded)])
def test_a_step_that_ends_the_sandbox_is_an_error_and_reset_starts_anew(
    action: int, error: type[Exception], sandboxed: Make
) -> None:
    env = sandboxed("Trouble", step_timeout=1.0, memory="256Mi")
    env.reset(seed=1)
    name = env.sandbox.name
    with pytest.raises(error, match=name):
        env.step(action)
    with pytest.raises(SandboxDied, match=name):
        env.step(0)
    with pytest.raises(SandboxDied):
        env.render()
    env.reset()
    assert env.step(0)[1] == 1.0


def test_a_reset_that_hangs(sandboxed: Make) -> None:
    env = sandboxed("Trouble", reset_timeout=5.0)
    env._reset_timeout = 0.5
    with pytest.raises(SandboxTimeout):
        env.reset(options={"hang": True})
    env.reset()


def test_close_is_idempotent_and_final(sandboxed: Make) -> None:
    env = sandboxed("CartPole-v1")
    env.reset()
    box = env.sandbox
    env.close()
    env.close()
    assert box.status == "terminated"
    for call in (env.reset, env.render, env.snapshot, lambda: env.step(0), lambda: env.branch(2)):
        with pytest.raises(gym.error.ClosedEnvironmentError):
            call()


def test_make_wraps_it_as_any_environment() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env = gym.make("sandbox_gym:Sandbox-v0", env_id="CartPole-v1", step_timeout=5.0)
    assert isinstance(env.unwrapped, SandboxEnv)
    env.reset(seed=0)
    env.close()


def test_a_limit_that_snapshots_know_nothing_of_is_told() -> None:
    with pytest.warns(
        RuntimeWarning, match=r"max_episode_steps=2 outside .* env_kwargs=\{'max_episode_steps': 2\}"
    ) as told:
        env = gym.make("Sandbox-v0", env_id="CartPole-v1", max_episode_steps=2)
    assert told[0].filename == __file__
    env.reset(seed=0)
    assert [env.step(0)[3] for _ in range(2)] == [False, True]
    env.close()


def test_an_environment_that_the_sandbox_does_not_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "of_mine.py").write_text("from tests.env.toys import Dice")
    with pytest.raises(ModuleNotFoundError, match=r"of_mine.*python_path=\['/your/folder'\]"):
        gym.make("Sandbox-v0", entry_point="of_mine:Dice")
    given = [str(tmp_path), os.environ["PYTHONPATH"]]
    gym.make("Sandbox-v0", entry_point="of_mine:Dice", python_path=given).close()
    monkeypatch.setitem(
        gym.registry, "Mine-v0", gym.envs.registration.EnvSpec("Mine-v0", entry_point="of_mine:Dice")
    )
    with pytest.raises(gym.error.NameNotFound, match=r"Mine.*entry_point='module:Class' does without"):
        gym.make("Sandbox-v0", env_id="Mine-v0")
    with pytest.raises(TypeError, match="text, 'module:Class'"):
        gym.make("Sandbox-v0", entry_point=SandboxEnv)
    with pytest.raises(ValueError, match=r"'module:Class', not 'of_mine\.Dice'"):
        gym.make("Sandbox-v0", entry_point="of_mine.Dice")
