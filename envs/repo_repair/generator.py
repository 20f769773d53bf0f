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
    found = [
        edit
        for path, data in source.shown.items()
        if path.endswith(".py")
        for edit in edits(path, data.decode())
    ]
    order = shuffled(found, random.Random(f"{seed} {source.package.title}"))[: _TRIES * count]
    prepared, stable = suite.prepare(source, backend=backend)
    with prepared:
        tries = _Tries(source, prepared, stable, backend, f"{source.package.name}-{seed}")
        done = 0
        for made in tries.run(order):
            yield made
            done += 1
            if done == count:
                return
    raise SandboxError(
        f"{source.package.title} gave {done} tasks of {count} in {len(order)} tries: ask for fewer (--n), or of more "
        "packages (--packages)"
    )


@dataclass(frozen=True)
class _Tries:
    """Edits of one package, tried: `stable` are the tests that pass in the unharmed one. Thread-safe."""

    source: Source
    prepared: Prepared
    stable: Sequence[str]
    backend: str
    name: str

    def run(self, order: Sequence[Edit]) -> Iterator[tuple[Task, Solution]]:
        """The tasks that they make, in their order, however many are tried side by side."""
        workers = os.cpu_count() or 1
        tries: list[Future[tuple[Task, Solution] | None]] = []
        with ThreadPoolExecutor(workers) as pool:
            try:
                for place in range(len(order)):
                    for edit in order[len(tries) : place + workers]:
                        tries.append(pool.submit(self._try, edit, f"{self.name}-{len(tries)}"))
                    made = tries[place].result()
                    if made is not None:
                        yield made
            finally:
                for future in tries:
                    future.cancel()

    def _try(self, edit: Edit, id: str) -> tuple[Task, Solution] | None:
        """None when the edit changes nothing, or no test fails, or very many, or not the same ones each time."""
        whole = self.source.shown[edit.path].decode()
        if not changes(edit, whole):
            return None
        try:
            found = self._failing(edit.path, edit.apply(whole))
            if found is None or not 1 <= len(found[0]) <= max(3, _MOST_FAILING * len(self.stable)):
                return None
            told = suite.report(self.source.package, found[1], found[0])
            task, solution = _made(self.source, self.stable, edit, found[0], told, id)
            return (task, solution) if "```" in told and self._proves(task, solution) else None
        except (SandboxDied, SandboxTimeout, LimitExceeded):  # it hung, or ran out of memory: no task
            return None

    def _failing(self, path: str, broken: str) -> tuple[tuple[str, ...], Verdict] | None:
        """Which tests fail with a broken file; None when it can't be imported, or they don't all run."""
        task, package = self.prepared.task, self.source.package
        with self.prepared.start() as box:
            box.write_file(task.path(path), broken)
            place = {"PYTHONPATH": task.path(package.source)}
            if not box.exec(["python", "-c", f"import {package.name}"], 60.0, cwd="/", env=place).ok:
                return None
            verdict = self.prepared.grade(box)
        if verdict.flags or not set(self.stable) <= set(verdict.tests):
            return None
        return tuple(test for test in self.stable if verdict.tests[test] != "passed"), verdict

    def _proves(self, task: Task, solution: Solution) -> bool:
        """Whether the finished task fails as it was found to, and its patch solves it."""
        with Prepared(task, backend=self.backend) as ready, ready.start() as box:
            failed = set(self.stable) - suite.passed(ready.untouched.tests)
            patched = box.exec(["git", "apply", "-"], 60.0, cwd=task.workdir, stdin=solution.patch.encode())
            return failed == set(task.fail_to_pass) and patched.ok and ready.grade(box).solved


def _made(
    source: Source, stable: Sequence[str], bug: Edit, failed: tuple[str, ...], told: str, id: str
) -> tuple[Task, Solution]:
    whole = source.shown[bug.path].decode()
    broken = bug.apply(whole)
    task = suite.task(
        replace(source, shown={**source.shown, bug.path: broken.encode()}),
        id,
        prompt=told,
        fail_to_pass=failed,
        pass_to_pass=tuple(test for test in stable if test not in failed),
    )
    menu, answer = _menu(bug, broken, random.Random(id))
    package = source.package
    patch = patch_of(bug.path, broken, whole)
    place = (bug.kind, bug.path, bug.function)
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
