"""One file that any other client restores from, and none that was changed by as much as a bit."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from sandbox_gym import archive
from sandbox_gym.errors import SandboxError, SnapshotError
from sandbox_gym.sandbox import Sandbox, Snapshot

from .conftest import Client, said

# ---- there and back -----------------------------------------------------------------------------------------------


def test_a_fork_snapshot_in_another_client(box: Sandbox, client: Client, tmp_path: Path) -> None:
    box.run_code("import random; state = {'n': 41}; random.seed(7)")
    box.shell("echo disk > kept; ln kept other; rm -r /usr/share/doc; mkdir -p /usr/share/doc/own")
    snapshot = box.snapshot("label")
    assert snapshot.engine == "fork"
    box.run_code("state['n'] = 0")
    snapshot.save(tmp_path / "x.sbx")
    assert os.listdir(tmp_path) == ["x.sbx"]
    assert stat.S_IMODE((tmp_path / "x.sbx").stat().st_mode) == 0o600
    expected = box.run_code("random.random()").value
    other = client(
        f"""
snap = sg.Snapshot.load("file://{tmp_path}/x.sbx")
assert (snap.engine, snap.label, snap.parent) == ("criu", "label", None), snap
for box in (sg.Sandbox.restore(snap), sg.Sandbox.restore(snap)):
    print(box.run_code("state['n'] += 1; state['n'], random.random()").value)
    print(box.shell("cat other; stat -c %h kept; ls /usr/share/doc; ls /usr/share | wc -l").stdout)
    again = box.snapshot()  # it goes on as any other
    assert again.engine == "fork", again.why
snap.delete()
"""
    )
    count = len(os.listdir("/usr/share"))
    assert said(other).split() == ["(42,", f"{expected})", "disk", "2", "own", f"{count}"] * 2


def test_a_tree_with_threads_and_a_server_in_another_client(
    box: Sandbox, client: Client, tmp_path: Path
) -> None:
    box.write_file("index.html", "served")
    box.shell("python3 -m http.server 8000 >/dev/null 2>&1 &")
    box.run_code(
        "import threading, time, urllib.request\n"
        "def fetch(): return urllib.request.urlopen('http://127.0.0.1:8000/index.html', timeout=5).read()\n"
        "ticks = 0\ndef tick():\n    global ticks\n    while True:\n        ticks += 1\n        time.sleep(0.005)\n"
        "threading.Thread(target=tick, daemon=True).start()\n"
        "import ctypes, os; libc = ctypes.CDLL(None); os.mkdir('seen'); seen = libc.inotify_init()\n"
        "libc.inotify_add_watch(seen, b'seen', 0x100)\n"  # what is created in it
        "gone = open('gone', 'w+'); gone.write('deleted'); gone.flush(); os.remove('gone')\n"
        "while True:\n    try: fetch(); break\n    except OSError: time.sleep(0.02)"
    )
    snapshot = box.snapshot()
    assert snapshot.engine == "criu"
    snapshot.save(str(tmp_path / "tree.sbx"))
    ticks = int(box.run_code("ticks").value or 0)
    snapshot.delete()
    other = client(
        f"""
box = sg.Sandbox.restore(sg.Snapshot.load({str(tmp_path / "tree.sbx")!r}))
first = int(box.run_code("ticks").value)
print(first, box.run_code("time.sleep(0.1); ticks").value, box.run_code("fetch()").value)
print(box.run_code("open('seen/new', 'x'); gone.seek(0); b'new' in os.read(seen, 4096), gone.read()").value)
"""
    )
    numbers, rest = said(other).splitlines()
    first, later, page = numbers.split()
    assert 0 < int(first) <= ticks + 50 and int(later) > int(first)
    assert page == "b'served'" and rest == "(True, 'deleted')"


def test_files_of_different_layers_never_look_like_one(saved: Path) -> None:
    """Each layer comes into a file system that counts its inodes from the same number on."""
    snapshot = Snapshot.load(saved)
    with Sandbox.restore(snapshot) as box:
        box.shell("echo 3 > three; mkdir four; touch four/five")
        numbers = box.shell("stat -c %i one two three four four/five").stdout.split()
        assert len(set(numbers)) == 5, numbers
        assert box.shell("mv one moved && cp two moved && cat moved").stdout == "2\n"
    snapshot.delete()


def test_a_loaded_snapshot_is_saved_again(saved: Path, tmp_path: Path) -> None:
    first = Snapshot.load(saved)
    first.save(tmp_path / "again.sbx")
    first.delete()
    with open(saved, "rb") as one, open(tmp_path / "again.sbx", "rb") as two:
        assert archive.read(one)[0].parts == archive.read(two)[0].parts


def test_a_url_of_fsspec(box: Sandbox) -> None:
    box.run_code("x = 1")
    snapshot = box.snapshot()
    snapshot.save("memory://some/x.sbx")
    snapshot.delete()
    loaded = Snapshot.load("memory://some/x.sbx")
    with Sandbox.restore(loaded) as copy:
        assert copy.run_code("x").value == "1"
    loaded.delete()
    fsspec.filesystem("memory").rm("some/x.sbx")
    with pytest.raises(FileNotFoundError):
        Snapshot.load("memory://some/x.sbx")


def test_the_same_disk_is_the_same_part(box: Sandbox, tmp_path: Path) -> None:
    """Layers are known by what is in them: a second snapshot shares all that it has in common with the first."""
    box.run_code("import os; open('large', 'wb').write(os.urandom(1 << 20))")
    parts = []
    for number in range(3):
        snapshot = box.snapshot()
        snapshot.save(tmp_path / "x.sbx")  # over the one before
        with open(tmp_path / "x.sbx", "rb") as file:
            parts.append(archive.read(file)[0].parts)
        snapshot.delete()
        box.shell(f"echo {number} > small")
    common = set(parts[0][1:])
    assert any(part.bytes > 1 << 20 for part in common)
    assert set(parts[2][1:]) > set(parts[1][1:]) > common
    assert parts[0][0] not in parts[1]  # memory is never quite the same


# ---- saving fails ---------------------------------------------------------------------------------------------------


@pytest.fixture
def large(box: Sandbox) -> Iterator[Snapshot]:
    """80 MB that don't compress."""
    box.run_code("import os; large = os.urandom(80 << 20)")
    snapshot = box.snapshot(engine="criu")
    yield snapshot
    snapshot.delete()


