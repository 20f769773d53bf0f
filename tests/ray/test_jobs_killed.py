"""Workers that are killed, items that never end, callers that stop: nothing is left, and the others are done."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sandbox_gym.backends.shared import registry
from sandbox_gym.errors import ItemFailed, SandboxDied, SandboxTimeout
from sandbox_gym.ray import job
from sandbox_gym.sandbox import Sandbox
from tests.conftest import descendants
from tests.ray.test_jobs import nothing_runs, until

pytestmark = pytest.mark.usefixtures("cluster")


@pytest.fixture(autouse=True)
def _all_is_freed() -> Iterator[None]:
    yield
    until(nothing_runs)


def hold(box: Sandbox, place: Path) -> None:
    """Never ends; tells, once it is busy, of this process and its run folder."""
    box.start(["sleep", "1000"])
    told = {"pid": os.getpid(), "folder": str(box._backend._folder)}  # type: ignore[attr-defined]
    place.with_suffix(".new").write_text(json.dumps(told))
    place.with_suffix(".new").rename(place)
    box.shell("sleep 1000", timeout=1000)


@dataclass(frozen=True)
class Held:
    """What one that holds had on the machine: its run folder, and its processes with their start times."""

    folder: Path
    started: dict[int, int | None]

    @classmethod
    def look(cls, place: Path) -> Held:
        until(place.exists)
        told = json.loads(place.read_text())
        pids = {told["pid"], *descendants(told["pid"])}
        assert len(pids) >= 4  # the worker, its supervisor, a guest, and what runs there
        return cls(Path(told["folder"]), {pid: registry.start_time(pid) for pid in pids})

    def until_gone(self) -> None:
        until(lambda: not self.folder.exists())
        for pid, started in self.started.items():
            until(partial(_ended, pid, started))


def _ended(pid: int, started: int | None) -> bool:
    return started is None or registry.start_time(pid) != started


def test_a_worker_that_is_killed(tmp_path: Path) -> None:
    @job(cpus=4, retries=1)
    def deadly(number: int) -> int:
        with (tmp_path / str(number)).open("a") as log:
            log.write("x")
        if number == 20 or (number == 10 and (tmp_path / "10").read_text() == "x"):
            os.kill(os.getpid(), signal.SIGKILL)
        return number

    results = list(deadly.map(range(30), return_exceptions=True))
    failed = results.pop(20)
    assert results == [number for number in range(30) if number != 20]
    assert isinstance(failed, ItemFailed) and (failed.index, failed.attempts) == (20, 2)
    assert isinstance(failed.cause, SandboxDied) and "its worker died: The actor died" in str(failed)
    tried = [len((tmp_path / str(number)).read_text()) for number in range(30)]
    assert tried[10] == 2
    assert 2 <= tried[20] <= 3  # once perhaps beside others, where nobody is blamed
    assert all(count <= 2 for number, count in enumerate(tried) if number not in (10, 20))


def test_an_item_that_takes_too_long(tmp_path: Path) -> None:
    """One waits for a busy sandbox, one is stopped, as if it never came out of a library's code."""

    @job(cpus=4, retries=1, timeout=2)
    def slow(number: int) -> int:
        if number == 1 or (number == 3 and not (tmp_path / "3").exists()):
            with Sandbox.create() as box, Sandbox.create():
                if number == 3:
                    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGSTOP)).start()
                hold(box, tmp_path / str(number))
        return number

    held: dict[int, Held] = {}

    def look() -> None:
        for number in (1, 3):
            held[number] = Held.look(tmp_path / str(number))

    looking = threading.Thread(target=look)
    looking.start()
    results = list(slow.map(range(6), return_exceptions=True))
    looking.join()
    failed = results.pop(1)
    assert results == [0, 2, 3, 4, 5]
    assert isinstance(failed.cause, SandboxTimeout) and failed.attempts == 2
    assert "took more than 2 s" in str(failed)
    for one in held.values():
        one.until_gone()
    assert len(held) == 2


@pytest.mark.parametrize("way", ["closed", "garbage", "error"])
def test_a_map_that_is_given_up(way: str, tmp_path: Path) -> None:
    @job(cpus=4)
    def play(number: int) -> int:
        if number:
            with Sandbox.create() as box:
                hold(box, tmp_path / "held")
        return number

    results = play.map([0, 1])
    assert next(results) == 0
    held = Held.look(tmp_path / "held")
    if way == "closed":
        results.close()  # type: ignore[attr-defined]
    elif way == "garbage":
        del results
    else:
        with pytest.raises(RuntimeError, match="mine"):
            results.throw(RuntimeError("mine"))  # type: ignore[attr-defined]
    held.until_gone()


SCRIPT = """
import json, os, sys
from pathlib import Path
from sandbox_gym import Sandbox
from sandbox_gym.ray import job

place = Path(sys.argv[1])
with Sandbox.create() as box:
    box.run_code("x = 5")
    snapshot = box.snapshot()

@job(cpus=1, memory=None)
def play(number):
    with Sandbox.restore(snapshot) as box:
        if number == 0:
            return box.run_code("x").value
        box.start(["sleep", "1000"])
        (place / "new").write_text(json.dumps({"pid": os.getpid(), "folder": str(box._backend._folder)}))
        (place / "new").rename(place / "held")
        box.shell("sleep 1000", timeout=1000)

for result in play.map([0, 1, 2]):
    (place / "result").write_text(result)
"""


@pytest.fixture
def temporary() -> Iterator[str]:
    """A place for Ray that knows of no other Ray; short, for sockets lie there."""
    place = tempfile.mkdtemp(prefix="sg-")
    os.mkdir(f"{place}/ray")
    yield place
    shutil.rmtree(place, ignore_errors=True)


@pytest.mark.parametrize("where", ["here", "cluster"])
def test_ctrl_c_in_a_script(where: str, cluster: Any, temporary: str, tmp_path: Path) -> None:
    """The same script starts a Ray of its own, or finds the cluster by its address; and is interrupted there."""
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {**os.environ, "RAY_TMPDIR": temporary, "RAY_ADDRESS": cluster.address}
    if where == "here":
        del environment["RAY_ADDRESS"]
    process = subprocess.Popen(
        [sys.executable, "script.py", str(tmp_path)],
        cwd=tmp_path,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        until(lambda: (tmp_path / "held").exists() or process.poll() is not None, 60)
        assert process.poll() is None, process.stderr and process.stderr.read()
        held = Held.look(tmp_path / "held")
        until((tmp_path / "result").exists)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert "KeyboardInterrupt" in said and process.returncode != 0
    assert (tmp_path / "result").read_text() == "5"
    held.until_gone()
