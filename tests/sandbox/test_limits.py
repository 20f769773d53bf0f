"""cpu, memory, processes and disk: what a sandbox may use, and what it hears when that runs out."""

# ruff: noqa: E501  (programs for the guest are text)
from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox_gym.errors import BackendUnavailable, LimitExceeded
from sandbox_gym.sandbox import Sandbox

MIB = 1 << 20


@pytest.fixture
def small() -> Iterator[Sandbox]:
    with Sandbox.create(memory="128Mi", disk="16Mi", pids=20, cpus=0.5) as box:
        yield box


def group_value(box: Sandbox, *names: str) -> str:
    """The content of the first of these files in the control groups of the sandbox."""
    pid = next(row["pid"] for row in box._backend.list() if row["id"] == box.id)
    folder = box._backend._folder.name  # type: ignore[attr-defined]
    for name in names:
        for path in glob.glob(f"/sys/fs/cgroup/*/sandbox-gym-{folder}/*/{name}") + glob.glob(
            f"/sys/fs/cgroup/sandbox-gym-{folder}/*/{name}"
        ):
            try:
                inside = Path(path).parent.joinpath("cgroup.procs").read_text().split()
                if any(_inner_pid(member) == str(pid) for member in inside):
                    return Path(path).read_text().strip()
            except OSError:  # a spare group that has just gone
                continue
    raise AssertionError(f"no {names} for process {pid}")


def _inner_pid(member: str) -> str:
    """A process as its supervisor's pid namespace numbers it: one level below the host."""
    for line in Path(f"/proc/{member}/status").read_text().splitlines():
        if line.startswith("NSpid:"):
            return line.split()[2] if len(line.split()) > 2 else ""
    return ""


def test_limits_reach_the_control_groups(small: Sandbox) -> None:
    for box in (small, *small.fork(1)):
        assert group_value(box, "memory.limit_in_bytes", "memory.max") == str(128 * MIB)
        assert group_value(box, "pids.max") == "21"
        assert group_value(box, "cpu.cfs_quota_us", "cpu.max").split()[0] == "50000"
        if box is not small:
            box.terminate()


def test_a_command_over_the_memory_limit_says_so(small: Sandbox) -> None:
    result = small.exec(["python3", "-c", "x = bytearray(300 << 20)"])
    assert result.exit_code == 137 and result.limit == "memory" and not result.ok
    result = small.shell("kill -9 $$")
    assert result.exit_code == 137 and result.limit is None
    assert small.run_code("1").ok


def test_commands_are_killed_before_the_interpreter(small: Sandbox) -> None:
    small.run_code("x = bytearray(60 << 20)")
    hog = "python3 -c 'y = bytearray(20 << 20); import time; time.sleep(0.3)' &"
    result = small.shell(f"for i in 1 2 3 4 5 6 7; do {hog} done; wait; kill -9 $$")
    assert result.limit == "memory"
    assert small.run_code("len(x)").ok


def test_a_cell_over_the_memory_limit_says_so(small: Sandbox) -> None:
    with pytest.raises(LimitExceeded, match=rf"{small.name}.*memory.*{128 * MIB}"):
        small.run_code("x = bytearray(300 << 20)")
    assert small.status == "dead"


def test_a_copy_has_the_memory_limit_too(small: Sandbox) -> None:
    small.run_code("x = bytearray(64 << 20)")
    (copy,) = small.fork(1)
    with copy, pytest.raises(LimitExceeded, match="memory"):
        copy.run_code("y = bytearray(300 << 20)")
    assert small.run_code("len(x)").value == str(64 * MIB)


