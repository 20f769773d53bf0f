"""What `sandbox-gym doctor`, `ls` and `gc` say of a docker daemon."""

from __future__ import annotations

import os
import signal

import pytest

from sandbox_gym import cli
from sandbox_gym.backends.docker import probe
from sandbox_gym.sandbox import Sandbox
from tests import dockerd
from tests.docker.conftest import Client, a_folder, backend, using
from tests.dockerd import Dockerd


def test_ls_shows_sandboxes_and_snapshots(box: Sandbox, capsys: pytest.CaptureFixture[str]) -> None:
    snapshot = box.snapshot()
    assert cli.main(["ls"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "running" in lines[box.id] and "MiB" in lines[box.id] and str(os.getpid()) in lines[box.id]
    assert "snapshot" in lines[snapshot.id]


def test_gc_removes_what_the_dead_have_left(client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    process = client(
        "box = Sandbox.create(backend='docker'); kept = box.snapshot()\n"
        "print(box._backend._keeper._process.pid, flush=True); sys.stdin.read()"
    )
    assert process.stdout is not None
    os.kill(int(process.stdout.readline()), signal.SIGKILL)
    process.kill()
    process.wait()
    assert cli.main(["gc", "--dry-run"]) == 0
    assert "would remove container" in capsys.readouterr().out
    assert cli.main(["gc"]) == 0
    assert "removed image sha256:" in capsys.readouterr().out
    assert cli.main(["gc"]) == 0
    assert "docker" not in capsys.readouterr().out
    assert backend().alive()


def test_doctor(daemon: Dockerd, monkeypatch: pytest.MonkeyPatch) -> None:
    found = probe.check()
    assert (found.state, found.remedy) == ("ok", "") and "runc" in found.meaning
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent/socket")
    found = probe.check()
    assert found.state == "limited" and "systemctl start docker" in found.remedy


def test_doctor_names_what_checkpoints_lack() -> None:
    with a_folder() as folder, dockerd.started(folder, experimental=False) as plain, using(plain):
        found = probe.check()
        assert found.state == "limited" and '{"experimental": true}' in found.remedy
