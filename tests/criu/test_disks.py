"""Disks of what criu makes again: no deeper and no fuller with each generation, and usable when they are full."""

from __future__ import annotations

import contextlib
import threading

import pytest

from sandbox_gym.errors import SandboxError, SnapshotError
from sandbox_gym.sandbox import Engine, Sandbox, Snapshot
from tests.criu.conftest import jobs
from tests.criu.memory import eventually

_FILL = """
import os
f = open('/tmp/big', 'wb', 0)
try:
    while True: f.write(bytes(1 << 20))
except OSError as error:
    full = error.errno
"""


def _next(box: Sandbox) -> Sandbox:
    snapshot = box.snapshot(engine="criu")
    box.terminate()
    copy = Sandbox.restore(snapshot)
    snapshot.delete()
    return copy


def test_many_generations(box: Sandbox) -> None:
    box.run_code("import os; x = 0")
    for i in range(30):
        box.run_code(f"x += 1; open('f{i}', 'w').write(str(x))")
        box = _next(box)
    assert box.run_code("x, len([f for f in os.listdir() if f[0] == 'f'])").value == "(30, 30)"
    mounts = box.read_text("/proc/self/mountinfo")
    assert mounts.splitlines()[0].count("lowerdir+=") <= 3
    box.terminate()


def test_a_file_that_is_open_for_writing_is_there_once() -> None:
    box = Sandbox.create(disk="120Mi")
    box.run_code("f = open('log', 'wb', 0); f.write(bytes(30 << 20))")
    for _ in range(4):
        box = _next(box)
        assert box.run_code("f.write(b'more')").value == "4"
    snapshot = box.snapshot()
    assert snapshot.disk_bytes < 40 << 20
    box.terminate()
    snapshot.delete()


@pytest.mark.parametrize("engine", ["fork", "criu"])
def test_a_full_disk(engine: Engine) -> None:
    box = Sandbox.create(disk="40Mi")
    assert box.run_code(_FILL + "full in (28, 122)").value == "True"
    snapshot = box.snapshot(engine=engine)
    with Sandbox.restore(snapshot) as copy:
        assert (
            copy.run_code("os.stat('/tmp/big').st_size == os.fstat(f.fileno()).st_size > 30 << 20").value
            == "True"
        )
        copy.run_code("f.close(); os.unlink('/tmp/big')")
        assert copy.shell("echo room > /tmp/small; cat /tmp/small").stdout == "room\n"
    box.run_code("f.close(); os.unlink('/tmp/big')")
    box.snapshot(engine=engine).delete()
    assert box.shell("echo room > /tmp/small; cat /tmp/small").stdout == "room\n"
    box.terminate()
    snapshot.delete()


def test_at_the_limit_of_processes() -> None:
    box = Sandbox.create(pids=12)
    box.shell("for i in 1 2 3 4 5 6 7 8 9 10 11; do sleep 600 & done 2>/dev/null")
    snapshot = box.snapshot()
    with Sandbox.restore(snapshot) as copy:
        assert copy.run_code("1 + 1").value == "2"
        assert "criu" in snapshot.engine
    box.terminate()
    snapshot.delete()


def test_a_path_that_is_too_long_to_read(box: Sandbox) -> None:
    box.run_code("import os\nfor i in range(30): os.mkdir('d' * 200); os.chdir('d' * 200)")
    with contextlib.suppress(SnapshotError):  # and nothing worse
        box.snapshot().delete()
    assert box.run_code("1 + 1").value == "2"


def test_a_snapshot_that_was_taken_is_good_whatever_ends_its_source() -> None:
    for i in range(12):
        box = Sandbox.create()
        box.run_code("x = 1")
        thread = threading.Timer(0.0004 * i, box.terminate)
        thread.start()
        try:
            snapshot = box.snapshot()
        except SandboxError:
            thread.join()
            continue
        thread.join()
        with Sandbox.restore(snapshot) as copy:
            assert copy.run_code("x").value == "1"
        snapshot.delete()


_CHANGE = """
open(f"new{n}", "w").write(str(n))
open("log", "a").write(f"{n} ")
if n % 3 == 2: os.unlink(f"new{n - 1}")
n += 1
"""


def _layers(box: Sandbox) -> int:
    return box.shell("cat /proc/self/mounts").stdout.count("lowerdir+=/run/")


def test_lower_layers_are_merged_on_the_way_to_a_rebase(box: Sandbox) -> None:
    """And each level stays what it was, before, between and after: names, contents, numbers."""
    box.run_code("import os\nn = 0")
    levels: list[Snapshot] = []
    for i in range(65):
        assert box.run_code(_CHANGE).ok
        levels.append(box.snapshot())
        if i % 29 == 20:  # the merge has begun some levels above
            eventually(lambda: not jobs(), 60.0)
    assert _layers(box) < 12  # of 65
    for level in (0, 13, 28, 29, 43, 57, 58, 64):
        with Sandbox.restore(levels[level]) as copy:
            names = [f"new{n}" for n in range(level + 1) if n % 3 != 1 or n == level]
            assert copy.read_text("log").split() == [str(n) for n in range(level + 1)]
            assert copy.shell("ls").stdout.split() == sorted([*names, "log"])
            numbers = copy.shell("stat -c %i *").stdout.split()
            assert len(set(numbers)) == len(names) + 1
            assert copy.shell("cat new*").stdout == "".join(name[3:] for name in sorted(names))
    for snapshot in levels:
        snapshot.delete()
