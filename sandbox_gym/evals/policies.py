"""Policies: functions that work on a task in a sandbox; and such as are made of others."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from sandbox_gym.sandbox import Sandbox
from sandbox_gym.tasks import Prepared, Task, Verdict

Policy = Callable[[Task, Sandbox], object]
"""Works on the task in this sandbox, and returns when it is done (what it returns is not looked at). It is handed what
was prepared, and its own; the grader looks at that afterwards. Of the task it should heed `prompt` and `max_steps`; the
rest (`check`, `hidden`, `solution`) is not for an agent. It is called from several threads at once."""

Score = Callable[[Task, Sandbox], float]
"""How good a state looks: by tests that the agent may see, say. The hidden ones are no guide for a policy."""

_MAX_THREADS = 32


def find(name: str) -> Policy:
    """A policy by `module:function`. Raises ValueError."""
    module, colon, function = name.partition(":")
    if not colon or not module or not function:
        raise ValueError(f"a policy is named module:function, not {name!r}")
    try:
        found = getattr(importlib.import_module(module), function)
    except ModuleNotFoundError as error:
        raise ValueError(f"policy {name!r}: {error}") from None
    except AttributeError:
        raise ValueError(f"policy {name!r}: module {module} has no {function}") from None
    if not callable(found):
        raise ValueError(
            f"policy {name!r}: it is a {type(found).__name__}, not a function of a task and a sandbox"
        )
    policy: Policy = found
    return policy


def nothing(task: Task, box: Sandbox) -> None:
    """An empty answer."""


def reference(task: Task, box: Sandbox) -> None:
    """The task's own solution: to see what a data set is worth."""
    if not task.solution:
        raise ValueError(f"task {task.id} has no solution")
    box.shell(task.solution, task.setup_timeout, cwd=task.workdir)


# ---- policies over policies --------------------------------------------------------------------------------------


def best_of_n(policy: Policy, n: int, score: Score) -> Policy:
    """Runs the policy in `n` copies of the sandbox, and goes on as the one that scores best."""

    def run(task: Task, box: Sandbox) -> None:
        copies = box.fork(n, rng="diverge")
        try:
            _go_on_as(box, max(_scored(task, policy, score, copies), key=lambda pair: pair[0])[1])
        finally:
            for copy in copies:
                copy.terminate()

    return run


def beam_search(step: Policy, score: Score, *, branch: int, depth: int, width: int = 1) -> Policy:
    """Tree search with a policy that makes one step: from each of the `width` best states, `branch` copies take a step
    each, up to `depth` times, or until a state scores 1. Goes on as the best state that was seen.
    """

    def run(task: Task, box: Sandbox) -> None:
        best = score(task, box), box
        beam, copies = [best], list[Sandbox]()
        try:
            for _ in range(depth):
                if best[0] >= 1.0:
                    break
                children = [copy for _, state in beam for copy in state.fork(branch, rng="diverge")]
                copies += children
                found = sorted(_scored(task, step, score, children), key=lambda pair: -pair[0])
                beam = found[:width]
                best = max(best, found[0], key=lambda pair: pair[0])
                for _, state in found[width:]:
                    if state is not best[1]:
                        state.terminate()
            if best[1] is not box:
                _go_on_as(box, best[1])
        finally:
            for copy in copies:
                copy.terminate()

    return run


def _scored(task: Task, policy: Policy, score: Score, boxes: list[Sandbox]) -> list[tuple[float, Sandbox]]:
    def one(box: Sandbox) -> tuple[float, Sandbox]:
        policy(task, box)
        return score(task, box), box

    with ThreadPoolExecutor(min(len(boxes), _MAX_THREADS)) as pool:
        return list(pool.map(one, boxes))


def _go_on_as(box: Sandbox, other: Sandbox) -> None:
    snapshot = other.snapshot()
    try:
        box.rewind(snapshot)
    finally:
        snapshot.delete()


# ---- groups ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """Attempts that go on from one prefix. `advantages`: each score less their mean, over their standard deviation
    (Shao et al. 2024, GRPO); all 0 where the scores are equal.
    """

    verdicts: tuple[Verdict, ...]
    advantages: tuple[float, ...]

    @property
    def scores(self) -> tuple[float, ...]:
        return tuple(verdict.score for verdict in self.verdicts)


def group(prepared: Prepared, policy: Policy, n: int, *, prefix: Policy | None = None) -> Group:
    """Runs `prefix` once, then `policy` in `n` copies of where that led, side by side, and judges each.

    Raises what the policies do, and GraderError.
    """

    def one(box: Sandbox) -> Verdict:
        policy(prepared.task, box)
        return prepared.grade(box)

    with prepared.start() as box:
        if prefix is not None:
            prefix(prepared.task, box)
        copies = box.fork(n, rng="diverge")
        try:
            with ThreadPoolExecutor(min(n, _MAX_THREADS)) as pool:
                verdicts = tuple(pool.map(one, copies))
        finally:
            for copy in copies:
                copy.terminate()
    return Group(verdicts, advantages([verdict.score for verdict in verdicts]))


def advantages(scores: list[float]) -> tuple[float, ...]:
    mean = math.fsum(scores) / len(scores)
    spread = math.sqrt(math.fsum((score - mean) ** 2 for score in scores) / len(scores))
    return tuple((score - mean) / spread if spread > 1e-9 else 0.0 for score in scores)
