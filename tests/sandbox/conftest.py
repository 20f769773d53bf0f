"""Cheap sandboxes for each test, and the proof after each that it gave back what it took."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import sandbox_gym
from sandbox_gym.backends import lookup
from sandbox_gym.sandbox import Sandbox, Snapshot
from tests.images.making import folder, link


@pytest.fixture(scope="session")
def _pristine() -> Iterator[Callable[[], Snapshot]]:
    """A snapshot to fork from; made again when a test has killed its supervisor."""
    kept: list[tuple[Any, Snapshot]] = []

    def get() -> Snapshot:
        backend = lookup.get("native")
        if not kept or kept[-1][0] is not backend:
            kept[:] = [(backend, Sandbox.create(memory="512Mi", disk="256Mi", pids=128).freeze("pristine"))]
        return kept[0][1]

    yield get
    for _, snapshot in kept:
        snapshot.delete()


@pytest.fixture
def pristine(_pristine: Callable[[], Snapshot]) -> Snapshot:
    """A snapshot of a fresh sandbox: 512 MiB of memory, 256 MiB of disk, 128 processes."""
    return _pristine()


@pytest.fixture
def box(pristine: Snapshot) -> Iterator[Sandbox]:
    """A fresh sandbox, made in milliseconds."""
    with Sandbox.restore(pristine) as sandbox:
        yield sandbox


@pytest.fixture
def boxes(pristine: Snapshot) -> Iterator[Callable[[int], list[Sandbox]]]:
    """`boxes(n)`: n siblings."""
    made: list[Sandbox] = []

    def make(n: int) -> list[Sandbox]:
        made.extend(Sandbox.restore_many(pristine, n))
        return made[-n:]

    yield make
    for sandbox in made:
        sandbox.terminate()


def _holdings() -> dict[str, Any]:
    backend = lookup.get("native")
    rows = backend.list()
    return {
        "sandboxes": sorted(row["id"] for row in rows if row["state"] == "running"),
        "snapshots": sorted(row["id"] for row in rows if row["state"] == "snapshot"),
        "handles": sorted(box.id for box in Sandbox.list()),
    }


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest, _pristine: Callable[[], Snapshot]) -> Iterator[None]:
    """Sandboxes, snapshots and descriptors of this process, before and after each test."""
    _pristine()
    before, descriptors = _holdings(), _descriptors()
    supervisor = lookup.get("native")
    yield
    if lookup.get("native") is not supervisor:  # the test killed it: the next one starts from nothing
        _pristine()
        return
    deadline = time.monotonic() + 3.0
    while (after := _holdings()) != before and time.monotonic() < deadline:
        time.sleep(0.01)
    for left in Sandbox.list():  # so that one test's leak is not the next one's, too
        if left.id not in before["handles"]:
            left.terminate()
    assert after == before
    # Connections to the supervisor are kept, one for each thread that ever asked at once.
    assert _descriptors() - len(supervisor._idle) <= descriptors + 1  # type: ignore[attr-defined]


@pytest.fixture
def run_folder() -> Path:
    """Of this process's supervisor."""
    folder = lookup.get("native")._folder  # type: ignore[attr-defined]
    assert isinstance(folder, Path)
    return folder


@pytest.fixture
def client() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """`client(code, **env)`: a process of its own that runs `code` with Sandbox imported; its stdio are pipes."""
    started: list[subprocess.Popen[str]] = []
    root = str(Path(sandbox_gym.__file__).parent.parent)
    head = f"import os, sys; sys.path.insert(0, {root!r})\nfrom sandbox_gym.sandbox import Sandbox\n"

    def start(code: str, **env: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", head + code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **env},
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture(scope="session")
def small_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root file system of its own: this machine's /usr/bin/python3, its standard library and what they link to."""
    root = tmp_path_factory.mktemp("image") / "root"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    script = "import os, sys; print(os.path.realpath(sys.executable)); print(os.path.dirname(os.__file__))"
    binary, library = subprocess.run(
        ["/usr/bin/python3", "-I", "-c", script], check=True, capture_output=True, text=True
    ).stdout.split()
    skip = shutil.ignore_patterns(
        "__pycache__", "test", "tests", "idlelib", "tkinter", "lib2to3", "config-*", "*-packages"
    )
    shutil.copytree(library, root / library.lstrip("/"), ignore=skip, symlinks=True)
    programs = [binary, "/bin/sh", "/usr/bin/cat", "/usr/bin/id"]
    listing = subprocess.run(
        ["ldd", *programs, *map(str, (root / library.lstrip("/")).glob("lib-dynload/*.so"))],
        capture_output=True,
        text=True,
        check=False,  # "not a dynamic executable" is a failure to ldd
    ).stdout
    needed = {
        word
        for line in listing.splitlines()
        for word in line.split()
        if word.startswith("/") and ":" not in word
    }
    for path in [*programs, *needed]:
        place = root / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(os.path.realpath(path), place)
    if not (root / "usr/bin/python3").exists():
        (root / "usr/bin/python3").symlink_to(os.path.basename(binary))
    assert version
    (root / "etc").mkdir()
    (root / "etc/motd").write_text("from the image\n")
    return root


@pytest.fixture(scope="session")
def python_layer(small_root: Path) -> bytes:
    """The same as an image's layer. Its Python is found by `PATH=/opt/python/bin` alone."""
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w", format=tarfile.PAX_FORMAT) as tar:
        tar.add(small_root, "./", filter=lambda info: None if info.name.endswith("usr/bin/python3") else info)
        version = os.path.basename(os.path.realpath(small_root / "usr/bin/python3"))
        for member, _ in (folder("opt/python/bin"), link("opt/python/bin/python3", f"/usr/bin/{version}")):
            tar.addfile(member)
    return target.getvalue()
