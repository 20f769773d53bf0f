"""`sandbox-gym eval`: what it prints, and its exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sandbox_gym.tasks import Task

TASKS = Task(id="done", check="test -e done"), Task(id="other", check="test -e other")
ROOT = Path(__file__).parents[2]
Command = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def command(tmp_path: Path) -> Command:
    """`command(*arguments)`: runs `sandbox-gym eval` in `tmp_path`, which has tasks.jsonl and policies.py."""
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task.to_json()) + "\n" for task in TASKS))
    (tmp_path / "policies.py").write_text(
        "def touch(task, box):\n    box.shell('touch done')\n\ndef fail(task, box):\n    raise KeyError('a')\n"
    )

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "sandbox_gym", "eval", *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )

    return run


def test_the_command(command: Command, tmp_path: Path) -> None:
    ran = command("tasks.jsonl", "--policy", "policies:touch", "-k", "2", "--workers", "2")
    assert (ran.returncode, ran.stderr.splitlines()[-1]) == (0, "4 of 4 attempts, 2 solved, 0 errors")
    assert ran.stdout.splitlines()[0].split()[:3] == ["pass@1", "50.0", "%"]
    assert len((tmp_path / "eval-output/results.jsonl").read_text().splitlines()) == 4
    assert (tmp_path / "eval-output/report.html").exists()
    ran = command("tasks.jsonl", "--policy", "policies:fail", "--out", "other")
    assert ran.returncode == 1
    assert ran.stdout.splitlines()[-2:] == [
        "2 x KeyError: 'a'",
        "other/report.html, other/results.jsonl, with all that each error says",
    ]
    assert "2 without (errors)" in ran.stdout


def test_the_command_goes_on_or_starts_over(command: Command, tmp_path: Path) -> None:
    touch = ("tasks.jsonl", "--policy", "policies:touch")
    command(*touch)
    more = command(*touch, "-k", "2")
    assert more.stderr.splitlines() == ["4 of 4 attempts, 2 solved, 0 errors"]
    assert "2 of them were taken from before, 2 were run now, in " in more.stdout
    assert "--anew or another --out runs all attempts again" in more.stdout
    (tmp_path / "policies.py").write_text("def touch(task, box): pass\n")
    again = command(*touch, "-k", "2", "--anew")
    assert (again.returncode, again.stdout.split()[:3]) == (0, ["pass@1", "0.0", "%"])
    assert "from before" not in again.stdout + again.stderr
    assert len((tmp_path / "eval-output/results.jsonl").read_text().splitlines()) == 4


@pytest.mark.parametrize("options", [[], ["--anew"]], ids=["", "anew"])
def test_the_command_that_is_stopped_says_how_to_go_on(
    options: list[str], command: Command, tmp_path: Path
) -> None:
    (tmp_path / "policies.py").write_text(
        "import os, signal\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # who starts these tests may have it ignored\n"
        "def stop(task, box): os.kill(os.getpid(), signal.SIGINT)\n"
    )
    ran = command("tasks.jsonl", "--policy", "policies:stop", *options)
    same = "the same command without --anew" if options else "the same command"
    said = f"stopped; what is over is in eval-output, and {same} goes on from there"
    assert (ran.returncode, ran.stdout, ran.stderr.splitlines()[-1]) == (130, "", said)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["no.jsonl", "--policy", "policies:touch"], "no such data set"),
        (["tasks.jsonl", "--policy", "policies:nothing"], "module policies has no nothing"),
        (["tasks.jsonl", "--policy", "policies"], "is named module:function"),
        (["tasks.jsonl", "--policy", "policies:touch", "-k", "0"], "k and workers are 1 or more"),
        (
            ["tasks.jsonl", "--policy", "policies:touch", "--backend", "nope"],
            "no backend 'nope': choose from",
        ),
    ],
)
def test_the_command_says_what_is_wrong(arguments: list[str], said: str, command: Command) -> None:
    ran = command(*arguments)
    assert ran.returncode == 2
    assert said in ran.stderr
    assert (len(ran.stderr.splitlines()), ran.stdout) == (1, "")
