"""RepoRepair: generated tasks, and what four answers to each are worth, each in a fork of its own, on all cores; and
the same by `docker run` for each.

python -m benchmarks.repair [--quick] [--json FILE]

The answers: what mends the package; nothing; tests written over, with a plugin that lets all pass; an edit by
chance, out of the task's menu, which is the baseline. A full run writes the table of docs/repo-repair.md.
"""

from __future__ import annotations

import math
import os
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from benchmarks import _backends_docker
from benchmarks._repair_docker import Bare, Container
from benchmarks._report import Row, main, progress
from sandbox_gym.envs.repo_repair import Solution, generate
from sandbox_gym.envs.repo_repair.packages import PACKAGES
from sandbox_gym.sandbox import Sandbox
from sandbox_gym.tasks import Prepared, Task

TABLE = Path(__file__).resolve().parent.parent / "docs" / "repo-repair.md"
MARKS = "<!-- benchmarks/repair.py writes this table -->", "<!-- its end -->"
Ready = TypeVar("Ready", Prepared, Bare)
LET_ALL_PASS = """import pytest
@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item):
    item.obj = lambda: None
"""

Box = Sandbox | Container


def nothing(box: Box, task: Task, solution: Solution) -> None:
    pass


def reference(box: Box, task: Task, solution: Solution) -> None:
    apply(box, task, solution.patch)


def edited_tests(box: Box, task: Task, solution: Solution) -> None:
    for path in task.hidden:
        if path.endswith(".py"):
            box.write_file(task.path(path), "def test_nothing():\n    pass\n")
    box.write_file(task.path("conftest.py"), LET_ALL_PASS)
    box.write_file(task.path("pytest.ini"), "[pytest]\naddopts = --collect-only\n")


def random_edit(box: Box, task: Task, solution: Solution) -> None:
    edit = random.Random(task.id).choice(solution.menu)
    path = task.path(edit.path)
    box.write_file(path, edit.apply(box.read_text(path)))


def apply(box: Box, task: Task, patch: str) -> None:
    result = box.exec(["git", "apply", "-"], 30.0, cwd=task.workdir, stdin=patch.encode())
    assert result.ok, result.stderr


ANSWERS: dict[str, Callable[[Box, Task, Solution], None]] = {
    "reference": reference,
    "empty": nothing,
    "test-editing": edited_tests,
    "random edit": random_edit,
}


def make(n: int, packages: Sequence[str]) -> Iterator[tuple[Task, Solution]]:
    for task, solution in generate(n, packages=packages):
        progress(f"made {task.id}: {solution.kind} in {solution.function}")
        yield task, solution


def attempt(prepared: Prepared, solution: Solution, answer: str) -> tuple[float, float]:
    """Score, and seconds from fork to verdict."""
    start = time.perf_counter()
    with prepared.start() as box:
        ANSWERS[answer](box, prepared.task, solution)
        score = prepared.grade(box).score
    return score, time.perf_counter() - start


def attempt_by_docker(bare: Bare, solution: Solution, answer: str) -> tuple[float, float]:
    return bare.attempt(lambda box: ANSWERS[answer](box, bare.task, solution))


@dataclass(frozen=True)
class Evaluation:
    """Of every task: each answer's score and seconds. `wall` and `cores` at work are those of the attempts alone."""

    results: list[dict[str, tuple[float, float]]]
    setting_up: float
    wall: float
    cores: float


def evaluate(
    made: Sequence[tuple[Task, Solution]],
    prepare: Callable[[Task], Ready],
    attempt: Callable[[Ready, Solution, str], tuple[float, float]],
) -> Evaluation:
    """Every task is set up once, then every answer tried apart from the others, as many at once as there are cores."""
    with ExitStack() as stack, ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        start = time.perf_counter()
        ready = [stack.enter_context(one) for one in pool.map(prepare, [task for task, _ in made])]
        setting_up = time.perf_counter() - start
        start, worked = time.perf_counter(), busy()
        tries = [
            {answer: pool.submit(attempt, one, solution, answer) for answer in ANSWERS}
            for one, (_, solution) in zip(ready, made)
        ]
        results = []
        for (task, _), attempts in zip(made, tries):
            results.append({answer: future.result() for answer, future in attempts.items()})
            progress(f"judged {task.id}: { ({answer: score for answer, (score, _) in results[-1].items()}) }")
        wall = time.perf_counter() - start
        return Evaluation(results, setting_up, wall, (busy() - worked) / wall)


