"""Tasks that are prepared once for all tests, and the proof after each test that it gave back what it took."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sandbox_gym.backends import lookup
from sandbox_gym.tasks import Prepared, Task

DOUBLE = Task(
    id="double",
    prompt="Make double(x) in calc.py return x + x.",
    files={"calc.py": "def double(x):\n    return x\n"},
    hidden={"check.py": "import calc\nassert calc.double(2) == 4\n"},
    check="python check.py",
    check_timeout=30.0,
    solution="sed -i 's/return x/return x + x/' calc.py",
    memory="512Mi",
    disk="512Mi",
)


@pytest.fixture(scope="session")
def prepared() -> Iterator[Callable[[Task], Prepared]]:
    """`prepared(task)`: made at most once for a task."""
    made: dict[str, Prepared] = {}

    def get(task: Task) -> Prepared:
        if task.digest not in made:
            made[task.digest] = Prepared(task)
        return made[task.digest]

    yield get
    for each in made.values():
        each.close()


@pytest.fixture
def double(prepared: Callable[[Task], Prepared]) -> Prepared:
    """A task whose check is a plain script."""
    return prepared(DOUBLE)


def _running() -> list[Any]:
    return sorted(row["id"] for row in lookup.get("native").list() if row["state"] == "running")


@pytest.fixture(autouse=True)
def no_sandbox_left() -> Iterator[None]:
    before = _running()
    yield
    deadline = time.monotonic() + 3.0
    while (after := _running()) != before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert after == before