def test_a_full_disk_leaves_nothing(large: Snapshot, tmp_path: Path, nothing_left: None) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20M", "none", str(tmp_path)], check=True, timeout=10)
    try:
        with pytest.raises(OSError, match="No space left"):
            large.save(tmp_path / "x.sbx")
        assert os.listdir(tmp_path) == []
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True, timeout=10)
    with pytest.raises(FileNotFoundError):
        large.save(tmp_path / "missing/x.sbx")


def test_too_little_time(large: Snapshot, tmp_path: Path, nothing_left: None) -> None:
    with pytest.raises(SandboxError, match=r"within 0\.0"):
        large.save(tmp_path / "x.sbx", timeout=0.02)
    assert os.listdir(tmp_path) == []


def test_a_file_system_without_nameless_files(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = Snapshot.load(saved)
    monkeypatch.setattr(os, "O_TMPFILE", os.O_DIRECTORY)  # what a kernel sees that doesn't know the flag
    snapshot.save(tmp_path / "x.sbx")
    assert os.listdir(tmp_path) == ["x.sbx"]
    with pytest.raises(SandboxError):
        snapshot.save(tmp_path / "y.sbx", timeout=1e-6)
    assert os.listdir(tmp_path) == ["x.sbx"]
    snapshot.delete()


def test_a_client_that_is_killed_in_the_middle_leaves_no_file(client: Client, tmp_path: Path) -> None:
    process = client(
        f"""
box = sg.Sandbox.create()
box.run_code("import os; large = os.urandom(100 << 20)")
print("go", flush=True)
box.snapshot(engine="criu").save({str(tmp_path / "x.sbx")!r})
"""
    )
    assert process.stdout is not None and process.stdout.readline() == "go\n"
    deadline = time.monotonic() + 30
    while not _writes_in(process.pid, tmp_path, at_least=1 << 20):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    assert os.listdir(tmp_path) == []


def _writes_in(pid: int, folder: Path, *, at_least: int) -> bool:
    """Whether a process has a file of that size open there."""
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if os.readlink(fd).startswith(f"{folder}/") and fd.stat().st_size >= at_least:
                return True
        except OSError:  # closed meanwhile
            continue
    return False


def test_what_can_not_be_saved(box: Sandbox, tmp_path: Path) -> None:
    snapshot = box.snapshot()
    snapshot.delete()
    with pytest.raises(SnapshotError, match="deleted"):
        snapshot.save(tmp_path / "x.sbx")
    with pytest.raises(ValueError, match="other-host"):
        Snapshot.load("file://other-host/x.sbx")
    with pytest.raises(FileNotFoundError):
        Snapshot.load(tmp_path / "none.sbx")
    with pytest.raises(SnapshotError, match=r"no archive|too short"):
        Snapshot.load(sys.executable)


def test_an_ordinary_user_hears_why_not(saved: Path) -> None:
    python = "/usr/bin/python3"
    place = Path(tempfile.mkdtemp(prefix="sandbox-gym-test-", dir="/tmp"))
    code = f"""
import os, sys, warnings; sys.path.insert(0, {str(place)!r}); warnings.simplefilter("ignore")
from sandbox_gym import Sandbox, Snapshot, Template
box = Sandbox.create()
snapshot = box.snapshot()
for call in (
    lambda: snapshot.save("{place}/home/x.sbx"),
    lambda: Snapshot.load("{place}/x.sbx"),
    lambda: Template.build("x"),
):
    try:
        call()
    except Exception as error:
        print(type(error).__name__, "run as root" in str(error))
print(Template.list(), os.listdir("{place}/home"))
box.terminate()
"""
    try:
        skip = shutil.ignore_patterns("__pycache__")
        shutil.copytree(Path(archive.__file__).parent, place / "sandbox_gym", ignore=skip)
        shutil.copyfile(saved, place / "x.sbx")
        (place / "home").mkdir()
        subprocess.run(["chmod", "-R", "a+rX", str(place)], check=True, timeout=10)
        os.chown(place / "home", 65534, 65534)
        done = subprocess.run(
            [python, "-c", code],
            user=65534,
            group=65534,
            extra_groups=[],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            cwd="/",
            env={"HOME": str(place / "home"), "XDG_RUNTIME_DIR": str(place / "home"), "PATH": os.defpath},
        )
    finally:
        shutil.rmtree(place)
    lines = done.stdout.splitlines()
    assert lines[:3] == ["BackendUnavailable True"] * 3, done.stderr
    assert lines[3].startswith("[] [")
