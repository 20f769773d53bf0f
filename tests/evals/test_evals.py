"""Evals: attempts, errors apart from 0, going on where one has stopped, the report."""

from __future__ import annotations

import json
import sys
import threading
import time
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from sandbox_gym import evals
from sandbox_gym.errors import BackendUnavailable, SandboxError
from sandbox_gym.evals import progress
from sandbox_gym.evals.attempts import Attempt
from sandbox_gym.evals.policies import advantages, find
from sandbox_gym.evals.summary import pass_at_k, summarize, wilson
from sandbox_gym.sandbox import Sandbox
from sandbox_gym.tasks import Prepared, Task

ONE = Task(id="one", check="test -e done", solution="touch done", prompt="<b>Do it</b>", check_timeout=20.0)
TWO = replace(
    ONE, id="two <two>", check="test $(cat count) -ge 2", setup=("echo 0 > count",), solution="echo 2 > count"
)


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


def test_a_summary_says_what_the_errors_are() -> None:
    said = ["B: \x1b[2J\nmore", "A: 1", "C", "A: 1", "D", "A: 1\nand more", "E"]
    attempts = [Attempt("a", "d", "p", i, "error", None, 1.0, error=error) for i, error in enumerate(said)]
    assert summarize("p", 1, attempts, 1.0).text().splitlines()[1:] == [
        "3 x A: 1",
        r"1 x B: \x1b[2J",
        "1 x C",
        "2 x other errors",
    ]


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
    assert (
        "TaskError: task broken: field 'setup': line 1, 'exit 3', ended with 3"
        in found.text().splitlines()[-1]
    )


@pytest.mark.parametrize(
    ("backend", "said"),
    [
        ("nope", r"no backend 'nope': choose from .*native"),
        ("docker:x", r"no docker daemon answers .*start one"),
    ],
)
def test_a_backend_that_is_not_there_is_refused_before_all_else(
    backend: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none")
    evals.evaluate([ONE], evals.reference, out=tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises((ValueError, BackendUnavailable), match=said):
        evals.evaluate([ONE], evals.reference, out=tmp_path, anew=True, backend=backend)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


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


def test_what_is_from_before_is_said_to_be(tmp_path: Path) -> None:
    first = evals.evaluate([ONE], evals.reference, k=2, out=tmp_path)
    page = (tmp_path / "report.html").read_text()
    again = evals.evaluate([ONE], evals.reference, k=2, out=tmp_path)
    assert (first.from_before, again.from_before) == (0, 2)
    assert again.rows == first.rows
    assert first.text().splitlines()[-1].startswith("2 attempts with a score, 0 without (errors), in ")
    assert again.text().splitlines()[-1].startswith("2 of them were taken from before, 0 were run now, in ")
    assert (tmp_path / "report.html").read_text() == page
    assert f"The attempts took {again.attempt_seconds:.1f} s" in page
    assert again.attempt_seconds == pytest.approx(
        sum(attempt.seconds + attempt.check_seconds for attempt in first.rows[0].attempts)
    )


def test_progress_counts_what_is_from_before(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = (Attempt("a", "d", "p", number, "graded", 1.0, 1.0) for number in range(2))
    with progress.shown(2, [old], True) as tick:
        tick(new)
    assert capsys.readouterr().err == "2 of 2 attempts, 2 solved, 0 errors\n"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress.shown(2, [old], True):
        pass
    bar = capsys.readouterr().err
    assert "1/2" in bar and "solved=1" in bar


def test_it_starts_over_when_told_to(tmp_path: Path) -> None:
    evals.evaluate([ONE, TWO], evals.reference, out=tmp_path, name="mine")
    with pytest.raises(SandboxError, match="or start it over with --anew"):
        evals.evaluate([ONE], evals.nothing, out=tmp_path, name="another")

    def looks(task: Task, box: Sandbox) -> None:
        assert not (tmp_path / "report.html").exists()

    found = evals.evaluate([ONE], looks, out=tmp_path, name="another", anew=True)
    assert (found.mean_score, found.from_before) == (0.0, 0)
    (line,) = (tmp_path / "results.jsonl").read_text().splitlines()
    assert json.loads(line)["policy"] == "another"


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


# ---- report ------------------------------------------------------------------------------------------------------


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


def test_policies_by_name() -> None:
    assert find("sandbox_gym.evals:reference") is evals.reference
    with pytest.raises(ValueError, match="No module named 'no_such_module'"):
        find("no_such_module:a")
    with pytest.raises(ValueError, match="not a function"):
        find("sandbox_gym.tasks:PROTECTED")
