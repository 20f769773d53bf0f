"""Small edits of a program's text."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest

from sandbox_gym.envs.repo_repair.edits import Edit, changes, edits, shuffled
from sandbox_gym.envs.repo_repair.generator import patch_of

PROGRAM = '''"""Größe: bytes and characters differ here."""
LIMIT = 3 + 4


def count(items, start=1, *, strict=False):
    """Counts."""
    total = start  # ü
    for item in items:
        if not item or len(items) > 10:
            continue
        if strict and item not in (1, 2):
            raise ValueError(f"{item + 1} is not { 1 if strict else 2 }")
        total += item % 3
    return total - 1


class Store:
    size: int = 5 + 6

    def get(self, name, default):
        self.seen.append(name)
        names = self.names[: self.size]
        return self.find(name, default) if names else None

    def __repr__(self):
        return "Store" * (1 + 1)
'''


@pytest.fixture(scope="module")
def found() -> list[Edit]:
    return edits("store.py", PROGRAM)


def _lines_changed(edit: Edit) -> tuple[str, str]:
    before, after = PROGRAM.splitlines(), edit.apply(PROGRAM).splitlines()
    place = next(i for i, pair in enumerate(zip(before, after)) if pair[0] != pair[1])
    return before[place].strip(), after[place].strip()


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        ("comparison", "if not item or len(items) > 10:", "if not item or len(items) >= 10:"),
        ("comparison", "if strict and item not in (1, 2):", "if strict and item in (1, 2):"),
        ("arithmetic", "total += item % 3", "total += item // 3"),
        ("arithmetic", "total += item % 3", "total -= item % 3"),
        ("boolean", "if not item or len(items) > 10:", "if not item and len(items) > 10:"),
        ("negation", "if not item or len(items) > 10:", "if item or len(items) > 10:"),
        (
            "negation",
            "return self.find(name, default) if names else None",
            "return self.find(name, default) if not names else None",
        ),
        ("constant", "return total - 1", "return total - 2"),
        (
            "constant",
            "def count(items, start=1, *, strict=False):",
            "def count(items, start=1, *, strict=True):",
        ),
        ("off by one", "names = self.names[: self.size]", "names = self.names[: self.size - 1]"),
        (
            "swapped arguments",
            "return self.find(name, default) if names else None",
            "return self.find(default, name) if names else None",
        ),
        ("dropped statement", "self.seen.append(name)", "pass"),
        ("early end", "continue", "break"),
        ("early end", "return total - 1", "break"),  # a line more, after the loop's last
    ],
)
def test_each_kind(found: list[Edit], kind: str, before: str, after: str) -> None:
    assert (before, after) in [_lines_changed(edit) for edit in found if edit.kind == kind]


def test_every_edit_can_be_taken_back(found: list[Edit]) -> None:
    assert len(found) > 25
    for edit in found:
        assert edit.apply(PROGRAM) != PROGRAM
        assert edit.back().apply(edit.apply(PROGRAM)) == PROGRAM


def test_only_functions_and_not_their_messages(found: list[Edit]) -> None:
    assert {edit.function for edit in found} == {"count", "Store.get"}
    untouched = [
        line for line in PROGRAM.splitlines() if "raise" in line or "LIMIT" in line or "size: int" in line
    ]
    assert len(untouched) == 3
    assert all(line in edit.apply(PROGRAM).splitlines() for edit in found for line in untouched)


def test_an_edit_that_is_none_is_told(found: list[Edit]) -> None:
    assert all(changes(edit, PROGRAM) for edit in found)
    spaces = Edit("store.py", "count", "constant", 0, 0, "", "\n")
    broken = Edit("store.py", "count", "constant", 0, 0, "", "(")
    assert not changes(spaces, PROGRAM)
    assert not changes(broken, PROGRAM)


def test_an_order_of_chance_goes_through_functions_and_kinds(found: list[Edit]) -> None:
    order = shuffled(found, random.Random(1))
    assert order == shuffled(found, random.Random(1)) != shuffled(found, random.Random(2))
    assert sorted(order, key=repr) == sorted(found, key=repr)
    assert {edit.function for edit in order[:2]} == {"count", "Store.get"}
    most = max(len([edit for edit in order[:12] if edit.kind == kind]) for kind in {e.kind for e in found})
    assert most <= 4


@pytest.mark.parametrize("end", ["", "\n", "\n\n"])
@pytest.mark.parametrize("place", [0, 5, 9])
def test_a_patch_is_one_for_git(tmp_path: Path, end: str, place: int) -> None:
    lines = [f"line {i}\x0c ü" for i in range(10)]
    before = "\n".join(lines) + end
    after = "\n".join([*lines[:place], "changed", *lines[place + 1 :]]) + end
    (tmp_path / "a.txt").write_text(before)
    command = ["git", "apply", "-"]
    patch = patch_of("a.txt", before, after)
    subprocess.run(command, input=patch.encode(), cwd=tmp_path, check=True, timeout=30)
    assert (tmp_path / "a.txt").read_text() == after
