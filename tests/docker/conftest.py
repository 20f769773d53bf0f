"""A docker daemon for each file of tests, and the proof that each test took back what it had made there."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import sandbox_gym
from sandbox_gym._snapshot import held as handles
from sandbox_gym.backends import lookup
from sandbox_gym.backends.docker.client import DockerBackend
from sandbox_gym.backends.docker.daemon import Daemon
from sandbox_gym.backends.docker.owners import OWNER
from sandbox_gym.sandbox import Sandbox
from tests import dockerd
from tests.dockerd import Dockerd
from tests.network.conftest import echo, web
from tests.sandbox.conftest import python_layer, small_root

__all__ = ["echo", "python_layer", "small_root", "web"]
PATIENCE = 20.0  # seconds in which what ends must be gone
Client = Callable[..., "subprocess.Popen[str]"]


def backend() -> DockerBackend:
    made = lookup.get("docker")
    assert isinstance(made, DockerBackend)
    return made


def end_backends() -> None:
    for key in [key for key, made in lookup._made.items() if isinstance(made, DockerBackend)]:
        lookup._made.pop(key).close()


def until(what: Callable[[], bool]) -> None:
    """Waits for it."""
    deadline = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextmanager
def using(daemon: Dockerd) -> Iterator[Dockerd]:
    """It is this process's daemon meanwhile."""
    end_backends()
    before = os.environ.get("DOCKER_HOST")
    os.environ["DOCKER_HOST"] = daemon.url
    try:
        yield daemon
    finally:
        end_backends()
        if before is None:
            del os.environ["DOCKER_HOST"]
        else:
            os.environ["DOCKER_HOST"] = before


@contextmanager
def a_folder() -> Iterator[Path]:
    """In memory, where there is room: a daemon writes all through."""
    memory = "/dev/shm" if shutil.disk_usage("/dev/shm").free > 2 << 30 else None
    with tempfile.TemporaryDirectory(prefix="sandbox-gym-dockerd-", dir=memory) as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Dockerd]:
    with a_folder() as folder, dockerd.started(folder) as made, using(made):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # a test looks at it
            Sandbox.create(backend="docker").terminate()  # what is made once
        yield made


def held(daemon: Daemon, label: str = OWNER) -> set[str]:
    """All that is there with that label."""
    found = {row["Id"] for row in (*daemon.containers(label), *daemon.images(label), *daemon.networks(label))}
    return found | {row["Name"] for row in daemon.volumes(label)}


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Containers and images, and descriptors, before and after; roots of sandboxes stay until their client ends."""
    if "daemon" not in request.fixturenames:
        yield
        return
    request.getfixturevalue("daemon")
    there = backend()._daemon
    before, descriptors = held(there), len(os.listdir("/proc/self/fd"))
    boxes = Sandbox.list()
    yield
    assert Sandbox.list() == boxes
    if not backend().alive() or backend()._daemon is not there:
        end_backends()
        return
    for snapshot in handles(backend()):
        snapshot.delete()

    def gone() -> bool:
        backend()._tend()  # handles that were garbage
        backend()._population.drop_images()
        return {row for row in held(there) - before if row not in roots(there)} == set()

    until(gone)
    gc.collect()  # of what a failed connection has left in its error
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def roots(daemon: Daemon) -> set[str]:
    return {
        row["Id"] for row in daemon.images(f"{OWNER}") if row["Labels"].get("sandbox-gym.kind") == "image"
    }


@pytest.fixture
def box(daemon: Dockerd) -> Iterator[Sandbox]:
    with Sandbox.create(backend="docker", memory="512Mi", pids=64, disk=None) as made:
        yield made


@pytest.fixture
def client(daemon: Dockerd) -> Iterator[Client]:
    """`client(code)`: a process of its own that runs it with Sandbox imported; its stdio are pipes."""
    started: list[subprocess.Popen[str]] = []
    root = str(Path(sandbox_gym.__file__).parent.parent)
    head = f"import sys; sys.path.insert(0, {root!r})\nfrom sandbox_gym.sandbox import Sandbox\n"

    def start(code: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-W", "ignore", "-c", head + code]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        started.append(subprocess.Popen(command, text=True, **pipes))  # type: ignore[call-overload]
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
