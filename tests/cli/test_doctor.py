"""`sandbox-gym doctor` says what is so: here, where something is taken away, and for an ordinary user."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from sandbox_gym import doctor
from sandbox_gym.backends.native import cgroups, probe
from sandbox_gym.checks import Check
from sandbox_gym.guest import syscalls

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="takes something away that only root has")


def named(checks: list[Check], name: str) -> Check:
    return next(check for check in checks if check.name == name)


def in_child(prepare: Callable[[], None], code: Callable[[], list[Check]]) -> list[Check]:
    """What `code` gives in a forked process after `prepare`: what has been imported stays readable to any user."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            prepare()
            os.write(write, json.dumps([asdict(check) for check in code()]).encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    return [Check(**fields) for fields in json.loads(text)]


def become_nobody() -> None:
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
    syscalls.prctl(4, 1)  # PR_SET_DUMPABLE: what exec would have done


def test_here(capfd: pytest.CaptureFixture[str]) -> None:
    status = doctor.report()
    lines = capfd.readouterr().out.splitlines()
    assert status == 0
    assert lines[-1] == "The native backend works here."
    assert [line for line in lines if line.startswith("ok ") and "native backend" in line]


def test_each_check_of_this_machine() -> None:
    found = probe.checks()
    names = [check.name for check in found]
    assert len(set(names)) == len(names)
    wrong = [check for check in found if check.state == "missing"]
    assert not wrong
    assert all(check.remedy for check in found if check.state != "ok")


def test_probes_leave_nothing() -> None:
    probe.checks()
    left = [line for line in Path("/proc/self/mounts").read_text().splitlines() if "doctor" in line]
    left += map(str, Path(tempfile.gettempdir()).glob("sandbox-gym-doctor-*"))
    left += [
        str(root)
        for root in cgroups.find().roots.values()
        if (root / f"sandbox-gym-doctor-{os.getpid()}").exists()
    ]
    assert not left


@as_root
def test_as_an_ordinary_user() -> None:
    found = in_child(become_nobody, probe.checks)
    assert {check.name for check in found if check.state == "missing"} == set()
    assert named(found, "disk limits").state == "limited"
    assert "tmpfs" in named(found, "disk limits").meaning


@as_root
def test_without_mkfs_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    check = named(probe.checks(), "disk limits")
    assert (check.state, check.remedy) == ("missing", "apt-get install -y btrfs-progs mount")


def test_without_user_namespaces_the_sysctl_is_named() -> None:
    """A user namespace may lower the number for those within: so this harms nobody else."""
    script = f'echo 0 > /proc/sys/user/max_user_namespaces && exec "{sys.executable}" -m sandbox_gym doctor'
    command = ["unshare", "--user", "--map-root-user", "sh", "-c", script]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, cwd=Path.cwd())
    assert result.returncode == 1, result.stderr
    lines = result.stdout.splitlines()
    at = next(i for i, line in enumerate(lines) if line.split()[1:3] == ["user", "namespaces"])
    assert lines[at].startswith("missing")
    assert lines[at + 1].strip() == "-> sysctl -w user.max_user_namespaces=15000"
    assert lines[-1] == "The native backend does not work here."


def test_a_machine_of_another_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    checks, works = doctor.diagnose()
    assert not works
    assert "riscv64" in named(checks, "machine").meaning


def test_absent_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert shutil.which("docker") is None
    check = doctor._docker()
    assert check.state == "missing"
    assert check.remedy.startswith("apt-get install")
