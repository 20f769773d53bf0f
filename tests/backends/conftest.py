"""Packages that name backends, as pip would leave them in a folder on sys.path; and a daemon for docker."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from sandbox_gym.backends import lookup

Ready = Callable[[str], None]
Install = Callable[[Mapping[str, str]], Path]


@pytest.fixture
def distribution(tmp_path: Path) -> Install:
    """`distribution({"mine": "package:Class"})`: a folder with an installed package that names these backends."""

    def install(entry_points: Mapping[str, str]) -> Path:
        info = tmp_path / "packages/their_sandboxes-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-sandboxes\nVersion: 1.0\n")
        lines = [f"{name} = {value}" for name, value in entry_points.items()]
        (info / "entry_points.txt").write_text("\n".join([f"[{lookup.ENTRY_POINTS}]", *lines, ""]))
        return info.parent

    return install


@pytest.fixture
def installed(distribution: Install, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """`installed(mine="package:Class")`: such a package in this process. What it has made ends with the test."""
    before = set(lookup._made)

    def install(**entry_points: str) -> None:
        monkeypatch.syspath_prepend(distribution(entry_points))

    yield install
    for key in set(lookup._made) - before:
        if key[0] == os.getpid():
            lookup._made.pop(key).close()


@pytest.fixture(scope="module")
def docker_daemon() -> Iterator[None]:
    """A docker daemon of the module's own, which DOCKER_HOST names: others find the machine without one."""
    dockerd, places = (importlib.import_module(f"tests.{name}") for name in ("dockerd", "docker.conftest"))
    with places.a_folder() as folder, dockerd.started(folder) as daemon, places.using(daemon):
        yield


@pytest.fixture
def ready(request: pytest.FixtureRequest) -> Ready:
    """`ready(backend)`: from now on, what that backend needs is there."""

    def make(backend: str) -> None:
        if backend == "docker":
            request.getfixturevalue("docker_daemon")

    return make