def test_running_out_of_memory_in_a_copy_harms_no_sibling(small: Sandbox) -> None:
    small.run_code("x = bytearray(80 << 20)")  # the largest process of all is the frozen origin
    snapshot = small.snapshot()
    copies = Sandbox.restore_many(snapshot, 3)
    for copy in copies[:2]:
        result = copy.exec(["python3", "-c", "y = bytearray(120 << 20)"])
        assert result.exit_code in (0, 137)
        assert result.exit_code == 0 or result.limit == "memory"
        with pytest.raises(LimitExceeded, match="memory"):
            copy.run_code("z = bytearray(200 << 20)")
        assert copies[2].run_code("len(x)").value == small.run_code("len(x)").value
    with Sandbox.restore(snapshot) as another:
        assert another.run_code("len(x)").value == str(80 * MIB)
    for copy in copies:
        copy.terminate()
    snapshot.delete()


def test_a_tmpfs_or_shared_memory_counts(small: Sandbox) -> None:
    result = small.shell("head -c 300000000 /dev/zero > /dev/shm/fill; echo $?")
    assert not result.ok or result.stdout.strip() != "0"  # by the disk's limit or by the memory's
    small.shell("rm -f /dev/shm/fill")


def test_disk(small: Sandbox) -> None:
    result = small.shell("head -c 40000000 /dev/urandom > a")
    assert result.exit_code != 0 and ("quota" in result.stderr or "space" in result.stderr)
    assert small.run_code("print('full'); 'x'").value == "'x'"
    with pytest.raises(OSError, match=r"space|quota"):
        small.write_file("b", os.urandom(2 * MIB))
    assert small.shell("rm -f a b").ok
    small.write_file("c", os.urandom(8 * MIB))
    (copy,) = small.fork(1)
    with copy:  # what its origin wrote counts in the copy
        assert copy.shell("head -c 12000000 /dev/urandom > d").exit_code != 0
        assert copy.shell("rm -f d; head -c 4000000 /dev/urandom > d").ok
    assert small.shell("head -c 4000000 /dev/urandom > d").ok


def test_many_small_files_count_too(small: Sandbox) -> None:
    code = "import os\ntry:\n    for i in range(60_000): os.symlink('x' * 3000, f'd{i}')\nexcept OSError as e: print(e.errno)"
    result = small.run_code(code, timeout=60)
    assert result.stdout.strip() in ("28", "122")
    assert small.run_code("1").ok


def test_pids(small: Sandbox) -> None:
    code = "import os\nn = 0\ntry:\n    while n < 100:\n        if os.fork() == 0:\n            import time; time.sleep(60)\n        n += 1\n"
    result = small.run_code(code + "except OSError as e: print(e.errno)\nn")
    assert result.stdout.strip() == "11" and result.value == "20"


def test_no_limit_is_none() -> None:
    with Sandbox.create(memory=None, disk=None, pids=None, cpus=None) as box:
        assert box.run_code("1").ok
        assert group_value(box, "pids.max") == "max"


@pytest.mark.parametrize(
    "limits",
    [
        {"memory": 0},
        {"memory": -1},
        {"memory": "12 parsecs"},
        {"memory": True},
        {"memory": 1.5},
        {"disk": "0"},
        {"cpus": 0},
        {"cpus": -1},
        {"cpus": "1"},
        {"cpus": float("nan")},
        {"cpus": True},
        {"pids": 0},
        {"pids": 1.5},
        {"pids": True},
        {"ttl": 0},
        {"idle_timeout": -1},
        {"timeout": 0},
    ],
)
def test_a_limit_that_is_none_is_refused(limits: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"above|size|int|seconds|number"):
        Sandbox.create(**limits)  # type: ignore[arg-type]


def test_memory_too_small_for_a_guest_is_an_error_that_says_so() -> None:
    with pytest.raises((BackendUnavailable, LimitExceeded)) as caught, Sandbox.create(memory="1Mi") as box:
        box.run_code("x = bytearray(8 << 20)")
    assert "memory" in str(caught.value)


def test_the_memory_that_its_error_calls_enough_is() -> None:
    with pytest.raises(BackendUnavailable, match=r"\(16Mi is enough") as caught:
        Sandbox.create(memory="1Mi")
    enough = str(caught.value).partition("(")[2].split()[0]
    with Sandbox.create(memory=enough) as box:
        assert box.run_code("6 * 7").value == "42"
