"""Limits where gVisor's kernel, not the host's, holds memory, files and processes."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from sandbox_gym.errors import BackendUnavailable, BudgetExceeded, LimitExceeded, SandboxDied
from sandbox_gym.sandbox import Sandbox, Snapshot
from tests.gvisor.conftest import gvisor

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="runsc restores sandboxes for root only")

_BOMB = ":(){ :|:& };: 2>/dev/null; sleep 60"


@pytest.mark.parametrize(
    "line", ["python3 -c 'bytearray(900 << 20)'", "dd if=/dev/zero of=/dev/shm/x bs=1M count=900"]
)
def test_memory(box: Sandbox, line: str) -> None:
    """Its own kernel is killed with it; the error names the limit."""
    with pytest.raises(LimitExceeded, match="memory: its limit of 536870912 bytes"):
        box.shell(line, timeout=60)
    assert box.status == "dead"


def test_a_memory_limit_that_no_guest_fits_in() -> None:
    with pytest.raises(BackendUnavailable, match="memory limit is too small"):
        Sandbox.create(backend="gvisor", memory="1Mi")


def test_a_fork_bomb_hits_the_limit_and_ends_with_its_command(box: Sandbox) -> None:
    result = box.shell(_BOMB, timeout=2)
    assert result.timed_out
    assert box.run_code("1 + 1").value == "2"
    assert box.shell("echo still", timeout=20).stdout == "still\n"


def test_processes_of_another_user_are_bounded_by_the_host(box: Sandbox) -> None:
    """gVisor counts for each user; a bomb that changes users meets the control group."""
    folder = gvisor()._folder.name
    code = (
        "import os, time\nmade = 0\ntry:\n  for user in range(1000, 1030):\n    for _ in range(60):\n"
        "      if os.fork() == 0:\n        os.setuid(user); time.sleep(60); os._exit(0)\n      made += 1\n"
        "except OSError: pass\nmade"
    )
    with contextlib.suppress(SandboxDied, LimitExceeded):  # what the host refuses ends gVisor's kernel
        box.run_code(code, timeout=20)
    for group in Path("/sys/fs/cgroup").glob(f"**/sandbox-gym-{folder}/*/pids.current"):
        assert int(group.read_text()) <= int((group.parent / "pids.max").read_text())


def test_the_disk_is_full_at_its_size_in_copies_too(box: Sandbox) -> None:
    fill = "head -c 80M /dev/zero > /opt/big; stat -c %s /opt/big"
    first = box.shell(fill)
    assert "No space left on device" in first.stderr and 60 << 20 < int(first.stdout) <= 64 << 20
    (copy,) = box.fork(1)
    with copy:
        assert "No space left" in copy.shell("head -c 1M /dev/zero > /var/tmp/more").stderr
        assert copy.shell("rm /opt/big; echo x > /usr/bin/new && cat /usr/bin/new").stdout == "x\n"


def test_output_is_bounded(box: Sandbox) -> None:
    result = box.shell("head -c 10M /dev/zero | tr '\\0' x")
    assert (len(result.stdout), result.stdout_cut) == (1 << 20, 9 << 20)


def test_the_guest_can_not_mount_or_see_what_lies_below(box: Sandbox) -> None:
    rows = dict(
        row.split(":\t") for row in box.read_text("/proc/self/status").splitlines() if row.startswith("Cap")
    )
    assert int(rows["CapBnd"], 16) & (1 << 21) == int(rows["CapPrm"], 16) & (1 << 21) == 0  # CAP_SYS_ADMIN
    assert not box.shell("mount -t tmpfs x /mnt").ok and not box.shell("umount /proc").ok
    assert box.list_files("/.sandbox-gym/disk") == []


def test_mounts_are_read_only_for_the_host_too(tmp_path: Path) -> None:
    """gVisor alone empties a file that is opened with O_TRUNC, though the mount is read-only."""
    (tmp_path / "file").write_text("given")
    with Sandbox.create(backend="gvisor", mounts=[(tmp_path, "/data"), (tmp_path / "file", "/one")]) as box:
        for line in (
            "echo x > /data/file",
            "truncate -s 0 /data/file",
            ": > /one",
            "rm /data/file",
            "touch /data/x",
        ):
            assert not box.shell(line).ok, line
        assert box.read_text("/data/file") == (tmp_path / "file").read_text() == "given"
        (tmp_path / "file").write_text("changed")
        assert box.read_text("/data/file") == "changed"


def test_a_budget(box: Sandbox, pristine: Snapshot) -> None:
    try:
        gvisor().set_budget(memory=1 << 20, disk=None)
        with pytest.raises(BudgetExceeded, match="of memory"):
            Sandbox.restore(pristine)
        gvisor().set_budget(memory=None, disk=1 << 20)
        with pytest.raises(BudgetExceeded, match="of disk"):
            box.snapshot()
    finally:
        gvisor().set_budget(memory=None, disk=None)
