"""Tasks out of packages: one small edit each, that the package's tests notice and its import does not."""

from __future__ import annotations

import difflib
import itertools
import os
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

from sandbox_gym.errors import LimitExceeded, SandboxDied, SandboxError, SandboxTimeout
from sandbox_gym.tasks import Prepared, Task, Verdict

from . import packages as archives
from . import suite
from .edits import Edit, changes, edits, shuffled
from .packages import PACKAGES, Source

_TRIES = 25  # edits tried for each task of a package
_MOST_FAILING = 0.2  # of a package's tests: more than that is no subtle bug
_MENU = 16


@dataclass(frozen=True)
class Solution:
    """What an agent must never see. `patch`: mends the task's package (`git apply`). `menu`: edits of the broken file,
    of which the one at `answer` takes the bug back.
    """

    id: str
    package: str
    version: str
    kind: str
    path: str
    function: str
    patch: str
    menu: tuple[Edit, ...]
    answer: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(record: dict[str, Any]) -> Solution:
        return Solution(**{**record, "menu": tuple(Edit(**edit) for edit in record["menu"])})


@dataclass(frozen=True)
class Bug:
    edit: Edit
    failed: tuple[str, ...]
    report: str


def generate(
    n: int, seed: int = 0, *, packages: Sequence[str] | None = None, backend: str = "native"
) -> Iterator[tuple[Task, Solution]]:
    """`n` tasks, shared out evenly among the packages, in their order: the same ones for the same seed.

    Their archives are fetched where they are missing. Each task's lists of tests come from runs of its broken and its
    whole package. Raises SandboxError where the packages don't give so many; ValueError for an unknown package.
    """
    if n < 1:
        raise ValueError(f"a number of tasks from 1 is wanted, not {n}")
    chosen = archives.choose(PACKAGES if packages is None else packages)
    archives.fetch(chosen[:n])
    for place, package in enumerate(chosen[:n]):
        count = n // len(chosen) + (place < n % len(chosen))
        yield from _of_package(archives.read(package), count, seed, backend)


def _of_package(source: Source, count: int, seed: int, backend: str) -> Iterator[tuple[Task, Solution]]:
    rng = random.Random(f"{seed} {source.package.title}")
    found = [
        edit
        for path, data in source.shown.items()
        if path.endswith(".py")
        for edit in edits(path, data.decode())
    ]
    order = shuffled(found, rng)[: _TRIES * count]
    prepared, stable = suite.prepare(source, backend=backend)
    with prepared:
        made = 0
        for bug in _bugs(source, prepared, stable, order):
            yield _made(source, stable, bug, f"{source.package.name}-{seed}-{made}")
            made += 1
            if made == count:
                return
    raise SandboxError(
        f"{source.package.title} gave {made} tasks of {count} in {len(order)} tries: ask for fewer (--n), or of more "
        "packages (--packages)"
    )


def _bugs(source: Source, prepared: Prepared, stable: Sequence[str], order: Sequence[Edit]) -> Iterator[Bug]:
    """The edits that make good bugs, in their order, however many are tried side by side."""
    workers = os.cpu_count() or 1
    tries: list[Future[Bug | None]] = []
    with ThreadPoolExecutor(workers) as pool:
        try:
            for place in range(len(order)):
                for edit in order[len(tries) : place + workers]:
                    tries.append(pool.submit(_try, source, prepared, stable, edit))
                bug = tries[place].result()
                if bug is not None:
                    yield bug
        finally:
            for future in tries:
                future.cancel()


def _try(source: Source, prepared: Prepared, stable: Sequence[str], edit: Edit) -> Bug | None:
    """None when the edit changes nothing, or no test fails, or very many, or not the same ones each time."""
    whole = source.shown[edit.path].decode()
    if not changes(edit, whole):
        return None
    broken = edit.apply(whole)
    try:
        first = _failing(source, prepared, stable, edit.path, broken)
        if first is None or not 1 <= len(first[0]) <= max(3, _MOST_FAILING * len(stable)):
            return None
        second = _failing(source, prepared, stable, edit.path, broken)
    except (SandboxDied, SandboxTimeout, LimitExceeded):  # it hung, or ran out of memory: no task
        return None
    if second is None or first[0] != second[0]:
        return None
    told = suite.report(source.package, first[1], first[0])
    return Bug(edit, first[0], told) if "```" in told else None


def _failing(
    source: Source, prepared: Prepared, stable: Sequence[str], path: str, broken: str
) -> tuple[tuple[str, ...], Verdict] | None:
    """Which tests fail with a broken file; None when it can't be imported, or they don't all run."""
    task = prepared.task
    with prepared.start() as box:
        box.write_file(task.path(path), broken)
        place = {"PYTHONPATH": task.path(source.package.source)}
        if not box.exec(["python", "-c", f"import {source.package.name}"], 60.0, cwd="/", env=place).ok:
            return None
        verdict = prepared.grade(box)
    if verdict.flags or not set(stable) <= set(verdict.tests):
        return None
    return tuple(test for test in stable if verdict.tests[test] != "passed"), verdict


def _made(source: Source, stable: Sequence[str], bug: Bug, id: str) -> tuple[Task, Solution]:
    whole = source.shown[bug.edit.path].decode()
    broken = bug.edit.apply(whole)
    shown = {**source.shown, bug.edit.path: broken.encode()}
    task = suite.task(
        replace(source, shown=shown),
        id,
        prompt=bug.report,
        fail_to_pass=bug.failed,
        pass_to_pass=tuple(test for test in stable if test not in bug.failed),
    )
    menu, answer = _menu(bug.edit, broken, random.Random(id))
    package = source.package
    place = (bug.edit.kind, bug.edit.path, bug.edit.function)
    patch = patch_of(bug.edit.path, broken, whole)
    return task, Solution(id, package.name, package.version, *place, patch, menu, answer)


def _menu(bug: Edit, broken: str, rng: random.Random) -> tuple[tuple[Edit, ...], int]:
    """Edits of the function that has the bug, then of the rest of its file, up to a number; and which one mends it."""
    fix = bug.back()
    fixed = fix.apply(broken)
    others = edits(bug.path, broken)
    rng.shuffle(others)
    others.sort(key=lambda edit: edit.function != bug.function)
    wrong = (edit for edit in others if changes(edit, broken) and edit.apply(broken) != fixed)
    menu = list(itertools.islice(wrong, _MENU - 1))
    answer = rng.randrange(len(menu) + 1)
    return (*menu[:answer], fix, *menu[answer:]), answer


def patch_of(path: str, before: str, after: str) -> str:
    """From one text of a file to another, as `git apply` takes it."""
    lines = difflib.unified_diff(_lines(before), _lines(after), f"a/{path}", f"b/{path}")
    return "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
    )


def _lines(text: str) -> list[str]:
    """By line feeds alone: other characters that end lines for Python don't for git."""
    parts = text.split("\n")
    return (
        [*(f"{part}\n" for part in parts[:-1]), *parts[-1:]]
        if parts[-1]
        else [f"{part}\n" for part in parts[:-1]]
    )
