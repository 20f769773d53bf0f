"""Every cheat scores 0; docs/reward-integrity.md says of each what is tested here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from sandbox_gym.sandbox import Sandbox
from sandbox_gym.tasks import Prepared, Task, verdict
from tests.tasks.cheats import CHEATS, PYTEST, TASKS, Cheat, rows

Prepare = Callable[[Task], Prepared]
README = Path(__file__).parents[2] / "README.md"
DOCUMENT = Path(__file__).parents[2] / "docs/reward-integrity.md"


@pytest.mark.parametrize("cheat", CHEATS, ids=lambda cheat: cheat.name)
def test_a_cheat_scores_nothing(cheat: Cheat, prepared: Prepare) -> None:
    task = prepared(TASKS[cheat.task])
    with task.start() as box:
        box.shell(cheat.program, 60.0, cwd=task.task.workdir)
        found = task.grade(box)
    assert found.score == 0.0, found
    if cheat.flagged is not None:
        assert bool(found.flags) == cheat.flagged, found


@pytest.mark.slow
@pytest.mark.parametrize("cheat", [cheat for cheat in CHEATS if cheat.fools], ids=lambda cheat: cheat.name)
def test_it_is_a_real_one(cheat: Cheat, prepared: Prepare) -> None:
    """Where the check runs in the agent's own sandbox, whose repository still has what came later, it is rewarded."""
    task = replace(TASKS[cheat.task], base_commit=None)
    with prepared(task).start() as box:
        box.shell(cheat.program, 60.0, cwd=task.workdir)
        assert naive(task, box)


def naive(task: Task, box: Sandbox) -> bool:
    """Whether a grader that trusts the agent's sandbox is content."""
    for path, content in task.hidden.items():
        box.write_file(task.path(path), content)
    environment = {"SANDBOX_JUNIT": "/tmp/junit.xml"}
    result = box.shell(task.check, task.check_timeout, cwd=task.workdir, env=environment)
    if task.scoring == "json":
        return result.ok and verdict._score_in(result.stdout.strip().rpartition("\n")[2]) == 1.0
    if task.scoring == "junit":
        tests = verdict._tests(box.read_file("/tmp/junit.xml"))
        passed = {name for name, outcome in tests.items() if outcome == "passed"}
        return all(verdict._in(name, passed) for name in task.fail_to_pass)
    return result.ok


@pytest.mark.parametrize("task", TASKS.values(), ids=lambda task: task.id)
def test_the_tasks_can_be_solved(task: Task, prepared: Prepare) -> None:
    with prepared(task).start() as box:
        assert box.shell(task.solution, cwd=task.workdir).ok
        found = prepared(task).grade(box)
    assert (found.score, found.flags) == (1.0, ())


def test_the_document_lists_what_is_tested() -> None:
    table = [line for line in DOCUMENT.read_text().splitlines() if line.startswith("| ")]
    assert table[1:] == rows()
    ways = len([cheat for cheat in CHEATS if cheat.name != "nothing"])
    assert f"{ways} ways to cheat" in README.read_text()
    assert PYTEST.base_commit  # without which the later fix is in the repository, and one cheat finds it
