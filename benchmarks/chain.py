"""Three hundred snapshots in a row, each of what the one before goes on as: what a step costs far down, and going back.

python -m benchmarks.chain [--quick] [--json FILE]
"""

from __future__ import annotations

import random
import statistics
import time
from typing import Literal

from benchmarks._report import Row, main, progress
from sandbox_gym.sandbox import Sandbox, Snapshot

_DEPTH = 300
_WINDOW = 30  # steps: as many as processes nest, so that each window has one rebase
# Each step changes memory and disk: a counter, a megabyte of the heap, a line in a file.
_SETUP = "state = {'n': 0, 'block': b''}\nopen('/workspace/log', 'w').close()"
_STEP = """
state['n'] += 1
state['block'] = bytes([state['n'] % 256]) * (1 << 20)
with open('/workspace/log', 'a') as log:
    log.write(f"{state['n']}\\n")
"""
_STATE = "(state['n'], state['block'][:1], state['block'][-1:], open('/workspace/log').read())"

Engine = Literal["auto", "criu"]


def expected(level: int) -> str:
    block = bytes([level % 256]) if level else b""
    return repr((level, block, block, "".join(f"{n}\n" for n in range(1, level + 1))))


def climb(box: Sandbox, engine: Engine, depth: int, again: int) -> tuple[list[float], list[Snapshot]]:
    """Milliseconds of each step and the snapshot after it. `again`: after so many, a restored copy goes on, so that
    layers pile up for an engine that leaves its source where it is; 0: never.
    """
    times, levels = [], []
    run = box
    for level in range(1, depth + 1):
        start = time.perf_counter()
        result = run.run_code(_STEP)
        assert result.ok, result.error
        levels.append(run.snapshot(engine=engine))
        times.append(1e3 * (time.perf_counter() - start))
        if again and level % again == 0:
            run, before = Sandbox.restore(levels[-1]), run
            before.terminate()
    if run is not box:
        run.terminate()
    return times, levels


def go_back(levels: list[Snapshot], n: int) -> list[float]:
    """Milliseconds to restore at levels here and there, each checked against what it must hold."""
    times = []
    for level in random.Random(0).sample(range(1, len(levels) + 1), n):
        start = time.perf_counter()
        with Sandbox.restore(levels[level - 1]) as copy:
            result = copy.run_code(_STATE)
            times.append(1e3 * (time.perf_counter() - start))
            assert result.value == expected(level), (level, result)
    return times


def measure(name: str, engine: Engine, depth: int, back: int, again: int = 0) -> list[Row]:
    progress(f"{name}: {depth} steps")
    with Sandbox.create() as box:
        assert box.run_code(_SETUP).ok
        times, levels = climb(box, engine, depth, again)
        restores = go_back(levels, back)
        taken = {snapshot.engine for snapshot in levels}
        for snapshot in levels:
            snapshot.delete()
    assert taken == {"fork" if engine == "auto" else "criu"}, taken
    first, last = times[:_WINDOW], times[-_WINDOW:]
    far = f"{name}, step at depth {depth}"
    return [
        Row(
            f"{far}, p50",
            statistics.median(last),
            "ms",
            "at depth 10",
            statistics.median(first[:20]),
            bar=1.5,
        ),
        Row(f"{far}, mean", statistics.mean(last), "ms", "of the first 30", statistics.mean(first), bar=1.5),
        Row(f"{name}, restore at any depth, p50", statistics.median(restores), "ms"),
        Row("  the worst", max(restores), "ms"),
    ]


def run(quick: bool) -> list[Row]:
    rows = measure("fork", "auto", _DEPTH, 30 if quick else 150)
    rows += measure("criu", "criu", _DEPTH, 15 if quick else 100)
    if not quick:
        rows += measure("criu, each step restored", "criu", _DEPTH, 100, again=1)
    return rows


if __name__ == "__main__":
    main(__doc__, run)
