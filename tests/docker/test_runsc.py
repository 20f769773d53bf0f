"""The daemon's other runtime, gVisor, as docker:runsc."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox_gym.api import Limits, SandboxSpec
from sandbox_gym.backends.docker.client import DockerBackend
from sandbox_gym.errors import BackendUnavailable, SnapshotError
from sandbox_gym.network import Allow
from sandbox_gym.sandbox import Sandbox
from tests.dockerd import Dockerd

_SPEC = SandboxSpec(Limits(memory_bytes=512 << 20, disk_bytes=None))


@pytest.fixture
def runsc(daemon: Dockerd) -> Iterator[DockerBackend]:
    made = DockerBackend("runsc")
    yield made
    made.close()


def test_kernel_copies_and_disk_are_gvisors(runsc: DockerBackend) -> None:
    with Sandbox(runsc, runsc.create(_SPEC, name=None, timeout=60), _SPEC, None) as box:
        assert box.read_text("/proc/version").startswith("Linux version 4.4.0 ")  # what gVisor says to be
        assert not Path("/proc/version").read_text().startswith("Linux version 4.4.0 ")
        box.write_file("/workspace/f", "before")
        box.run_code("x = 1")
        snapshot = box.snapshot()
        assert snapshot.engine == "gvisor"
        box.write_file("/workspace/f", "after")
        for copy in Sandbox.restore_many(snapshot, 2):
            assert copy.run_code("x, open('/workspace/f').read()").value == "(1, 'before')"
            copy.terminate()
        assert box.read_text("/workspace/f") == "after"
        with pytest.raises(SnapshotError, match="leave scope="):
            box.snapshot(scope="disk")
        snapshot.delete()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        allowed = dataclasses.replace(_SPEC, network=Allow(["example.org"]))
        with pytest.raises(BackendUnavailable, match="network inside"):
            runsc.create(allowed, name=None, timeout=60)
    assert runsc.list() == []
