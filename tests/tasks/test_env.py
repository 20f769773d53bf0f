"""`SandboxTask-v0`: actions, rewards at the end, branches."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import sandbox_gym
from sandbox_gym.envs.task import TaskEnv
from sandbox_gym.errors import SandboxDied, TaskError
from sandbox_gym.search import MCTS, beam_search
from sandbox_gym.tasks import actions
from tests.tasks.conftest import DOUBLE

EDIT = json.dumps({"tool": "edit", "path": "calc.py", "old": "return x", "new": "return x + x"})


@pytest.fixture
def env() -> Iterator[TaskEnv]:
    made = TaskEnv(DOUBLE)
    yield made
    made.close()


@pytest.mark.parametrize("options", [{}, {"menu": ["ls", EDIT, "submit"], "encode": "flat"}])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_gymnasiums_own_checker_is_content(options: dict[str, Any]) -> None:
    env = gym.make("SandboxTask-v0", task=DOUBLE.to_json(), disable_env_checker=True, **options)
    try:
        check_env(env.unwrapped, skip_render_check=True)
    finally:
        env.close()


def test_an_episode(env: TaskEnv) -> None:
    assert env.reset(seed=0) == (DOUBLE.prompt, {"task": "double"})
    observation, reward, terminated, truncated, info = env.step('{"tool": "read", "path": "calc.py"}')
    assert (observation, reward, terminated, truncated) == (
        "def double(x):\n    return x\n",
        0.0,
        False,
        False,
    )
    assert info == {"tool": "read", "ok": True, "timed_out": False}
    assert env.step(EDIT)[0] == "[edited calc.py]"
    assert env.step("python -c 'import calc; print(calc.double(4))'; exit 3")[0] == "8\n[exit code 3]"
    assert env.step('{"tool": "run_code", "code": "import os; os.getcwd()"}')[0] == "'/workspace'"
    assert env.step('{"tool": "write", "path": "sub/a", "content": "b"}')[4]["ok"]
    assert "git version" in env.step('{"tool": "git", "args": "--version"}')[0]
    observation, reward, terminated, truncated, info = env.step("submit")
    assert (observation, reward, terminated, truncated) == ("", 1.0, True, False)
    assert info["verdict"]["carried"] == ["/workspace/calc.py", "/workspace/sub/a"]
    with pytest.raises(gym.error.ResetNeeded):
        env.step("ls")
    env.reset()
    assert env.step("ls sub")[4]["exit_code"] == 2
    assert env.step("submit")[1] == 0.0


def test_the_last_step_is_graded_too() -> None:
    env = TaskEnv(replace(DOUBLE, max_steps=2), render_mode="ansi")
    try:
        env.reset()
        assert env.step(EDIT)[1:4] == (0.0, False, False)
        observation, reward, terminated, truncated, info = env.step("echo done")
        assert (observation, reward, terminated, truncated) == ("done", 1.0, False, True)
        assert info["verdict"]["score"] == 1.0
        assert env.render() == "done"
    finally:
        env.close()


@pytest.mark.parametrize(
    ("action", "said"),
    [
        ('{"tool": "fly"}', "there is no tool 'fly'"),
        ('{"tool": "read"}', "read takes path"),
        ('{"tool": "read", "path": 3}', "read takes path"),
        ('{"tool": "read", "path": "no"}', "No such file"),
        ('{"tool": "edit", "path": "calc.py", "old": "nowhere", "new": ""}', "0 times"),
        ('{"tool": "git", "args": "\'"}', "No closing quotation"),
        ('{"tool": "shell", "command": "a\\u0000b"}', "null character"),
        ("\ud800", "surrogates not allowed"),
    ],
)
def test_a_call_that_goes_wrong_is_told(env: TaskEnv, action: str, said: str) -> None:
    env.reset()
    observation, _, _, _, info = env.step(action)
    assert said in observation
    assert info["ok"] is False


def test_text_that_is_no_call_is_a_command() -> None:
    for text in ("ls", "{ echo a; }", '{"a": 1}', "[1]", "{" * 100_000):
        assert actions.parse(text) == actions.Call("shell", {"command": text})
    assert actions.parse('{"tool": "read", "args": {"path": "a"}}') == actions.Call("read", {"path": "a"})


def test_an_action_that_ends_the_sandbox_is_an_error(env: TaskEnv) -> None:
    env.reset()
    with pytest.raises(SandboxDied):
        env.step('{"tool": "run_code", "code": "import os; os._exit(0)"}')
    env.reset()
    assert env.step("echo back")[0] == "back"


def test_branches_and_snapshots(env: TaskEnv) -> None:
    env.reset()
    env.step("echo 'return x' >> notes")
    moment = env.snapshot()
    solved, failed = env.branch(actions=[EDIT, "ls"])
    assert [branch.env.step("submit")[1] for branch in (solved, failed)] == [1.0, 0.0]
    assert env.grade().score == 0.0  # untouched by what its branches did
    solved.env.close()
    failed.env.close()
    env.step("submit")
    assert env.restore(moment)[1]["tool"] == "shell"
    env.step(EDIT)
    (child,) = env.branch(1)
    env.close()
    assert child.step("submit")[1] == 1.0
    child.close()
    moment.delete()


def test_a_menu_and_numbers() -> None:
    env = TaskEnv(DOUBLE, menu=[EDIT, "submit"], encode="flat")
    try:
        observation, info = env.reset(seed=0)
        assert (observation.shape, observation.dtype, info["text"]) == ((64,), np.float32, DOUBLE.prompt)
        assert env.step(0)[4]["text"] == "[edited calc.py]"
        assert env.step(1)[1:3] == (1.0, True)
    finally:
        env.close()


def test_where_a_task_comes_from(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps(DOUBLE.to_json()))
    env = gym.make("sandbox_gym:SandboxTask-v0", task=path)
    assert env.unwrapped.task == DOUBLE  # type: ignore[attr-defined]
    env.close()
    path.write_text("".join(json.dumps({**DOUBLE.to_json(), "id": name}) + "\n" for name in "ab"))
    with pytest.raises(TaskError, match="there are 2"):
        TaskEnv(path)
    with pytest.raises(TypeError, match=r"task=\.\.\.\) takes a Task, a record of one, or a path"):
        gym.make("sandbox_gym:SandboxTask-v0")
    assert sandbox_gym.TaskEnv is TaskEnv


def test_a_menu_can_be_searched_and_text_cannot(env: TaskEnv) -> None:
    with pytest.raises(TypeError, match="Discrete"):
        MCTS(num_simulations=1).search(env)
    spoil = json.dumps({"tool": "write", "path": "calc.py", "content": "def double(x): return 0"})
    menu = TaskEnv(DOUBLE, menu=[spoil, "ls", EDIT, "submit"])
    try:
        with pytest.raises(gym.error.ResetNeeded):
            MCTS(num_simulations=1).search(menu)
        menu.reset(seed=0)
        result = beam_search(menu, width=4, depth=2)
        assert list(result.principal_variation) == [2, 3]  # mended, then handed in
        assert menu.step(2)[1] == 0.0
        assert menu.step(3)[1:3] == (1.0, True)
    finally:
        menu.close()
