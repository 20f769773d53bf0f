"""kill -9 and full disks in the middle of dumps and restores: never a hang, never a paused or half-made sandbox."""

# ruff: noqa: E501  (programs for the guest are text)
from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sandbox_gym.backends import lookup
from sandbox_gym.errors import SandboxDied, SnapshotError
from sandbox_gym.guest.wire import Op
from sandbox_gym.sandbox import Sandbox
from tests.criu.conftest import runs_of_criu, supervisor
from tests.sandbox.test_faults import supervisor_of

pytestmark = pytest.mark.usefixtures("nothing_stays")

_TREE = """
import subprocess, threading, time
e = threading.Event(); t = threading.Thread(target=e.wait, daemon=True); t.start()
children = [subprocess.Popen(["sleep", "600"]) for _ in range(6)]
pipeline = subprocess.Popen("cat | cat", shell=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
memory = bytearray(24 << 20)
for i in range(0, len(memory), 4096): memory[i] = 7
kept = open("kept", "w+"); kept.write("held"); kept.flush()
def alive():
    pipeline.stdin.write(b"x\\n"); pipeline.stdin.flush()
    kept.seek(0)
    return t.is_alive() and pipeline.stdout.readline() == b"x\\n" and kept.read() == "held" and all(p.poll() is None for p in children)
"""


def is_well(box: Sandbox) -> bool:
    return (
        box.run_code("alive()", timeout=10).value == "True"
        and box.shell("echo on", timeout=10).stdout == "on\n"
    )


@pytest.fixture
def tree(box: Sandbox) -> Sandbox:
    result = box.run_code(_TREE)
    assert result.ok, result.error
    assert is_well(box)
    return box


@contextmanager
def killing_criu(pid: int, delay: float) -> Iterator[list[int]]:
    """Kills what runs of criu there are below `pid`, this long after the first is seen. Yields those it has hit."""
    hit: list[int] = []
    over = threading.Event()

    def hunt() -> None:
        while not runs_of_criu(pid):
            if over.wait(0.001):
                return
        over.wait(delay)
        for run in runs_of_criu(pid):
            try:
                os.kill(run, signal.SIGKILL)
                hit.append(run)
            except ProcessLookupError:
                continue

    hunter = threading.Thread(target=hunt)
    hunter.start()
    try:
        yield hit
    finally:
        over.set()
        hunter.join()


def none_runs() -> None:
    """Those that were killed are gone in a moment."""
    deadline = time.monotonic() + 3
    while runs_of_criu(supervisor()):
        assert time.monotonic() < deadline


@pytest.mark.parametrize("seed", range(20))
def test_criu_is_killed_in_the_middle_of_a_dump(tree: Sandbox, seed: int) -> None:
    checkpoint = tree.checkpoint()
    started = time.monotonic()
    with killing_criu(supervisor(), random.Random(seed).uniform(0, 0.12)) as hit:
        try:
            tree.snapshot().delete()
            taken, message = True, ""
        except SnapshotError as error:
            taken, message = False, str(error)
    assert time.monotonic() - started < 5
    if taken:
        assert is_well(tree)
    else:
        assert hit and tree.name in message and "criu" in message, message
        with pytest.raises(SandboxDied, match="criu was killed"):
            tree.run_code("1", timeout=10)
        assert tree.status == "dead"
        tree.rewind(checkpoint)
        assert is_well(tree)


@pytest.mark.parametrize("seed", range(8))
def test_criu_is_killed_in_the_middle_of_a_restore(tree: Sandbox, seed: int) -> None:
    snapshot = tree.snapshot()
    started = time.monotonic()
    message = ""
    with killing_criu(supervisor(), random.Random(seed).uniform(0, 0.06)) as hit:
        try:
            with Sandbox.restore(snapshot) as copy:
                assert is_well(copy)
        except SnapshotError as error:
            message = str(error)
    assert not message or (hit and snapshot.id in message and "criu" in message), message
    assert time.monotonic() - started < 5
    with Sandbox.restore(snapshot) as copy:
        assert is_well(copy)
    assert is_well(tree)
    snapshot.delete()


def test_one_of_several_restores_is_killed(tree: Sandbox) -> None:
    """All or none, and the rest is cleared away."""
    snapshot = tree.snapshot()
    with killing_criu(supervisor(), 0.01) as hit, pytest.raises(SnapshotError, match=snapshot.id):
        Sandbox.restore_many(snapshot, 4)
    assert hit
    copies = Sandbox.restore_many(snapshot, 4)
    assert all(is_well(copy) for copy in copies)
    for copy in copies:
        copy.terminate()
    snapshot.delete()


# ---- time -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("timeout", [0.0, 0.01, 0.03])
def test_a_dump_that_is_late(tree: Sandbox, timeout: float) -> None:
    backend: Any = lookup.get("native")
    tree.checkpoint()
    tree._call(Op.SETTLE, True, timeout=5)
    with pytest.raises(SnapshotError, match="did not end within"):
        backend.snapshot(tree._live, keep=True, engine="criu", settled=True, timeout=timeout)
    none_runs()
    with pytest.raises(SandboxDied, match="criu was killed"):
        tree.run_code("1", timeout=10)
    tree.rewind()
    assert is_well(tree)


@pytest.mark.parametrize("timeout", [0.0, 0.01, 0.03])
def test_a_restore_that_is_late(tree: Sandbox, timeout: float) -> None:
    backend: Any = lookup.get("native")
    snapshot = tree.snapshot()
    with pytest.raises(SnapshotError, match="did not end within"):
        backend.restore(snapshot.id, names=[None], timeout=timeout)
    none_runs()
    with Sandbox.restore(snapshot) as copy:
        assert is_well(copy)
    snapshot.delete()


