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


class Chain:
    """A sandbox that takes steps, each with a snapshot. `again`: a restored copy goes on after each, so that layers
    pile up for an engine that leaves its source where it is.
    """

    def __init__(self, engine: Engine, *, again: bool) -> None:
        self._engine: Engine = engine
        self._again = again
        self._box = Sandbox.create()
        self.levels: list[Snapshot] = []
        self.times: list[float] = []  # milliseconds of each step and the snapshot after it
        assert self._box.run_code(_SETUP).ok

    def step(self) -> None:
        start = time.perf_counter()
        result = self._box.run_code(_STEP)
        assert result.ok, result.error
        self.levels.append(self._box.snapshot(engine=self._engine))
        self.times.append(1e3 * (time.perf_counter() - start))
        if self._again:
            self._box, before = Sandbox.restore(self.levels[-1]), self._box
            before.terminate()

    def close(self) -> None:
        self._box.terminate()
        for snapshot in self.levels:
            snapshot.delete()


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


def measure(name: str, engine: Engine, depth: int, back: int, *, again: bool = False) -> list[Row]:
    """The last steps of a deep chain take turns with the first of a young one: what the machine itself charges more for
    by then, memory that it has not used before and writing to disk, both pay.
    """
    progress(f"{name}: {depth} steps")
    deep, young = Chain(engine, again=again), Chain(engine, again=again)
    try:
        for _ in range(depth - _WINDOW):
            deep.step()
        for _ in range(_WINDOW):
            deep.step()
            young.step()
        restores = go_back(deep.levels, back)
        taken = {snapshot.engine for snapshot in deep.levels}
    finally:
        deep.close()
        young.close()
    assert taken == {"fork" if engine == "auto" else "criu"}, taken
    last, first, early = deep.times[-_WINDOW:], young.times, deep.times[:_WINDOW]
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
        Row("  of its own first 30, mean", statistics.mean(early), "ms"),
        Row(f"{name}, restore at any depth, p50", statistics.median(restores), "ms"),
        Row("  the worst", max(restores), "ms"),
    ]


def run(quick: bool) -> list[Row]:
    rows = measure("fork", "auto", _DEPTH, 30 if quick else 150)
    rows += measure("criu", "criu", _DEPTH, 15 if quick else 100)
    if not quick:
        rows += measure("criu, each step restored", "criu", _DEPTH, 100, again=True)
    return rows


if __name__ == "__main__":
    main(__doc__, run)
