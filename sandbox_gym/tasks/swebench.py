"""Rows of SWE-bench's and its like, as they come: a repository at a commit, a patch with tests, which have to pass."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sandbox_gym.errors import TaskError
from sandbox_gym.tasks.task import Task

_NEEDED = ("instance_id", "repo", "base_commit", "test_patch", "FAIL_TO_PASS")


def is_row(row: Mapping[str, Any]) -> bool:
    return "FAIL_TO_PASS" in row and "instance_id" in row


def task(row: Mapping[str, Any], repos: Path | None) -> Task:
    """A row's task. Of what SWE-bench itself does not have, `image`, `setup` (lines that install it) and `test_cmd`
    are taken where they are there; else the tests run by pytest, as the sandbox has it.

    Its score is the part of FAIL_TO_PASS that passes if all of PASS_TO_PASS do: "resolved" is a score of 1. Raises
    TaskError.
    """
    for name in _NEEDED:
        if name not in row:
            raise TaskError(f"field {name!r}: missing")
    patch = str(row["test_patch"])
    files = test_files(patch)
    check = row.get("test_cmd") or "python -m pytest -q"
    return Task(
        id=row["instance_id"],
        prompt=row.get("problem_statement") or "",
        image=row.get("image") or row.get("docker_image") or None,
        setup=row.get("setup") or (),
        repo=str(_repository(row["repo"], repos)),
        base_commit=row["base_commit"],
        test_patch=patch,
        check=f"{check} {' '.join(map(shlex.quote, files))}",
        scoring="junit",
        fail_to_pass=_tests(row, "FAIL_TO_PASS"),
        pass_to_pass=_tests(row, "PASS_TO_PASS"),
        check_timeout=float(row.get("check_timeout") or 600.0),
        solution=_solution(row.get("patch") or ""),
    )


def test_files(patch: str) -> list[str]:
    """The files of a patch that are there after it, and that pytest runs."""
    paths = [line[6:].split("\t")[0].strip() for line in patch.splitlines() if line.startswith("+++ b/")]
    names = [(path, path.rpartition("/")[2]) for path in paths]
    return [
        path
        for path, name in names
        if name.endswith("_test.py") or (name.startswith("test") and name.endswith(".py"))
    ]


def _tests(row: Mapping[str, Any], name: str) -> tuple[str, ...]:
    value = row.get(name) or []
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise TaskError(f"field {name!r}: text that is no JSON list") from None
    if not isinstance(value, (list, tuple)) or not all(isinstance(test, str) for test in value):
        raise TaskError(f"field {name!r}: a list of tests is wanted, or one as JSON")
    return tuple(value)


def _repository(repo: Any, repos: Path | None) -> Path:
    """Where it lies on this machine."""
    if not isinstance(repo, str) or ".." in Path(repo).parts:
        raise TaskError(f"field 'repo': {repo!r:.100} is no repository's name")
    if Path(repo).is_absolute() and repos is None:
        return Path(repo)
    names = [repo, repo.replace("/", "__"), repo.rpartition("/")[2]]
    for name in names:
        for place in (name, f"{name}.git"):
            if repos is not None and (repos / place).is_dir():
                return repos / place
    raise TaskError(
        f"field 'repo': {repo!r} is not in the folder of repositories: give load(..., repos=FOLDER) one "
        f"that has {' or '.join(names)}"
    )


def _solution(patch: str) -> str:
    return (
        f"git apply --whitespace=nowarn - <<'END_OF_PATCH'\n{patch.rstrip()}\n\nEND_OF_PATCH"
        if patch.strip()
        else ""
    )
