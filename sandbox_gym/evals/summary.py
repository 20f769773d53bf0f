"""What attempts say in numbers: pass@k, with how sure that is."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from sandbox_gym.evals.attempts import Attempt

_Z = 1.959964  # of 95 %
_MOST_ERRORS, _MOST_OF_ONE = 3, 300  # kinds of errors in a terminal, characters of each


@dataclass(frozen=True)
class Estimate:
    """`low`, `high`: its 95 % interval (Wilson's, each task one observation: what attempts at one task have in common
    makes it no narrower). `tasks`: how many it is of.
    """

    value: float
    low: float
    high: float
    tasks: int


@dataclass(frozen=True)
class TaskRow:
    """A task's attempts in numbers. `errors`: attempts that have no score."""

    task: str
    graded: int
    solved: int
    errors: int
    mean_score: float | None
    mean_seconds: float
    attempts: tuple[Attempt, ...]


@dataclass(frozen=True)
class Summary:
    """`pass_at`: by k, over the tasks that have k attempts with a score. `mean_score`: over tasks; None where no
    attempt has one. `errors` are counted apart, and never as 0. `seconds`: of this run. `from_before`: how many of the
    attempts an earlier run had made, and this one has taken over.
    """

    policy: str
    rows: tuple[TaskRow, ...]
    pass_at: dict[int, Estimate]
    mean_score: float | None
    errors: int
    seconds: float
    from_before: int = 0

    @property
    def attempt_seconds(self) -> float:
        """Of all attempts, policies and checks added up, whichever run made them."""
        return math.fsum(a.seconds + a.check_seconds for row in self.rows for a in row.attempts)

    def text(self) -> str:
        """A few lines for a terminal."""
        lines = [
            f"pass@{k:<3} {100 * at.value:5.1f} %  (95 %: {100 * at.low:.1f} to {100 * at.high:.1f}; {at.tasks} tasks)"
            for k, at in self.pass_at.items()
        ]
        if self.mean_score is not None:
            lines.append(f"score    {self.mean_score:.3f}")
        graded = sum(row.graded for row in self.rows)
        said = f"{graded} attempts with a score, {self.errors} without (errors)"
        if self.from_before:
            ran = graded + self.errors - self.from_before
            said += f"\n{self.from_before} of them were taken from before, {ran} were run now"
        lines.append(f"{said}, in {self.seconds:.1f} s")
        return "\n".join(lines + self._error_lines())

    def _error_lines(self) -> list[str]:
        """The first line of each error, the most frequent ones first."""
        found = [a.error for row in self.rows for a in row.attempts if a.score is None]
        kinds = Counter(map(_first_line, found)).most_common()
        lines = [f"{count} x {said}" for said, count in kinds[:_MOST_ERRORS]]
        rest = sum(count for _, count in kinds[_MOST_ERRORS:])
        return [*lines, f"{rest} x other errors"] if rest else lines


def _first_line(text: str) -> str:
    """Without what would steer the terminal: an agent's output may be in it."""
    line = text.strip().partition("\n")[0]
    line = line if len(line) <= _MOST_OF_ONE else line[:_MOST_OF_ONE] + " ..."
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in line)


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that one of `k` of the `n` attempts is among the `c` that solved it (Chen et al. 2021, unbiased)."""
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def wilson(value: float, n: int) -> tuple[float, float]:
    """The 95 % interval of a share `value` among `n`."""
    middle = (value + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
    half = _Z * math.sqrt(value * (1 - value) / n + _Z**2 / (4 * n**2)) / (1 + _Z**2 / n)
    return max(0.0, middle - half), min(1.0, middle + half)


def summarize(
    policy: str, k: int, attempts: Sequence[Attempt], seconds: float, *, from_before: int = 0
) -> Summary:
    by_task: dict[str, list[Attempt]] = {}
    for attempt in attempts:
        by_task.setdefault(attempt.task, []).append(attempt)
    rows = tuple(_row(task, sorted(found, key=lambda a: a.number)) for task, found in by_task.items())
    means = [row.mean_score for row in rows if row.mean_score is not None]
    sizes = sorted({1, *(2**i for i in range(1, k.bit_length()) if 2**i < k), k})
    estimates = {size: _estimate(rows, size) for size in sizes}
    return Summary(
        policy,
        rows,
        {size: estimate for size, estimate in estimates.items() if estimate is not None},
        math.fsum(means) / len(means) if means else None,
        sum(row.errors for row in rows),
        seconds,
        from_before,
    )


def _row(task: str, attempts: list[Attempt]) -> TaskRow:
    scores = [attempt.score for attempt in attempts if attempt.score is not None]
    return TaskRow(
        task,
        len(scores),
        sum(attempt.solved for attempt in attempts),
        len(attempts) - len(scores),
        math.fsum(scores) / len(scores) if scores else None,
        math.fsum(attempt.seconds for attempt in attempts) / len(attempts),
        tuple(attempts),
    )


def _estimate(rows: Sequence[TaskRow], k: int) -> Estimate | None:
    values = [pass_at_k(row.graded, row.solved, k) for row in rows if row.graded >= k]
    if not values:
        return None
    value = math.fsum(values) / len(values)
    return Estimate(value, *wilson(value, len(values)), len(values))
