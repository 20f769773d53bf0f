"""Sandboxes whose memory comes when it is touched: large ones to restore, and what can be seen of their pagers."""

# ruff: noqa: E501  (programs for the guest are text)
from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sandbox_gym.backends import lookup
from sandbox_gym.backends.native import lazy
from sandbox_gym.sandbox import Sandbox, Snapshot
from tests.conftest import descendants

MB = 1 << 20

BUILD = """
import ctypes, mmap, os, random, subprocess, threading, time
MB = 1 << 20
def page(i): return (b"%015d\\n" % i) * 256
def anonymous(size): return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
def built(size, base):
    area = anonymous(size)
    for i in range(size >> 12):
        area[i << 12 : (i + 1) << 12] = page(base + i)
    return area
def wrong(area, base, numbers):
    return [i for i in numbers if area[i << 12 : (i + 1) << 12] != (page(base + i) if base is not None else bytes(4096))]
big = built(48 * MB, 0)
small = built(8 * MB, 1_000_000)
PAGES = len(big) >> 12
"""


BUILD_CHILD = """
code = '''
import sys
data = bytearray(b"".join(b"%015d\\\\n" % i for i in range(3 << 20)))
print("built", flush=True)
for line in sys.stdin:
    place = int(line)
    print(bytes(data[place * 16 : place * 16 + 15]).decode(), flush=True)
'''
child = subprocess.Popen(["python3", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
assert child.stdout.readline() == "built\\n"
"""


@pytest.fixture(scope="module")
def _image() -> Iterator[Callable[[], Snapshot]]:
    """A tree of two processes and three threads, each process with more memory than is restored at once."""
    kept: list[tuple[object, Snapshot]] = []

    def get() -> Snapshot:
        backend = lookup.get("native")
        if not kept or kept[-1][0] is not backend:
            with Sandbox.create(memory="1Gi", cpus=2) as box:
                run(box, BUILD + "threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()")
                run(box, BUILD_CHILD)
                kept[:] = [(backend, box.snapshot())]
        return kept[0][1]

    yield get
    for _, snapshot in kept:
        snapshot.delete()


@pytest.fixture
def image(_image: Callable[[], Snapshot]) -> Snapshot:
    snapshot = _image()
    assert snapshot.engine == "criu" and snapshot.memory_bytes > 3 * lazy.FROM_BYTES
    return snapshot


@pytest.fixture
def copy(image: Snapshot) -> Iterator[Sandbox]:
    with Sandbox.restore(image) as sandbox:
        yield sandbox


@pytest.fixture(scope="module")
def plain() -> Iterator[Snapshot]:
    """Of one process and one thread: what the fork engine takes too."""
    with Sandbox.create(memory="512Mi", cpus=2) as box:
        run(box, BUILD)
        snapshot = box.snapshot(engine="criu")
    yield snapshot
    snapshot.delete()


def run(box: Sandbox, code: str) -> str | None:
    result = box.run_code(code, timeout=60)
    assert result.ok, result.error or result
    return result.value


def pagers() -> set[int]:
    """The processes of this client that hold a userfaultfd."""
    return {pid for pid in descendants(os.getpid()) if userfaultfds(pid)}


def userfaultfds(pid: int) -> int:
    try:
        links = [os.readlink(entry.path) for entry in os.scandir(f"/proc/{pid}/fd")]
    except OSError:
        return 0
    return links.count("anon_inode:[userfaultfd]")


def private_bytes(box: Sandbox) -> int:
    (root,) = [row["pid"] for row in box._backend.list() if row["id"] == box.id]
    text = _inside("cat", f"/proc/{root}/smaps_rollup")
    return sum(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Private_"))


def image_folders() -> set[str]:
    folder = lookup.get("native")._folder  # type: ignore[attr-defined]
    return {name for name in _inside("ls", f"{folder}/disk").split() if name.startswith("image")}


def _inside(*command: str) -> str:
    """What a command prints among the supervisor's mounts and processes."""
    supervisor = next(pid for pid in descendants(os.getpid()) if _is_first(pid))
    enter = ["nsenter", "-t", str(supervisor), "-m", "-p", *command]
    return subprocess.run(enter, check=True, capture_output=True, text=True, timeout=10).stdout


def _is_first(pid: int) -> bool:
    """Whether it is process 1 of the supervisor's namespace: of the client's mounts no longer, of its users still."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        same = os.stat(f"/proc/{pid}/ns/user").st_ino == os.stat("/proc/self/ns/user").st_ino
    except OSError:
        return False
    return same and re.search(r"^NSpid:\t\d+\t1$", status, re.MULTILINE) is not None


def eventually(condition: Callable[[], object], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to be"
        time.sleep(0.01)


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
