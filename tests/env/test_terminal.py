"""The sandbox itself as an environment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import pytest
from gymnasium.utils.env_checker import check_env

from sandbox_gym.envs.terminal import AnyText, TerminalEnv
from sandbox_gym.errors import SandboxDied, SandboxError, SandboxTimeout
from sandbox_gym.sandbox import Sandbox

Make = Callable[..., TerminalEnv]


@pytest.mark.parametrize("language", ["python", "shell"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_gymnasiums_own_checker_is_content(language: str) -> None:
    env = gym.make("sandbox_gym:Sandbox-v0", language=language, disable_env_checker=True)
    try:
        check_env(env.unwrapped, skip_render_check=True)
    finally:
        env.close()


def test_python_lives_on_between_actions(sandboxed: Make) -> None:
    env = sandboxed()
    assert env.reset(seed=0) == ("", {})
    assert env.step("x = 20; print('é😀')") == (
        "é😀",
        0.0,
        False,
        False,
        {"ok": True, "timed_out": False, "error": None},
    )
    assert env.step("x + 1")[0] == "21"
    observation, _, _, _, info = env.step("1 / 0")
    assert "ZeroDivisionError" in observation
    assert (info["ok"], info["error"]) == (False, "ZeroDivisionError")


def test_shell(sandboxed: Make) -> None:
    env = sandboxed(language="shell")
    env.reset()
    assert env.step("echo out; echo err >&2; exit 3")[0] == "out\nerr\n[exit code 3]"
    assert env.step("true")[4] == {"ok": True, "timed_out": False, "exit_code": 0}
    assert "\ufffd" in env.step(r"printf '\xff'")[0]
    for action in ("a\0b", "\ud800", 3):
        with pytest.raises(ValueError):  # noqa: PT011  # one is ours, one the sandbox's, one the guest's
            env.step(action)  # type: ignore[arg-type]


def test_whatever_comes_back_is_in_the_space(sandboxed: Make) -> None:
    env = sandboxed(max_output=256)
    env.reset()
    for code in (
        "print('x' * 10**6)",
        "print(bytes(range(256)).decode('latin1'))",
        "'\\ud800'",
        "print('\\ud800')",
    ):
        assert env.observation_space.contains(env.step(code)[0])
    observation = env.step("print('a' * 500 + 'b' * 500)")[0]
    assert observation.startswith("aaa")
    assert observation.endswith("bbb")
    assert "[... 808 characters cut ...]" in observation
    assert len(observation) <= 256


def test_a_time_out_is_an_observation(sandboxed: Make) -> None:
    env = sandboxed(step_timeout=0.5)
    env.reset()
    env.step("kept = 1")
    observation, _, _, _, info = env.step("import time; print('begun', flush=True); time.sleep(60)")
    assert observation == "begun\n[timed out after 0.5 s]"
    assert info["timed_out"]
    assert env.step("kept")[0] == "1"


def test_an_action_that_ends_the_sandbox_is_an_error(sandboxed: Make) -> None:
    env = sandboxed(step_timeout=0.5)
    env.reset()
    with pytest.raises(SandboxTimeout):
        env.step("import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass")
    env.reset()
    with pytest.raises(SandboxDied):
        env.step("import os; os._exit(1)")
    env.reset()
    assert env.step("2 + 2")[0] == "4"


@pytest.mark.parametrize(
    ("language", "score", "action"),
    [
        ("python", "len(done)", "done.append(1)"),
        ("python", "print('so', 1); print(2.0)", ""),
        ("shell", "ls | wc -l", "touch a"),
    ],
)
def test_score_is_the_reward(language: str, score: str, action: str, sandboxed: Make) -> None:
    setup = "done = [0]" if language == "python" else "touch b"
    env = sandboxed(language=language, score=score, setup=setup)
    env.reset()
    assert env.step(action)[1] == 2.0
    env.reset()
    assert env.step(action)[1] == 2.0


@pytest.mark.parametrize(
    "score", ["print('none')", "1 / 0", "pass", "float('nan')", "print(3); raise SystemExit(1)"]
)
def test_a_score_that_is_no_number_is_an_error(score: str, sandboxed: Make) -> None:
    env = sandboxed(score=score)
    env.reset()
    with pytest.raises(SandboxError, match=r"score gave no number"):
        env.step("print('fine')")


def test_set_up_that_fails_leaves_nothing(sandboxed: Make) -> None:
    before = len(Sandbox.list())
    with pytest.raises(SandboxError, match="no_such_name"):
        sandboxed(setup="no_such_name")
    assert len(Sandbox.list()) == before
    with pytest.raises(ValueError, match="language"):
        sandboxed(language="cobol")


def test_episodes_are_truncated_where_asked(sandboxed: Make) -> None:
    env = sandboxed(max_episode_steps=2, render_mode="ansi")
    for _ in range(2):
        env.reset()
        assert [env.step("1")[3] for _ in range(2)] == [False, True]
    assert env.render() == "1"


def test_snapshots_and_branches_know_the_episode(sandboxed: Make) -> None:
    env = sandboxed(max_episode_steps=3)
    env.reset(seed=0)
    env.step("import random; x = 1; open('note', 'w').write('here')")
    env.step("x")
    moment = env.snapshot()
    draws = env.step("random.random()")
    assert draws[3]
    assert env.restore(moment) == ("1", {"ok": True, "timed_out": False, "error": None})
    assert env.step("random.random()") == draws
    env.restore(moment)
    (child,) = env.branch(1)
    assert child.step("random.random()") == draws
    assert env.reset(options={"snapshot": moment})[0] == "1"
    first, second = env.branch(actions=["x = 2; open('note').read()", "x"])
    assert (first.observation, second.observation) == ("'here'", "1")
    (other,) = env.branch(1, rng="diverge")
    assert other.step("random.random()")[0] != draws[0]
    assert env.step("x")[0] == "1"
    for branch in (child, first.env, second.env, other):
        branch.close()


def test_seeds_and_options(sandboxed: Make) -> None:
    env = sandboxed()
    seen = []
    for seed in (1, None, 1, None):
        env.reset(seed=seed)
        seen.append(env.step("import random; random.random()")[0])
    assert seen[:2] == seen[2:]
    assert seen[0] != seen[1]
    with pytest.raises(ValueError, match="level"):
        env.reset(options={"level": 1})


def test_rollouts_take_actions(sandboxed: Make) -> None:
    env = sandboxed(score="x", max_episode_steps=3)
    env.reset()
    played = env.rollout(["x = 1", "x = 2", "x = 3", "x = 4"], discount=0.5, observations=True)
    assert (played.rewards.tolist(), played.value, played.truncated) == ([1, 2, 3], 2.75, True)
    assert played.observations == ["", "", ""]


def test_any_text() -> None:
    space: Any = AnyText(10)
    assert all(text in space for text in ("", "é😀\x00", "\ud800" * 10))
    assert "x" * 11 not in space
    assert 3 not in space
    space.seed(0)
    assert all(space.sample() in space for _ in range(20))
