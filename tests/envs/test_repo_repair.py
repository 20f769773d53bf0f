"""RepoRepair-v0: tasks out of two real packages, and what each answer to them is worth."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import gymnasium
import numpy as np
import pytest

from sandbox_gym.envs.repo_repair import RepoRepairEnv, Solution, generate, packages, suite
from sandbox_gym.envs.repo_repair.env import apply_action
from sandbox_gym.errors import SandboxError, SandboxTimeout
from sandbox_gym.sandbox import Sandbox
from sandbox_gym.tasks import Prepared, Task
from tests.conftest import descendants

Made = list[tuple[Task, Solution]]
NAMES = ["inflection", "webcolors"]  # the quickest to fetch and to test
INFLECTION = packages.PACKAGES["inflection"]


@pytest.fixture(scope="module")
def made() -> Made:
    return list(generate(2, seed=0, packages=NAMES))


@pytest.fixture
def env(made: Made) -> Iterator[gymnasium.Env[str, str]]:
    env = gymnasium.make("RepoRepair-v0", task=made[0][0])
    yield env
    env.close()


def _answer(env: RepoRepairEnv, *actions: str) -> tuple[float, dict[str, object]]:
    env.reset(seed=0)
    for action in actions:
        _, reward, terminated, truncated, info = env.step(action)
        assert (reward, terminated, truncated) == (0.0, False, False)
        assert info["ok"], info
    _, score, terminated, _, info = env.step("submit")
    assert terminated
    return float(score), info["verdict"]


def _vandalism(task: Task) -> list[str]:
    """Tests written over, and a plugin that lets all of them pass."""
    hook = "import pytest\n@pytest.hookimpl(tryfirst=True)\ndef pytest_runtest_call(item): item.obj = lambda: None\n"
    files = {path: "def test_nothing():\n    pass\n" for path in task.hidden if path.endswith(".py")}
    files |= {"conftest.py": hook, "pytest.ini": "[pytest]\naddopts = --collect-only\n"}
    return [json.dumps({"tool": "write", "path": path, "content": text}) for path, text in files.items()]


# ---- tasks -------------------------------------------------------------------------------------------------------


def test_tasks_are_shared_out_and_say_what_goes_wrong(made: Made) -> None:
    assert [task.id for task, _ in made] == ["inflection-0-0", "webcolors-0-0"]
    for task, solution in made:
        assert task.fail_to_pass
        assert len(task.pass_to_pass) > 4 * len(task.fail_to_pass) * 0.9
        assert not set(task.fail_to_pass) & set(task.pass_to_pass)
        assert "```\n" in task.prompt
        assert "Error" in task.prompt
        changed = [line[1:].strip() for line in solution.patch.splitlines() if line[:1] in "+-"]
        assert len(changed) >= 4  # two of them name the file
        assert not any(line in task.prompt for line in changed)
        assert not set(task.files) & set(task.hidden)
        assert Task.from_json(json.loads(json.dumps(task.to_json()))) == task
        assert Solution.from_json(json.loads(json.dumps(solution.to_json()))) == solution


def test_each_answer_is_worth_what_it_should_be(made: Made) -> None:
    task, solution = made[1]
    env = RepoRepairEnv(task)
    try:
        assert env._prepared.untouched.score == 0
        assert _answer(env, apply_action(solution.patch))[0] == 1.0
        assert _answer(env)[0] == 0.0
        score, verdict = _answer(env, *_vandalism(task))
        assert score == 0.0
        assert verdict["left_out"]
    finally:
        env.close()


# ---- the environment ---------------------------------------------------------------------------------------------


def test_the_agent_sees_no_tests_no_fix_and_no_history(made: Made, env: gymnasium.Env[str, str]) -> None:
    observation, info = env.reset(seed=0)
    task, solution = made[0]
    assert observation == task.prompt
    assert info["task"] == task.id
    box: Sandbox = env.unwrapped.sandbox  # type: ignore[attr-defined]
    assert not [file.path for file in box.list_files("/workspace", recursive=True) if "test" in file.path]
    assert box.shell("git log --oneline --all | wc -l").stdout.strip() == "1"
    assert box.shell("git status --short").stdout == ""
    assert not box.shell(f"cd / && python -c 'import {solution.package}'").ok
    bug, fix = (
        next(line[1:] for line in solution.patch.splitlines() if line[0] == sign and line[1] == " ")
        for sign in "-+"
    )
    assert box.exec(["grep", "-rlF", "--", bug, "/workspace"]).stdout == f"/workspace/{solution.path}\n"
    assert box.exec(["grep", "-rlF", "--", fix, "/workspace", "/tmp", "/root", "/run", "/var"]).stdout == ""


def test_branches_are_judged_apart(made: Made, env: gymnasium.Env[str, str]) -> None:
    env.reset(seed=0)
    env.step("echo notes > notes.txt")
    unwrapped: RepoRepairEnv = env.unwrapped  # type: ignore[assignment]
    branches = unwrapped.branch(actions=[apply_action(made[0][1].patch), "rm -r inflection", "cat notes.txt"])
    try:
        assert branches[2].observation.strip() == "notes"
        assert [branch.env.step("submit")[1] for branch in branches] == [1.0, 0.0, 0.0]
        assert env.step("submit")[1] == 0.0
    finally:
        for branch in branches:
            branch.env.close()


def test_a_menu_is_a_numeric_environment(made: Made) -> None:
    task, solution = made[1]
    env = gymnasium.make("RepoRepair-v0", task=task, solution=solution, menu=True, encode="flat")
    try:
        edits = len(solution.menu)
        back, submit = edits, edits + 1
        assert edits > 3
        assert env.action_space == gymnasium.spaces.Discrete(edits + 2)
        observation, info = env.reset(seed=0)
        assert observation in env.observation_space
        assert observation.dtype == np.float32
        assert info["text"] == task.prompt
        other = (solution.answer + 1) % edits
        scores = []
        for actions in ([other, back, solution.answer], [solution.answer, back], [other]):
            env.reset(seed=0)
            for action in actions:
                assert env.step(action)[4]["ok"]
            scores.append(float(env.step(submit)[1]))
        assert scores[:2] == [1.0, 0.0]
        assert scores[2] < 1
    finally:
        env.close()


def test_what_is_missing_is_told(made: Made) -> None:
    with pytest.raises(ValueError, match="give a task, or the seed="):
        RepoRepairEnv()
    with pytest.raises(ValueError, match="give its solution="):
        RepoRepairEnv(made[0][0], menu=True)
    with pytest.raises(SandboxError, match="is not the solution of inflection-0-0"):
        RepoRepairEnv(made[0][0], menu=True, solution=made[1][1])


# ---- what makes them ---------------------------------------------------------------------------------------------


def test_the_command_writes_tasks_and_apart_from_them_what_solves_them(tmp_path: Path, made: Made) -> None:
    out = tmp_path / "tasks.jsonl"
    command = [sys.executable, "-m", "sandbox_gym.envs.repo_repair", "--out", str(out), "--n", "1"]
    root = Path(__file__).resolve().parents[2]
    result = subprocess.run(
        [*command, "--packages", "webcolors"],
        capture_output=True,
        text=True,
        timeout=110,
        check=True,
        cwd=root,
    )
    assert "1/1 webcolors-0-0" in result.stderr
    (record,) = map(json.loads, out.read_text().splitlines())
    (solution,) = map(json.loads, (tmp_path / "tasks.solutions.jsonl").read_text().splitlines())
    assert (Task.from_json(record), Solution.from_json(solution)) == made[1]
    assert solution["patch"] not in out.read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tasks.jsonl", "tasks.solutions.jsonl"]
    wrong = subprocess.run(
        [*command, "--packages", "nothing"], capture_output=True, text=True, timeout=60, check=False, cwd=root
    )
    assert wrong.returncode == 1
    assert "packages are some of boltons, cachetools" in wrong.stderr


def test_pip_takes_only_the_archive_that_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANDBOX_GYM_HOME", str(tmp_path))
    with pytest.raises(SandboxError, match=r"(?s)pip could not fetch.*HASH"):
        packages.fetch([replace(INFLECTION, sha256="0" * 64)])
    assert list(tmp_path.rglob("*")) == [tmp_path / "archives"]


def test_pip_ends_in_time_with_all_that_it_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SANDBOX_GYM_HOME", str(tmp_path))
    before = descendants(os.getpid())
    with pytest.raises(SandboxTimeout, match=r"longer than 1 s to fetch inflection 0\.5\.1"):
        packages.fetch([INFLECTION], timeout=1.0)
    assert descendants(os.getpid()) <= before
    assert list(tmp_path.rglob("*")) == [tmp_path / "archives"]


def test_an_archive_is_read_without_its_links_and_ways_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SANDBOX_GYM_HOME", str(tmp_path))
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as tar:
        for name in (
            "p-1/p/a.py",
            "p-1/p/tests/test_a.py",
            "p-1/../p/b.py",
            "p-1/p/../../c.py",
            "p-1/secret.py",
        ):
            member = tarfile.TarInfo(name)
            member.size = 4
            tar.addfile(member, io.BytesIO(b"x=1\n"))
        link = tarfile.TarInfo("p-1/p/link.py")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    package = packages.Package("p", "1", sha256(stream.getvalue()).hexdigest(), ("p",), "p/tests")
    (tmp_path / "archives").mkdir(mode=0o700)
    packages.archive(package).write_bytes(stream.getvalue())
    packages.fetch([package])  # it is there
    source = packages.read(package)
    assert source.shown == {"p/a.py": b"x=1\n"}
    assert source.tests == {"p/tests/test_a.py": b"x=1\n"}
    with pytest.raises(SandboxError, match="has no"):
        packages.read(replace(package, tests="elsewhere"))


def test_a_package_that_python_has_makes_no_tasks(made: Made) -> None:
    with (
        Prepared(made[0][0]) as prepared,
        pytest.raises(SandboxError, match="pytest is installed in this Python"),
    ):
        suite._check_absent(prepared, replace(INFLECTION, name="pytest"))


@pytest.mark.parametrize("n", [0, -1])
def test_a_number_of_tasks(n: int) -> None:
    with pytest.raises(ValueError, match="a number of tasks from 1"):
        next(generate(n))