# ---- room -----------------------------------------------------------------------------------------------------------

_FULL = """
import json
from sandbox_gym.errors import LimitExceeded, SnapshotError
from sandbox_gym.backends import lookup
hog = Sandbox.create(memory="256Mi", disk="4Gi")
box = Sandbox.create(memory="512Mi", disk="400Mi")
code = "import os, subprocess; p = subprocess.Popen(['sleep', '600']); m = os.urandom(SIZE)"
if FILE:
    code += "; s = open('f', 'w+b'); [s.write(os.urandom(1 << 20)) for _ in range(FILE)]; s.flush(); os.remove('f')"
assert box.run_code(code).ok
print(json.dumps(str(lookup.get("native")._folder)), flush=True)
# What btrfs has reserved for writes that are under way, it has back after a sync.
filled = hog.shell("fallocate -l HOGM hog || { sync -f .; fallocate -l HOGM hog; }")
assert filled.ok, filled
for _ in range(2):
    try:
        box.snapshot()
        print("no error", flush=True)
    except (LimitExceeded, SnapshotError) as error:
        assert box.name in str(error) and "space" in str(error), error
        print(type(error).__name__, flush=True)
    assert box.run_code("len(m), p.poll()").value == str((SIZE, None))
    assert box.shell("echo x > g; cat g").stdout == "x" + chr(10)
print("listed", flush=True); input()
assert hog.shell("rm hog").ok
snapshot = box.snapshot()
assert snapshot.engine == "criu"
with Sandbox.restore(snapshot) as copy:
    assert copy.run_code("len(m), p.poll()").value == str((SIZE, None))
    assert not FILE or copy.run_code("s.seek(0); len(s.read())").value == str(FILE << 20)
print("good", flush=True)
"""


@pytest.mark.parametrize(
    ("size", "file", "hog", "error"),
    [(128 << 20, 0, 960, "LimitExceeded"), (1 << 20, 130, 850, "SnapshotError")],
)
def test_a_full_disk(
    client: Callable[..., subprocess.Popen[str]], size: int, file: int, hog: int, error: str
) -> None:
    """Memory that has no room is refused; a deleted file that has none ends the dump in its middle. Nothing stays."""
    folder = tempfile.mkdtemp(prefix="small-", dir="/var/tmp")
    try:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1100m", "small", folder], check=True, timeout=10)
        code = _FULL.replace("SIZE", str(size)).replace("FILE", str(file)).replace("HOG", str(hog))
        process = client(code, SANDBOX_GYM_DISK_DIR=folder)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate(timeout=60)[1]
        run_folder = json.loads(line)
        lines = [process.stdout.readline() for _ in range(3)]
        assert lines == [f"{error}\n"] * 2 + ["listed\n"], (lines, process.communicate("\n", timeout=60)[1])
        janitor = next(
            int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        )
        disk = Path(f"/proc/{supervisor_of(janitor)}/root{run_folder}/disk")
        assert list(disk.glob("image-*")) == []
        out, err = process.communicate("\n", timeout=60)
        assert out == "good\n", err
    finally:
        subprocess.run(["umount", "-l", folder], check=True, timeout=10)
        shutil.rmtree(folder)


def test_memory_that_just_fits_comes_back(box: Sandbox) -> None:
    """criu restores within the sandbox's own limit."""
    assert box.run_code(
        "import subprocess; p = subprocess.Popen(['sleep', '600']); m = bytearray(400 << 20); m[::4096] = b'7' * len(m[::4096])"
    ).ok
    snapshot = box.snapshot()
    with Sandbox.restore(snapshot) as copy:
        assert copy.run_code("len(m), m.count(b'7'), p.poll()").value == str((400 << 20, 400 << 8, None))
    snapshot.delete()


# ---- the supervisor ---------------------------------------------------------------------------------------------------

_BUSY = """
import json, threading
from sandbox_gym.backends import lookup
box = Sandbox.create("victim")
box.run_code("import subprocess; p = subprocess.Popen(['sleep', '600']); m = bytearray(64 << 20)")
snapshot = box.snapshot()
backend = lookup.get("native")
print(json.dumps({"folder": str(backend._folder), "janitor": backend._process.pid}), flush=True)
input()
try:
    while True:
        ACTION
except Exception as error:
    print(type(error).__name__, flush=True)
input()
"""


@pytest.mark.parametrize("action", ["box.snapshot().delete()", "Sandbox.restore(snapshot).terminate()"])
@pytest.mark.parametrize("who", ["supervisor", "client"])
def test_a_killing_in_the_middle(
    client: Callable[..., subprocess.Popen[str]], traces_of: Callable[..., Any], who: str, action: str
) -> None:
    process = client(_BUSY.replace("ACTION", action))
    assert process.stdin is not None and process.stdout is not None
    line = process.stdout.readline()
    assert line, process.communicate()[1]
    facts = json.loads(line)
    victim = supervisor_of(facts["janitor"])
    process.stdin.write("\n")
    process.stdin.flush()
    deadline = time.monotonic() + 10
    while not runs_of_criu(victim):
        assert time.monotonic() < deadline
    traces = traces_of(process.pid, Path(facts["folder"]))
    if who == "client":
        process.kill()
        process.wait(5)
    else:
        os.kill(victim, signal.SIGKILL)
        assert process.stdout.readline() == "SandboxDied\n"
        traces.processes.pop(facts["janitor"], None)
    traces.assert_gone()
