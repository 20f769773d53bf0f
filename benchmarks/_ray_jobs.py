"""`job.map` over many trivial items with a sandbox each, beside the same loop in plain processes without Ray."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks._report import Row, progress
from sandbox_gym.backends.shared import registry
from sandbox_gym.sandbox import Sandbox, Snapshot

_WORKERS = 2
_PATIENCE = 10.0  # seconds in which all that a map had must be gone
_KINDS = {"new": "a new sandbox", "copy": "a copy of a snapshot"}
_QUICK = {"new": 40, "copy": 300}
_FULL = {"new": 10_000, "copy": 10_000}
_FLOOR_SHARE = 0.1  # of as many items, for the floor before, and for the one after


def play(snapshot: Snapshot | None) -> str | None:
    """The item: one sandbox, one line of code."""
    with Sandbox.create() if snapshot is None else Sandbox.restore(snapshot) as box:
        return box.run_code("6 * 7").value


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def rows(quick: bool) -> list[Row]:
    found = []
    with connected():
        for kind, count in (_QUICK if quick else _FULL).items():
            progress(f"jobs: {count:,} items with {_KINDS[kind]} each")
            found += mapped(kind, count)
    return found


@contextmanager
def connected() -> Iterator[None]:
    """To the Ray that there is, or to one for as long as this takes."""
    import ray

    if ray.is_initialized():
        yield
        return
    ray.init(num_cpus=_WORKERS, include_dashboard=False, log_to_driver=False, object_store_memory=200 << 20)
    try:
        yield
    finally:
        ray.shutdown()


def mapped(kind: str, count: int) -> list[Row]:
    import ray

    from sandbox_gym.ray import job

    @job(cpus=max(1, int(ray.cluster_resources()["CPU"]) // _WORKERS), memory=None)
    def item(number: int) -> tuple[str | None, int, int, float]:
        start = time.perf_counter()
        value = play(snapshot)
        return value, os.getpid(), resident_bytes(), time.perf_counter() - start

    floor = plain_loop(kind, max(20, int(count * _FLOOR_SHARE)))
    snapshot = ready_snapshot() if kind == "copy" else None
    here: list[int] = []
    there: dict[int, list[int]] = {}
    inside = 0.0
    done, start = 0, time.perf_counter()
    first = start
    for value, pid, size, seconds in item.map(range(count)):
        if not done:
            first = time.perf_counter()
        done += value == "42"
        inside += seconds
        here.append(resident_bytes())
        there.setdefault(pid, []).append(size)
    end = time.perf_counter()
    each = (end - first) / (count - 1) * len(there)
    floor = (floor + plain_loop(kind, max(20, int(count * _FLOOR_SHARE)))) / 2
    what = f"{count:,} items with {_KINDS[kind]} each"
    return [
        Row(f"{what}: done", done, "items", "asked for", count, bar=1.0, more_is_better=True),
        Row("  of them, the first result's wait included", count / (end - start), "items/s"),
        Row("  an item's time on its worker", each * 1e3, "ms", "in plain processes", floor * 1e3),
        Row(
            "  of it outside of its function",
            (each - inside / count) * 1e3,
            "ms",
            "in plain processes",
            floor * 1e3,
        ),
        grown("the driver", [here]),
        grown("workers", list(there.values())),
        Row("  left behind, plus one", 1.0 + left_of(list(there)), "things", "nothing left", 1.0, bar=1.0),
    ]


def grown(whose: str, sizes: list[list[int]]) -> Row:
    """The last tenth of the time beside the first but one, when all is loaded."""
    tenths = [(each, max(1, len(each) // 10)) for each in sizes]
    last = mean(mean(each[-tenth:]) for each, tenth in tenths)
    first = mean(mean(each[tenth : 2 * tenth]) for each, tenth in tenths)
    return Row(f"  memory of {whose} at the end", last / 2**20, "MB", "at the start", first / 2**20, bar=1.1)


def left_of(workers: list[int]) -> int:
    """Processes of workers, and their supervisors' run folders, that are there after a while."""
    deadline = time.monotonic() + _PATIENCE
    while True:
        left = sum(registry.start_time(pid) is not None for pid in workers)
        left += sum(_owner(folder) in workers for folder in registry.home().glob("*"))
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.05)


def _owner(folder: Path) -> int | None:
    try:
        owner: int = json.loads((folder / "info.json").read_text())["owner_pid"]
    except (OSError, ValueError):  # it is just going
        return None
    return owner


def ready_snapshot() -> Snapshot:
    with Sandbox.create() as box:
        return box.snapshot()


# ---- the floor ----------------------------------------------------------------------------------------------------


def plain_loop(kind: str, count: int) -> float:
    """Seconds of an item in each of as many plain processes at once, which have done one before."""
    each = max(1, count // _WORKERS)
    command = [sys.executable, "-m", "benchmarks._ray_jobs", kind, str(each)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    processes: list[subprocess.Popen[Any]] = [
        subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(_WORKERS)
    ]
    try:
        for process in processes:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
        answers = []
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        for process in processes:
            answers.append(float(process.communicate(timeout=600)[0]))
        return mean(answers) / each
    finally:
        for process in processes:
            process.kill()
            process.wait()


def loop(kind: str, count: int) -> None:
    """Such a process: says that it is ready, waits for a line, and tells the seconds it took."""
    snapshot = ready_snapshot() if kind == "copy" else None
    play(snapshot)
    print("ready", flush=True)
    sys.stdin.readline()
    start = time.perf_counter()
    for _ in range(count):
        assert play(snapshot) == "42"
    print(time.perf_counter() - start, flush=True)


if __name__ == "__main__":
    loop(sys.argv[1], int(sys.argv[2]))
