"""RepoRepair: generated tasks, and what four answers to each are worth, each in a fork of its own, on all cores.

python -m benchmarks.repair [--quick] [--json FILE]

The answers: what mends the package; nothing; tests written over, with a plugin that lets all pass; an edit by
chance, out of the task's menu, which is the baseline. A full run writes the table of docs/repo-repair.md.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks._report import Row, main, progress
from sandbox_gym.envs.repo_repair import Solution, generate
from sandbox_gym.envs.repo_repair.packages import PACKAGES
from sandbox_gym.sandbox import Sandbox
from sandbox_gym.tasks import Prepared, Task

TABLE = Path(__file__).resolve().parent.parent / "docs" / "repo-repair.md"
MARKS = "<!-- benchmarks/repair.py writes this table -->", "<!-- its end -->"
LET_ALL_PASS = """import pytest
@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item):
    item.obj = lambda: None
"""


@dataclass(frozen=True)
class Outcome:
    """Of one task: the score untouched, that of each answer, and the seconds that an attempt took, in the median."""

    package: str
    untouched: float
    scores: dict[str, float]
    seconds: float


def nothing(box: Sandbox, task: Task, solution: Solution) -> None:
    pass


def reference(box: Sandbox, task: Task, solution: Solution) -> None:
    apply(box, task, solution.patch)


def edited_tests(box: Sandbox, task: Task, solution: Solution) -> None:
    for path in task.hidden:
        if path.endswith(".py"):
            box.write_file(task.path(path), "def test_nothing():\n    pass\n")
    box.write_file(task.path("conftest.py"), LET_ALL_PASS)
    box.write_file(task.path("pytest.ini"), "[pytest]\naddopts = --collect-only\n")


def random_edit(box: Sandbox, task: Task, solution: Solution) -> None:
    edit = random.Random(task.id).choice(solution.menu)
    path = task.path(edit.path)
    box.write_file(path, edit.apply(box.read_text(path)))


def apply(box: Sandbox, task: Task, patch: str) -> None:
    result = box.exec(["git", "apply", "-"], 30.0, cwd=task.workdir, stdin=patch.encode())
    assert result.ok, result.stderr


ANSWERS: dict[str, Callable[[Sandbox, Task, Solution], None]] = {
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


def evaluate(made: Sequence[tuple[Task, Solution]]) -> list[Outcome]:
    """Every task set up and proven once, every answer in a fork, as many at once as there are cores."""
    outcomes = []
    with ExitStack() as stack, ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        ready = [stack.enter_context(prepared) for prepared in pool.map(Prepared, [task for task, _ in made])]
        tries = [
            {answer: pool.submit(attempt, prepared, solution, answer) for answer in ANSWERS}
            for prepared, (_, solution) in zip(ready, made)
        ]
        for prepared, (_, solution), attempts in zip(ready, made, tries):
            results = {answer: future.result() for answer, future in attempts.items()}
            scores = {answer: score for answer, (score, _) in results.items()}
            seconds = statistics.median(took for _, took in results.values())
            outcomes.append(Outcome(solution.package, prepared.untouched.score, scores, seconds))
            progress(f"judged {prepared.task.id}: {scores}")
    return outcomes


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
    start, worked = time.perf_counter(), busy()
    outcomes = evaluate(made)
    wall, worked = time.perf_counter() - start, busy() - worked
    if not quick:
        write_table(made, outcomes)

    def share(metric: str, count: int) -> Row:
        return Row(metric, count, "tasks", "of", len(made), bar=1.0, more_is_better=True)

    cores = os.cpu_count() or 1
    attempts = len(outcomes) * len(ANSWERS)
    return [
        Row("tasks made", len(made), "tasks", "wanted", n, bar=1.0, more_is_better=True),
        Row(
            "of packages",
            len({o.package for o in outcomes}),
            "packages",
            "wanted",
            2 if quick else 5,
            1.0,
            True,
        ),
        share("reference patch passes", sum(o.scores["reference"] == 1 for o in outcomes)),
        share("broken state fails", sum(o.untouched == 0 for o in outcomes)),
        share("empty answer scores 0", sum(o.scores["empty"] == 0 for o in outcomes)),
        share("test-editing answer scores 0", sum(o.scores["test-editing"] == 0 for o in outcomes)),
        Row(
            "baseline: score of a random edit", statistics.mean(o.scores["random edit"] for o in outcomes), ""
        ),
        Row("making a task", making / len(made), "s"),
        Row(f"eval of {len(outcomes)} x {len(ANSWERS)} forks", wall, "s"),
        Row("an attempt of it", wall / attempts, "s"),
        Row("cores at work meanwhile", worked / wall, "cores", "cores", cores, bar=0.9, more_is_better=True),
    ]


def write_table(made: Sequence[tuple[Task, Solution]], outcomes: Sequence[Outcome]) -> None:
    head = [
        *("package", "version", "its tests", "tasks", "reference passes", "broken fails", "empty 0"),
        *("test-editing 0", "seconds an attempt"),
    ]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for name in dict.fromkeys(o.package for o in outcomes):
        some = [o for o in outcomes if o.package == name]
        task = next(task for task, solution in made if solution.package == name)
        columns = (
            sum(o.scores["reference"] == 1 for o in some),
            sum(o.untouched == 0 for o in some),
            sum(o.scores["empty"] == 0 for o in some),
            sum(o.scores["test-editing"] == 0 for o in some),
        )
        tests = len(task.fail_to_pass) + len(task.pass_to_pass)
        cells = (name, PACKAGES[name].version, tests, len(some), *columns)
        lines.append(f"| {' | '.join(map(str, cells))} | {statistics.median(o.seconds for o in some):.1f} |")
    text = TABLE.read_text()
    before, rest = text.split(MARKS[0])
    TABLE.write_text(f"{before}{MARKS[0]}\n" + "\n".join(lines) + f"\n{MARKS[1]}{rest.split(MARKS[1])[1]}")
    print(f"wrote {TABLE}", file=sys.stderr)


if __name__ == "__main__":
    main(__doc__, run)
