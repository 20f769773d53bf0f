"""Five hundred live sandboxes: made, answering, and gone again with nothing left.

python -m benchmarks.density [--quick] [--json FILE]
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from benchmarks._report import Row, main
from sandbox_gym.guest.wire import Op
from sandbox_gym.sandbox import Sandbox

_COUNT = 500


def available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no MemAvailable in /proc/meminfo")


def left_behind() -> int:
    """Namespaced processes, mounts and control groups of sandboxes on this machine."""
    mine = Path("/proc/self/ns/pid").readlink()
    processes = 0
    for process in Path("/proc").iterdir():
        try:
            processes += process.name.isdigit() and (process / "ns/pid").readlink() != mine
        except OSError:
            continue
    groups = len(list(Path("/sys/fs/cgroup").glob("**/sandbox-gym-*")))
    mounts = sum("sandbox-gym" in line for line in Path("/proc/self/mounts").read_text().splitlines())
    return processes + groups + mounts


def plain_processes() -> float:
    """Seconds to start as many bare interpreters that answer: what isolation by processes alone costs."""
    count = 20
    start = time.perf_counter()
    children = [
        subprocess.Popen([sys.executable, "-I", "-S", "-c", "print(1)"], stdout=subprocess.PIPE)
        for _ in range(count)
    ]
    for child in children:
        assert child.communicate(timeout=60)[0] == b"1\n"
    return (time.perf_counter() - start) / count * _COUNT


def run(quick: bool) -> list[Row]:
    from sandbox_gym.backends import lookup

    before_left = left_behind()
    interpreters = plain_processes()
    with Sandbox.create() as box:
        box.run_code("x = 42")
        before = available_bytes()
        start = time.perf_counter()
        copies = box.fork(_COUNT - 1)
        made = time.perf_counter() - start
        for copy in copies:
            copy._live.channel.post(Op.CODE, b'{"code":"x"}', timeout=60.0)
        answers = [copy._live.channel.wait(Op.CODE, timeout=60.0) for copy in copies]
        answering = time.perf_counter() - start
        each = (before - available_bytes()) / len(copies)
        assert all(b'"value":"42"' in frame.meta for frame in answers)
        assert len([row for row in box._backend.list() if row["state"] == "running"]) == _COUNT
    start = time.perf_counter()
    lookup.shut_down()
    gone = time.perf_counter() - start
    left = left_behind() - before_left
    return [
        Row(f"{_COUNT} sandboxes made", made, "s", f"{_COUNT} bare Pythons", interpreters),
        Row(
            f"{_COUNT} sandboxes made and answering",
            answering,
            "s",
            f"{_COUNT} bare Pythons",
            interpreters,
            bar=1.0,
        ),
        Row("memory of each, kernel's included", each / 2**20, "MB"),
        Row("all gone", gone, "s"),
        Row("left behind, plus one", 1.0 + left, "things", "nothing left", 1.0, bar=1.0),
    ]


if __name__ == "__main__":
    main(__doc__, run)
