"""What every test shares: the proof, at the end of a run, that its sandboxes left nothing on the machine."""

from __future__ import annotations

import contextlib
import glob
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

if TYPE_CHECKING:
    from sandbox_gym.sandbox import Sandbox

_PATIENCE = 5.0  # seconds in which everything must be gone

# Guests host the tests' own environments, which are in no installed package.
os.environ["PYTHONPATH"] = str(Path(__file__).parent.parent)

# A shell's background jobs ignore it, and so would every process that a test starts and interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# No test is a timed one: by itself hypothesis fails an example that took 0.2 s, as on a busy machine any may.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


def descendants(pid: int) -> set[int]:
    """The processes below one, in any namespace, as the host numbers them."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                parent = int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry))
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        for child in children.get(waiting.pop(), []):
            found.add(child)
            waiting.append(child)
    return found


def guest_pid(box: Sandbox) -> int:
    """The number that the host has for a sandbox's guest."""
    inner = next(int(row["pid"]) for row in box._backend.list() if row["id"] == box.id)
    for pid in descendants(os.getpid()):
        with contextlib.suppress(OSError):
            numbers = Path(f"/proc/{pid}/status").read_text().split("NSpid:")[1].splitlines()[0].split()
            if len(numbers) > 2 and int(numbers[1]) == inner:
                return pid
    raise AssertionError(f"no process {inner} in the supervisor's namespace")


def kill_guest(box: Sandbox) -> None:
    os.kill(guest_pid(box), signal.SIGKILL)


def _identity(pid: int) -> str:
    """Its start time, which tells it from a later process with its number; "" once it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


@dataclass
class Traces:
    """All that one supervisor has on the machine at a moment, to see later what is still there."""

    folder: Path
    processes: dict[int, str] = field(default_factory=dict)
    loops: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, client_pid: int, folder: Path) -> Traces:
        """Of the client with this pid, whose run folder is `folder`."""
        traces = cls(folder, {pid: _identity(pid) for pid in descendants(client_pid)})
        for pid in traces.processes:
            try:
                mounts = Path(f"/proc/{pid}/mounts").read_text()
            except OSError:
                continue
            for line in mounts.splitlines():
                device, place, *_ = line.split()
                if str(folder) in place and device.startswith("/dev/loop"):
                    traces.loops[device] = cls._backing(device)
        return traces

    @staticmethod
    def _backing(device: str) -> str:
        try:
            return (Path("/sys/block") / device[5:] / "loop/backing_file").read_text()
        except OSError:
            return ""

    def left(self) -> list[str]:
        """What is there now."""
        found = [
            f"process {pid}"
            for pid, identity in self.processes.items()
            if identity and _identity(pid) == identity
        ]
        found += [
            f"loop device {device}"
            for device, file in self.loops.items()
            if file and self._backing(device) == file
        ]
        for pattern in ("/sys/fs/cgroup", "/sys/fs/cgroup/*", "/sys/fs/cgroup/*/*"):
            found += [
                f"control group {path}" for path in glob.glob(f"{pattern}/sandbox-gym-{self.folder.name}")
            ]
        if self.folder.exists():
            found.append(f"run folder {self.folder}")
        for entry in os.listdir("/proc"):
            try:
                if entry.isdigit() and self.folder.name in Path(f"/proc/{entry}/mountinfo").read_text():
                    found.append(f"mounts in the namespace of process {entry}")
            except OSError:
                continue
        return found

    def assert_gone(self, patience: float = _PATIENCE) -> None:
        deadline = time.monotonic() + patience
        while (found := self.left()) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not found, f"left {patience} s later: {found}"


@pytest.fixture(scope="session")
def traces_of() -> Callable[[int, Path], Traces]:
    """`traces_of(client pid, run folder)`: see Traces."""
    return Traces.of


@pytest.fixture(scope="session", autouse=True)
def nothing_left_on_the_machine() -> Iterator[None]:
    """After the last test: this process's supervisors end, and all that they had is gone."""
    yield
    from sandbox_gym.backends import lookup
    from sandbox_gym.backends.shared.supervised import Supervised

    traces = [
        Traces.of(os.getpid(), backend._folder)
        for backend in lookup._made.values()
        if isinstance(backend, Supervised)
    ]
    lookup.shut_down()
    for trace in traces:
        trace.assert_gone()
