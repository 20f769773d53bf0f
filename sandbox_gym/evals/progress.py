"""How far an eval is: a bar where one can be drawn, else a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sandbox_gym.evals.attempts import Attempt

_EVERY = 10.0  # seconds between lines


@contextmanager
def shown(total: int, before: Sequence[Attempt], wanted: bool) -> Iterator[Callable[[Attempt], None]]:
    """What to call with each attempt that is over. `before`: those that were already, which count too."""
    counts = {"solved": 0, "errors": 0}

    def count(attempt: Attempt) -> None:
        counts["solved"] += attempt.solved
        counts["errors"] += attempt.score is None

    for attempt in before:
        count(attempt)
    if not wanted:
        yield count
        return
    bar = _bar(total, len(before))
    if bar is None:
        yield _lines(total, len(before), counts, count)
        return
    bar.set_postfix(counts)

    def tick(attempt: Attempt) -> None:
        count(attempt)
        bar.set_postfix(counts, refresh=False)
        bar.update()

    with bar:
        yield tick


def _bar(total: int, done: int) -> Any:
    """None where stderr is no terminal, or tqdm is not there."""
    if not sys.stderr.isatty():
        return None
    try:
        import tqdm
    except ModuleNotFoundError:
        return None
    return tqdm.tqdm(total=total, initial=done, desc="eval", unit="attempt", file=sys.stderr)


def _lines(
    total: int, done: int, counts: dict[str, int], count: Callable[[Attempt], None]
) -> Callable[[Attempt], None]:
    state = {"over": done, "said": time.monotonic()}

    def tick(attempt: Attempt) -> None:
        count(attempt)
        state["over"] += 1
        if time.monotonic() - state["said"] >= _EVERY or state["over"] == total:
            state["said"] = time.monotonic()
            said = (
                f"{state['over']} of {total} attempts, {counts['solved']} solved, {counts['errors']} errors"
            )
            print(said, file=sys.stderr, flush=True)

    return tick
