"""Attempts that the host has to watch: to take more than one's share, and to fool the client. Verdicts as probe's."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from sandbox_gym.errors import BackendUnavailable, ProtocolError, SandboxError
from sandbox_gym.sandbox import Sandbox

_PIDS, _MEMORY, _DISK = 60, 256 << 20, 64 << 20
_SLACK = 100  # processes of the machine's own, and of whoever else is at work
_WIRE = """
import sys, time
frame = sys._getframe()
while type(frame.f_locals.get('self')).__name__ != 'Agent':
    frame = frame.f_back
wire = frame.f_locals['self'].connection.sock
"""


def run(backend: str) -> dict[str, str]:
    """The verdict on each. Raises AssertionError where another sandbox was harmed."""
    limits = {"pids": _PIDS, "memory": _MEMORY}
    found = {}
    with Sandbox.create(backend=backend) as other:
        for name, attempt in _ATTEMPTS.items():
            with Sandbox.create(backend=backend, **limits) as box:  # type: ignore[arg-type]
                found[name] = attempt(box)
            assert other.run_code("6 * 7", timeout=30).value == "42", f"{name} harmed another sandbox"
        found["disk bomb"] = _disk_bomb(backend)
    return found


def _fork_bomb(box: Sandbox) -> str:
    before = len(_pids())
    with _peak(lambda: len(_pids())) as peak, contextlib.suppress(SandboxError):
        box.shell("b() { b | b & }; b; b; sleep 60", timeout=3)
    return "contained" if peak[0] - before <= 2 * _PIDS + _SLACK else "possible"


def _memory_bomb(box: Sandbox) -> str:
    """Many processes that take memory, and files in memory."""
    before = _available()
    hog = "import os\nfor _ in range(6): os.fork()\nx = bytearray(1 << 28)\nimport time; time.sleep(60)"
    with _peak(lambda: before - _available()) as peak:
        with contextlib.suppress(SandboxError):
            box.exec(["python3", "-c", hog], timeout=4)
        with contextlib.suppress(SandboxError):
            box.shell("head -c 600000000 /dev/zero > /dev/shm/x", timeout=10)
    return "contained" if peak[0] < 3 * _MEMORY else "possible"


def _disk_bomb(backend: str) -> str:
    try:
        box = Sandbox.create(backend=backend, disk=_DISK)
    except BackendUnavailable:
        return "possible"  # it can't be bounded here
    with box:
        fill = "for d in . /tmp /root /var/tmp; do head -c 50000000 /dev/urandom > $d/fill || exit 9; done"
        return "contained" if box.shell(fill, timeout=60).exit_code == 9 else "possible"


def _descriptor_bomb(box: Sandbox) -> str:
    code = "import os\nkept = []\ntry:\n    while True: kept.append(os.open('/dev/null', os.O_RDONLY))\n"
    code += "except OSError as e: print(e)"
    before = _open_files()
    with _peak(lambda: _open_files() - before) as peak:
        result = box.exec(["python3", "-c", code], timeout=60)
    return "contained" if "Too many" in result.stdout and peak[0] < 1 << 21 else "possible"


def _flood_of_output(box: Sandbox) -> str:
    result = box.shell("yes | head -c 100000000", timeout=60)
    return "contained" if len(result.stdout) <= 1 << 20 else "possible"


def _garbage(box: Sandbox) -> str:
    try:
        result = box.run_code(_WIRE + "wire.sendall(bytes(range(256)) * 64); time.sleep(30)", timeout=5)
        if result.timed_out:
            box.run_code("1", timeout=5)
    except SandboxError:
        return "refused"
    return "possible"


def _links(box: Sandbox) -> str:
    """A download that would write, or make a link, outside of where it is to go."""
    with tempfile.TemporaryDirectory(prefix="sandbox-gym-probe-") as folder:
        for trick in (f"ln -s {folder} d/x; mkdir d/y; touch d/y/z", "ln -s ../../.. d/x", "mkfifo d/x"):
            box.shell(f"rm -rf d; mkdir d; {trick}", timeout=30)
            try:
                box.download("d", Path(folder, "target"))
            except ProtocolError:
                continue
            return "possible"
        return "refused" if os.listdir(folder) == [] else "possible"


_ATTEMPTS: dict[str, Callable[[Sandbox], str]] = {
    "fork bomb": _fork_bomb,
    "memory bomb": _memory_bomb,
    "bomb of open files": _descriptor_bomb,
    "flood of output": _flood_of_output,
    "garbage to the client": _garbage,
    "links that lead a download elsewhere": _links,
}


@contextlib.contextmanager
def _peak(measure: Callable[[], int]) -> Iterator[list[int]]:
    """The most that `measure` says meanwhile."""
    most, over = [measure()], threading.Event()

    def watch() -> None:
        while not over.wait(0.05):
            most[0] = max(most[0], measure())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield most
    finally:
        over.set()
        thread.join()


def _pids() -> list[str]:
    return [name for name in os.listdir("/proc") if name.isdigit()]


def _available() -> int:
    return next(
        int(line.split()[1]) << 10
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemAvailable:")
    )


def _open_files() -> int:
    return int(Path("/proc/sys/fs/file-nr").read_text().split()[0])
