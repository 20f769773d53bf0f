"""`RepoRepair-v0`: a package with a bug in it, to be mended; judged by the package's own tests."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from sandbox_gym.envs.task import TaskEnv
from sandbox_gym.errors import SandboxError
from sandbox_gym.tasks import Task

from .generator import Solution, generate, patch_of
from .packages import PACKAGES


class RepoRepairEnv(TaskEnv):
    """A `TaskEnv` over a task of `generate`: `task`, or the one that `seed` makes (the first time in some ten seconds).

    The workspace is the broken package, in a git repository of one commit; its tests are not there. The prompt tells
    what goes wrong. Submit, and the reward is the part of the failing tests that now pass, if all others still do.

    `menu=True`: an action is the number of an edit near the bug, of which one takes it back; the last two actions take
    all edits back, and submit. With a task of your own that needs its `solution` (a record of solutions.jsonl).
    `max_steps`: of an episode, in place of the task's.
    Other keywords are those of `TaskEnv`: with `menu=True, encode="flat"` both spaces are numeric.

    Raises what `TaskEnv` does, and SandboxError where no archive can be fetched, or no task made of it.
    """

    def __init__(
        self,
        task: Task | Mapping[str, Any] | None = None,
        *,
        seed: int | None = None,
        menu: bool = False,
        solution: Solution | Mapping[str, Any] | None = None,
        max_steps: int | None = None,
        **options: Any,
    ) -> None:
        if (task is None) == (seed is None):
            raise ValueError("give a task, or the seed= of one to make")
        if seed is not None:
            task, solution = made(seed)
        assert task is not None
        task = task if isinstance(task, Task) else Task.from_json(task)
        if max_steps is not None:
            task = dataclasses.replace(task, max_steps=max_steps)
        actions = None
        if menu:
            if solution is None:
                raise ValueError("a menu holds the task's own edits: give its solution= too")
            known = solution if isinstance(solution, Solution) else Solution.from_json(dict(solution))
            actions = menu_of(task, known)
        super().__init__(task, menu=actions, **options)


@lru_cache(maxsize=64)
def made(seed: int) -> tuple[Task, Solution]:
    """The task of a seed: the packages take turns."""
    names = list(PACKAGES)
    return next(generate(1, seed, packages=[names[seed % len(names)]]))


def menu_of(task: Task, solution: Solution) -> list[str]:
    """Actions: each edit of the menu, then "all back", then "submit". Raises SandboxError for another's solution."""
    content = task.files.get(solution.path)
    if solution.id != task.id or not isinstance(content, str):
        raise SandboxError(
            f"{solution.id} is not the solution of {task.id}: records of one line belong together"
        )
    patches = [patch_of(edit.path, content, edit.apply(content)) for edit in solution.menu]
    return [*map(apply_action, patches), json.dumps({"tool": "git", "args": "checkout -q ."}), "submit"]


def apply_action(patch: str) -> str:
    """A patch as an action."""
    return json.dumps({"tool": "shell", "command": f"git apply - <<'END-OF-PATCH'\n{patch}END-OF-PATCH"})
