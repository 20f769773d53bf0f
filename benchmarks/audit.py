"""What an audit log adds to a call, and that none is missing: calls with and without it, in turns, in the same run.

python -m benchmarks.audit [--quick] [--json FILE]
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from operator import truediv
from pathlib import Path

from benchmarks._report import Row, main, progress
from sandbox_gym import audit
from sandbox_gym._audit import set_audit
from sandbox_gym.sandbox import Sandbox

_TURN = 0.25  # seconds: at least two batches of the log's thread


def turn(call: Callable[[], object]) -> float:
    """Milliseconds of a call, the median: what is far above it is the machine's doing."""
    times = []
    end = time.perf_counter() + _TURN
    while (start := time.perf_counter()) < end:
        call()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def compare(call: Callable[[], object], path: Path, pairs: int) -> tuple[float, float]:
    """(recorded, not recorded) in milliseconds, from pairs of turns, each of which begins with the other kind. The
    first is the second times the median of the pairs' ratios: a machine's slow moments are both kinds' alike.
    """
    times: dict[bool, list[float]] = {True: [], False: []}
    for number in range(pairs):
        for recorded in (number % 2 == 0, number % 2 == 1):
            set_audit(path if recorded else None)
            call()  # the first starts the thread
            times[recorded].append(turn(call))
    set_audit(None)
    bare = statistics.median(times[False])
    return bare * statistics.median(map(truediv, times[True], times[False])), bare


def run(quick: bool) -> list[Row]:
    pairs = 33 if quick else 120
    rows = []
    with tempfile.TemporaryDirectory() as folder, Sandbox.create(env={"TOKEN": "not to be seen"}) as box:
        path = Path(folder) / "audit.db"
        calls: dict[str, Callable[[], object]] = {
            "run_code": lambda: box.run_code("x = 1; x + 1"),
            "exec": lambda: box.exec(["/bin/true"]),
        }
        for name, call in calls.items():
            progress(f"{name}, recorded and not")
            recorded, bare = compare(call, path, pairs)
            rows.append(Row(f"{name}, recorded", recorded, "ms", "not recorded", bare, bar=1.03))
        rows.append(missing(box, Path(folder) / "all.db"))
    return rows


def missing(box: Sandbox, path: Path) -> Row:
    """Calls that are not in the log, of as many as can be made in two seconds."""
    set_audit(path)
    made = 0
    end = time.monotonic() + 2.0
    while time.monotonic() < end:
        box.run_code("1")
        made += 1
    set_audit(None)
    found = sum(event.kind == "code" and event.result is not None for event in audit.read(path))
    return Row("calls found in the log", found, "", "calls made", made, bar=1.0, more_is_better=True)


if __name__ == "__main__":
    main(__doc__, run)
