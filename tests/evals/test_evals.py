"""Evals: attempts, errors apart from 0, going on where one has stopped, the report, the command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from sandbox_gym import evals
from sandbox_gym.errors import SandboxError
from sandbox_gym.evals.attempts import Attempt
from sandbox_gym.evals.policies import advantages, find
from sandbox_gym.evals.summary import pass_at_k, summarize, wilson
from sandbox_gym.sandbox import Sandbox
from sandbox_gym.tasks import Prepared, Task

ONE = Task(id="one", check="test -e done", solution="touch done", prompt="<b>Do it</b>", check_timeout=20.0)
TWO = replace(
    ONE, id="two <two>", check="test $(cat count) -ge 2", setup=("echo 0 > count",), solution="echo 2 > count"
)
ROOT = Path(__file__).parents[2]


def add_one(task: Task, box: Sandbox) -> None:
    box.shell("echo $(($(cat count) + 1)) > count")


# ---- numbers -----------------------------------------------------------------------------------------------------


def test_pass_at_k() -> None:
    assert [pass_at_k(4, 1, k) for k in (1, 2, 4)] == [0.25, 0.5, 1.0]
    assert pass_at_k(10, 0, 5) == 0.0
    assert pass_at_k(200, 100, 1) == 0.5


def test_wilson() -> None:
    assert wilson(0.5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)  # as published tables have it
    assert wilson(0.0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert wilson(1.0, 10) == pytest.approx((0.7225, 1.0), abs=1e-4)


def test_a_summary_keeps_errors_apart() -> None:
    def attempt(task: str, number: int, score: float | None) -> Attempt:
        return Attempt(task, "d", "p", number, "error" if score is None else "graded", score, 1.0)

    found = summarize("p", 4, [attempt("a", i, s) for i, s in enumerate([1.0, 0.5, None, 0.0])], 9.0)
    assert found.pass_at[1].value == pytest.approx(1 / 3)
    assert found.pass_at[2].value == pytest.approx(2 / 3)
    assert 4 not in found.pass_at  # three of four have a score
    assert (found.errors, found.mean_score, found.rows[0].graded) == (1, 0.5, 3)
    assert "1 without (errors)" in found.text()
    assert summarize("p", 1, [attempt("a", 0, None)], 1.0).pass_at == {}


def test_advantages() -> None:
    assert advantages([1.0, 0.0]) == (1.0, -1.0)
    assert advantages([0.5, 0.5, 0.5]) == (0.0, 0.0, 0.0)


# ---- running -----------------------------------------------------------------------------------------------------


def test_reference_and_nothing() -> None:
    found = evals.evaluate([ONE, TWO], evals.reference, k=2, workers=2)
    assert (found.pass_at[1].value, found.pass_at[2].value, found.errors) == (1.0, 1.0, 0)
    assert [row.task for row in found.rows] == ["one", "two <two>"]
    found = evals.evaluate([ONE, TWO], evals.nothing, k=2, workers=2)
    assert (found.pass_at[2].value, found.mean_score) == (0.0, 0.0)


def test_no_more_run_at_once_than_may() -> None:
    running, most, lock = 0, 0, threading.Lock()

    def watched(task: Task, box: Sandbox) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        box.shell("sleep 0.1")
        with lock:
            running -= 1

    evals.evaluate([ONE], watched, k=6, workers=2)
    assert most == 2


def test_what_is_an_error_and_what_is_zero() -> None:
    def fails(task: Task, box: Sandbox) -> None:
        raise RuntimeError("no model answers")

    def ends_itself(task: Task, box: Sandbox) -> None:
        box.run_code("import os; os._exit(1)")

    found = evals.evaluate([ONE], fails)
    (attempt,) = found.rows[0].attempts
    assert (attempt.status, attempt.score, attempt.error) == ("error", None, "RuntimeError: no model answers")
    found = evals.evaluate([ONE], ends_itself)
    (attempt,) = found.rows[0].attempts
    assert (attempt.status, attempt.score, found.errors) == ("graded", 0.0, 0)
    broken = replace(ONE, id="broken", setup=("exit 3",))
    found = evals.evaluate([ONE, broken], evals.reference, k=2)
    assert [row.errors for row in found.rows] == [0, 2]
    assert "ended with 3" in found.rows[1].attempts[1].error


@pytest.mark.parametrize("heeds", [True, False], ids=["calls on", "hangs"])
def test_a_policy_that_takes_too_long(heeds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sandbox_gym.evals.runner._GRACE", 0.3)
    over = threading.Event()

    def slow(task: Task, box: Sandbox) -> None:
        while heeds:
            box.shell("sleep 1")
        over.wait(60)

    started = time.monotonic()
    found = evals.evaluate([ONE], slow, timeout=0.5)
    over.set()
    assert time.monotonic() - started < 30
    assert (found.rows[0].attempts[0].status, found.mean_score) == ("timed_out", 0.0)


def test_an_eval_that_is_given_up_ends_what_runs() -> None:
    began = threading.Event()

    def slow(task: Task, box: Sandbox) -> None:
        began.set()
        box.shell("sleep 60", timeout=90)

    from sandbox_gym.evals.runner import _Runner

    runner = _Runner(slow, "slow", 90.0, "native")
    wanted = [(ONE, i) for i in range(4)]
    attempts = runner.run(wanted, 2)

    def give_up() -> None:
        began.wait(60)
        runner._stop.set()

    threading.Thread(target=give_up).start()
    assert next(attempts).status == "error"
    attempts.close()


# ---- going on ----------------------------------------------------------------------------------------------------


def test_it_goes_on_where_it_has_stopped(tmp_path: Path) -> None:
    calls: list[str] = []

    def policy(task: Task, box: Sandbox) -> None:
        calls.append(task.id)
        if len(calls) == 3:
            raise RuntimeError("once")
        evals.reference(task, box)

    evals.evaluate([ONE], policy, k=2, out=tmp_path, name="mine", workers=1)
    found = evals.evaluate([ONE, TWO], policy, k=2, out=tmp_path, name="mine", workers=1)
    assert (calls, found.errors) == (["one", "one", "two <two>", "two <two>"], 1)
    lines = (tmp_path / "results.jsonl").read_text().splitlines()
    (tmp_path / "results.jsonl").write_text(
        "\n".join(lines[:-1]) + "\n" + lines[-1][:40]
    )  # killed as it wrote
    found = evals.evaluate([ONE, TWO], policy, k=2, out=tmp_path, name="mine", workers=1)
    assert (calls[4:], found.errors, found.pass_at[2].value) == (["two <two>"] * 2, 0, 1.0)
    changed = replace(ONE, prompt="Another.")
    evals.evaluate([changed], policy, k=1, out=tmp_path, name="mine")
    assert calls[6:] == ["one"]
    with pytest.raises(SandboxError, match="has attempts of policy mine, not other"):
        evals.evaluate([ONE], policy, out=tmp_path, name="other")
    (tmp_path / "results.jsonl").write_text("nonsense\n")
    with pytest.raises(SandboxError, match=r"results.jsonl:1: no attempt"):
        evals.evaluate([ONE], policy, out=tmp_path, name="mine")


def test_two_do_not_write_to_one_file(tmp_path: Path) -> None:
    said: list[str] = []

    def policy(task: Task, box: Sandbox) -> None:
        with pytest.raises(SandboxError, match="another eval writes to it") as error:
            evals.evaluate([ONE], evals.nothing, out=tmp_path)
        said.append(str(error.value))

    assert evals.evaluate([ONE], policy, out=tmp_path).errors == 0
    assert said


# ---- policies over policies --------------------------------------------------------------------------------------


def count_of(task: Task, box: Sandbox) -> float:
    return float(box.read_text("count"))


def test_best_of_n() -> None:
    lock, made = threading.Lock(), iter([1, 2, 0])

    def guess(task: Task, box: Sandbox) -> None:
        with lock:
            number = next(made)
        box.shell(f"echo {number} > count")

    assert evals.evaluate([TWO], evals.best_of_n(guess, 3, count_of)).mean_score == 1.0


def test_beam_search() -> None:
    """One step is not enough, and every other step goes wrong."""
    lock, turn = threading.Lock(), iter(range(100))

    def step(task: Task, box: Sandbox) -> None:
        with lock:
            bad = next(turn) % 2
        box.shell("echo 0 > count") if bad else add_one(task, box)

    def half(task: Task, box: Sandbox) -> float:
        return count_of(task, box) / 2

    assert evals.evaluate([TWO], evals.beam_search(step, half, branch=2, depth=3)).mean_score == 1.0
    assert evals.evaluate([TWO], evals.beam_search(step, half, branch=2, depth=1)).mean_score == 0.0
    assert (
        evals.evaluate([TWO], evals.beam_search(evals.reference, half, branch=1, depth=9)).mean_score == 1.0
    )


def test_a_group_from_one_prefix() -> None:
    lock, turn = threading.Lock(), iter(range(4))

    def half_of_them(task: Task, box: Sandbox) -> None:
        with lock:
            good = next(turn) % 2
        if good:
            add_one(task, box)

    with Prepared(TWO) as prepared:
        found = evals.group(prepared, half_of_them, 4, prefix=add_one)
    assert sorted(found.scores) == [0.0, 0.0, 1.0, 1.0]
    assert [score * 2 - 1 for score in found.scores] == list(found.advantages)


# ---- report and command ------------------------------------------------------------------------------------------


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("href", "src")]


def test_the_report_needs_nothing_else(tmp_path: Path) -> None:
    def harmful(task: Task, box: Sandbox) -> None:
        raise RuntimeError("<script>alert(1)</script>")

    evals.evaluate([TWO], harmful, out=tmp_path, k=2)
    text = (tmp_path / "report.html").read_text()
    page = _Page()
    page.feed(text)
    assert "script" not in page.tags
    assert "two" not in page.tags
    assert "&lt;script&gt;" in text
    assert len(page.links) == 2
    assert all(link.startswith("#") and f'id="{link[1:]}"' in text for link in page.links)


Command = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def command(tmp_path: Path) -> Command:
    """`command(*arguments)`: runs `sandbox-gym eval` in `tmp_path`, which has tasks.jsonl and policies.py."""
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task.to_json()) + "\n" for task in (ONE, TWO)))
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
    assert "2 without (errors)" in ran.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["no.jsonl", "--policy", "policies:touch"], "no such data set"),
        (["tasks.jsonl", "--policy", "policies:nothing"], "module policies has no nothing"),
        (["tasks.jsonl", "--policy", "policies"], "is named module:function"),
        (["tasks.jsonl", "--policy", "policies:touch", "-k", "0"], "k and workers are 1 or more"),
    ],
)
def test_the_command_says_what_is_wrong(arguments: list[str], said: str, command: Command) -> None:
    ran = command(*arguments)
    assert ran.returncode == 2
    assert said in ran.stderr
    assert "Traceback" not in ran.stderr


def test_policies_by_name() -> None:
    assert find("sandbox_gym.evals:reference") is evals.reference
    with pytest.raises(ValueError, match="No module named 'no_such_module'"):
        find("no_such_module:a")
    with pytest.raises(ValueError, match="not a function"):
        find("sandbox_gym.tasks:PROTECTED")