def busy() -> float:
    """Seconds of processor time that all cores have worked since the machine started."""
    user, nice, system, _, _, irq, softirq, *_ = map(
        int, Path("/proc/stat").read_text().split("\n")[0].split()[1:]
    )
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def run(quick: bool) -> list[Row]:
    n, packages = (4, ["inflection", "webcolors"]) if quick else (30, list(PACKAGES))
    start = time.perf_counter()
    made = list(make(n, packages))
    making = time.perf_counter() - start
    untouched: dict[str, float] = {task.id: math.nan for task, _ in made}

    def prepare(task: Task) -> Prepared:
        prepared = Prepared(task)
        untouched[task.id] = prepared.untouched.score
        return prepared

    ours = evaluate(made, prepare, attempt)
    with _backends_docker.daemon(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a disk's limit
        theirs = evaluate(made, Bare, attempt_by_docker)
    if not quick:
        write_table(made, list(untouched.values()), ours, theirs)
    return [
        *scores(made, list(untouched.values()), n, 2 if quick else 5, ours),
        *times(making / len(made), ours, theirs),
    ]


def scores(
    made: Sequence[tuple[Task, Solution]], untouched: Sequence[float], n: int, packages: int, ours: Evaluation
) -> list[Row]:
    def share(metric: str, passed: Sequence[bool]) -> Row:
        return Row(metric, sum(passed), "tasks", "of", len(made), bar=1.0, more_is_better=True)

    found = {answer: [results[answer][0] for results in ours.results] for answer in ANSWERS}
    known = {solution.package for _, solution in made}
    return [
        Row("tasks made", len(made), "tasks", "wanted", n, bar=1.0, more_is_better=True),
        Row("of packages", len(known), "packages", "wanted", packages, bar=1.0, more_is_better=True),
        share("reference patch passes", [score == 1 for score in found["reference"]]),
        share("broken state fails", [score == 0 for score in untouched]),
        share("empty answer scores 0", [score == 0 for score in found["empty"]]),
        share("test-editing answer scores 0", [score == 0 for score in found["test-editing"]]),
        Row("baseline: score of a random edit", statistics.mean(found["random edit"]), ""),
    ]


def times(making: float, ours: Evaluation, theirs: Evaluation) -> list[Row]:
    alike = [
        [score for score, _ in mine.values()] == [score for score, _ in others.values()]
        for mine, others in zip(ours.results, theirs.results)
    ]
    attempts = len(alike) * len(ANSWERS)
    return [
        Row("making a task", making, "s"),
        Row("setting the tasks up", ours.setting_up, "s", "as images of docker", theirs.setting_up),
        Row(
            f"eval of {len(alike)} x {len(ANSWERS)} forks",
            ours.wall,
            "s",
            "two `docker run` each",
            theirs.wall,
        ),
        Row("an attempt of it", ours.wall / attempts, "s", "two `docker run`", theirs.wall / attempts),
        Row("cores at work meanwhile", ours.cores, "cores", "cores", os.cpu_count() or 1, 0.9, True),
        Row("tasks with the same scores by docker", sum(alike), "tasks", "of", len(alike), 1.0, True),
    ]


def write_table(
    made: Sequence[tuple[Task, Solution]], untouched: Sequence[float], ours: Evaluation, theirs: Evaluation
) -> None:
    head = [
        *("package", "version", "its tests", "tasks", "reference passes", "broken fails", "empty 0"),
        *("test-editing 0", "random edit", "seconds an attempt", "with two `docker run`"),
    ]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for name in dict.fromkeys(solution.package for _, solution in made):
        rows = [row for row, (_, solution) in enumerate(made) if solution.package == name]
        task = made[rows[0]][0]
        found = {answer: [ours.results[row][answer][0] for row in rows] for answer in ANSWERS}
        cells = (
            *(name, PACKAGES[name].version, len(task.fail_to_pass) + len(task.pass_to_pass), len(rows)),
            sum(score == 1 for score in found["reference"]),
            sum(untouched[row] == 0 for row in rows),
            *(sum(score == 0 for score in found[answer]) for answer in ("empty", "test-editing")),
            f"{statistics.mean(found['random edit']):.2f}",
            *(f"{median_seconds(evaluation, rows):.1f}" for evaluation in (ours, theirs)),
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    took = (
        f"The {len(made)} x {len(ANSWERS)} attempts took {ours.wall:.0f} s in forks, on {ours.cores:.1f} of "
        f"{os.cpu_count()} cores, and {theirs.wall:.0f} s with two `docker run` each; setting the tasks up before took "
        f"{ours.setting_up:.0f} s, and {theirs.setting_up:.0f} s as images of docker."
    )
    lines += ["", took]
    text = TABLE.read_text()
    before, rest = text.split(MARKS[0])
    TABLE.write_text(f"{before}{MARKS[0]}\n" + "\n".join(lines) + f"\n{MARKS[1]}{rest.split(MARKS[1])[1]}")
    print(f"wrote {TABLE}", file=sys.stderr)


def median_seconds(evaluation: Evaluation, rows: Sequence[int]) -> float:
    return statistics.median(took for row in rows for _, took in evaluation.results[row].values())


if __name__ == "__main__":
    main(__doc__, run)
