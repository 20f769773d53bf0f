"""Sandboxes to save, places to save them in, and clients in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import sandbox_gym
from sandbox_gym import archive, template
from sandbox_gym.backends import lookup
from sandbox_gym.backends.native import criu
from sandbox_gym.backends.shared import programs
from sandbox_gym.sandbox import Sandbox, Snapshot

ROOT = Path(sandbox_gym.__file__).parent.parent


@pytest.fixture(scope="session", autouse=True)
def _criu() -> None:
    found = criu.look()
    if isinstance(found, programs.Lack):
        pytest.skip(f"nothing can be saved here: {found.why}")


@pytest.fixture(scope="session")
def pristine() -> Iterator[Snapshot]:
    snapshot = Sandbox.create(memory="512Mi", disk="256Mi").freeze("pristine")
    yield snapshot
    snapshot.delete()


@pytest.fixture
def box(pristine: Snapshot) -> Iterator[Sandbox]:
    with Sandbox.restore(pristine) as sandbox:
        yield sandbox


@pytest.fixture(scope="session")
def saved(pristine: Snapshot, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An archive of several parts."""
    path = tmp_path_factory.mktemp("saved") / "x.sbx"
    with Sandbox.restore(pristine) as box:
        box.shell("echo 1 > one")
        first = box.snapshot()
        box.shell("echo 2 > two")
        snapshot = box.snapshot()
        snapshot.save(path)
        snapshot.delete()
        first.delete()
    with open(path, "rb") as file:
        assert len(archive.read(file)[0].parts) >= 3
    return path


@pytest.fixture(scope="module", autouse=True)
def no_template_stays_ready() -> Iterator[None]:
    """Or a later test's template pushes them out in the middle of it."""
    yield
    template._slots.clear()


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where templates of this test lie."""
    home = tmp_path / "home"
    monkeypatch.setenv("SANDBOX_GYM_HOME", str(home))
    return home


Client = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def client() -> Iterator[Client]:
    """`client(code)`: a process of its own that runs `code`, with sandbox_gym as sg."""
    started: list[subprocess.Popen[str]] = []

    def start(code: str) -> subprocess.Popen[str]:
        head = f"import os, sys, time; sys.path.insert(0, {str(ROOT)!r})\nimport sandbox_gym as sg\n"
        process = subprocess.Popen(
            [sys.executable, "-c", head + code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def said(process: subprocess.Popen[str]) -> str:
    """What a client printed, once it has ended well."""
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return out.strip()


def on_disk() -> set[str]:
    """What this process's supervisor has on its disk: layers and images. Once nothing changes there any more."""
    folder: Path = lookup.get("native")._folder  # type: ignore[attr-defined]
    supervisor = json.loads((folder / "info.json").read_text())["supervisor_pid"]
    place = f"/proc/{supervisor}/root{folder}/disk"
    deadline = time.monotonic() + 5
    found = set(os.listdir(place))
    while time.monotonic() < deadline:
        time.sleep(0.05)  # parts made ahead, and the dead taken apart
        before, found = found, set(os.listdir(place))
        if before == found:
            return found
    raise AssertionError("it went on changing")


def rows() -> list[str]:
    """The ids of all sandboxes and snapshots of this process."""
    backend = lookup.get("native")
    backend.release("")  # any request: those are released before it whose handles are garbage
    return sorted(row["id"] for row in backend.list())


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Of what the test tried in vain: no layer, image, snapshot or sandbox."""
    before = rows(), on_disk()
    yield
    assert (rows(), on_disk()) == before


@pytest.fixture
def no_image_left() -> Iterator[None]:
    """The same where sandboxes come and go, and with them the layers that are made ahead."""

    def images() -> set[str]:
        return {name for name in on_disk() if not name.isdigit()}

    template._slots.clear()  # as in a client that has started nothing yet
    before = rows(), images()
    yield
    template._slots.clear()
    assert (rows(), images()) == before
