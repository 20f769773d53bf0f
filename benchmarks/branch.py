"""Restore and fork against the floor: a bare clone of the same process into the same namespaces, in the same run.

python -m benchmarks.branch [--quick] [--json FILE]
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

from benchmarks._report import Row, main
from sandbox_gym.guest.wire import Op
from sandbox_gym.sandbox import Sandbox, Snapshot

# The floor runs in the guest itself: the same process, the same memory, and nothing done in the copy but one write.
_FLOOR = """
import os, time
from sandbox_gym_guest.syscalls import CLONE_NEWCGROUP, CLONE_NEWNET, CLONE_SANDBOX, clone

def floor(n):
    times = []
    for _ in range(n):
        ours, theirs = os.pipe()
        start = time.perf_counter()
        pid = clone(CLONE_SANDBOX | CLONE_NEWNET | CLONE_NEWCGROUP)
        if pid == 0:
            os.write(theirs, b"x")
            os._exit(0)
        os.read(ours, 1)
        times.append(time.perf_counter() - start)
        os.close(ours), os.close(theirs), os.waitpid(pid, 0)
    return times
"""


def restore_times(snapshot: Snapshot, n: int) -> list[float]:
    """Seconds from the request to the copy's first answer, `n` times."""
    times = []
    for _ in range(n):
        start = time.perf_counter()
        copy = Sandbox.restore(snapshot)
        copy._request(Op.PING, timeout=30.0)
        times.append(time.perf_counter() - start)
        copy.terminate()
    return times


def compare(megabytes: int, rounds: int, each: int) -> tuple[list[float], list[float]]:
    """(floor, restore) in milliseconds for a guest with so much touched memory, in alternating rounds."""
    with Sandbox.create(memory="3Gi") as box:
        hold = f"\nhold = bytearray(b'x') * ({megabytes - 10} << 20)" if megabytes > 10 else ""
        setup = box.run_code(_FLOOR + hold)
        assert setup.ok, setup.error
        snapshot = box.snapshot()
        floors: list[float] = []
        restores: list[float] = []
        for _ in range(rounds):
            floors += _floor(box, each)
            restores += restore_times(snapshot, each)
        snapshot.delete()
    return sorted(1e3 * t for t in floors), sorted(1e3 * t for t in restores)


def _floor(box: Sandbox, n: int) -> list[float]:
    result = box.run_code(f"floor({n})")
    assert result.ok and result.value, result.error
    return [float(text) for text in result.value.strip("[]").split(",")]


def fork_100(floor_ms: float) -> list[Row]:
    """A hundred running copies of a live guest, all answering, and what each has for itself alone."""
    with Sandbox.create() as box:
        times = []
        private: list[float] = []
        for _ in range(3):
            start = time.perf_counter()
            copies = box.fork(100)
            for copy in copies:
                copy._live.channel.post(Op.PING, timeout=30.0)
            for copy in copies:
                copy._live.channel.wait(Op.PING, timeout=30.0)
            times.append(time.perf_counter() - start)
            private = private_megabytes(copies[0])
            for copy in copies:
                copy.terminate()
    spent = statistics.median(times) * 1e3
    megabytes = statistics.median(private)
    assert len(private) >= 100, f"only {len(private)} copies were seen"
    return [
        Row("fork(100), all answering", spent, "ms", "100 x floor", 100 * floor_ms, bar=2.5),
        Row("private memory of a copy", megabytes, "MB", "bound", 1.5, bar=1.0),
    ]


def private_megabytes(member: Sandbox) -> list[float]:
    """Private_Clean + Private_Dirty of every guest of this client that shares its binary and arguments, by /proc."""
    found = []
    supervisor = Path(member._backend._folder).name  # type: ignore[attr-defined]
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            if f"sandbox-gym-{supervisor}" not in (process / "cgroup").read_text():
                continue
            lines = (process / "smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        found.append(sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024)
    return found


def run(quick: bool) -> list[Row]:
    rows: list[Row] = []
    floor_ms = 0.0
    plan = ((10, 4, 25), (100, 3, 15), (1000, 2, 8)) if quick else ((10, 10, 50), (100, 6, 30), (1000, 5, 10))
    for megabytes, rounds, each in plan:
        floor, restore = compare(megabytes, rounds, each)
        low, p50 = statistics.median(floor), statistics.median(restore)
        name = f"restore, {megabytes} MB guest"
        if megabytes == 10:
            floor_ms = low
            p99 = restore[int(0.99 * (len(restore) - 1))]
            rows.append(Row(f"{name}, p50", p50, "ms", "bare clone", low, bar=2.0))
            rows.append(Row(f"{name}, p99", p99, "ms", "its p50", p50, bar=3.0))
        else:
            rows.append(Row(f"{name}, p50", p50, "ms", "bare clone + 2 ms", low + 2.0, bar=1.0))
    return rows + fork_100(floor_ms)


if __name__ == "__main__":
    main(__doc__, run)
