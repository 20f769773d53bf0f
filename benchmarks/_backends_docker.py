"""The docker backend beside the bare commands of docker, for the same root file system and a Python that answers."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks._report import Row
from benchmarks.branch import restore_times
from sandbox_gym.backends import lookup
from sandbox_gym.sandbox import Sandbox, Snapshot
from sandbox_gym.testing.topics.images import small_root

# As large in memory as a guest of ours.
_PROGRAM = """
import os, sys
held = os.urandom(max(0, int(sys.argv[1]) - int(open('/proc/self/statm').read().split()[1]) * 4096))
for line in sys.stdin: print(line, end='', flush=True)
"""


@contextlib.contextmanager
def daemon() -> Iterator[None]:
    """The daemon that DOCKER_HOST names, or one of its own."""
    if "DOCKER_HOST" in os.environ:
        yield
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm", ignore_cleanup_errors=True) as folder:
        own = Path(folder, "docker")  # by whose name the daemon calls things, and takes not every character
        own.mkdir()
        with importlib.import_module("tests.dockerd").running(own) as url:
            os.environ["DOCKER_HOST"] = url
            try:
                yield
            finally:
                lookup.shut_down()
                del os.environ["DOCKER_HOST"]


def by_hand(box: Sandbox) -> tuple[str, list[str]]:
    """A docker sandbox's container, and the options by which `docker run` makes one with the same host folders."""
    container = docker("ps", "--quiet", "--filter", f"label=sandbox-gym.id={box.id}")
    mounts = json.loads(docker("inspect", "--format", "{{json .HostConfig.Mounts}}", container))
    folders = [f"--mount=type=bind,source={m['Source']},target={m['Target']},readonly" for m in mounts]
    return container, ["--rm", "--network=none", "--entrypoint=", "--cpus=1", "--memory=1g", *folders]


def run(quick: bool) -> list[Row]:
    rounds = 3 if quick else 12
    with tempfile.TemporaryDirectory(prefix="sandbox-gym-bench-") as folder:
        root = small_root(Path(folder))
        with Sandbox.create(backend="docker", image=root) as box, Bare(root, resident_bytes(box)) as bare:
            ours, theirs, snapping, bare_snapping = [], [], [], []
            bare.checkpoint()
            snapshot = box.snapshot()
            for _ in range(rounds):
                start = time.perf_counter()
                box.snapshot().delete()
                snapping.append(time.perf_counter() - start)
                bare_snapping.append(bare.checkpoint())
                ours += restore_times(snapshot, 1)
                theirs.append(bare.restore())
            eight: tuple[list[float], list[float]] = [], []
            for _ in range(1 if quick else 5):
                eight[0].append(_at_once(snapshot))
                eight[1].append(bare.restore(8))
            snapshot.delete()
    return [
        _row("snapshot", snapping, "checkpoint create, commit", bare_snapping, None),
        _row("restore to its first answer", ours, "create, start --checkpoint", theirs, 1.2),
        Row(
            "docker: 8 copies at once, all answering", min(eight[0]), "s", "one", statistics.median(ours), 4.0
        ),
        Row("docker: 8 by docker's commands at once", min(eight[1]), "s", "one", statistics.median(theirs)),
    ]


def resident_bytes(box: Sandbox) -> int:
    """Of its interpreter."""
    return int(box.run_code("int(open('/proc/self/statm').read().split()[1]) * 4096").value or 0)


def _row(what: str, ours: list[float], reference: str, theirs: list[float], bar: float | None) -> Row:
    return Row(f"docker: {what}", statistics.median(ours), "s", reference, statistics.median(theirs), bar)


def _at_once(snapshot: Snapshot) -> float:
    start = time.perf_counter()
    copies = Sandbox.restore_many(snapshot, 8)
    for copy in copies:
        copy.run_code("1")
    took = time.perf_counter() - start
    for copy in copies:
        copy.terminate()
    return took


class Bare:
    """A container by the commands of docker alone, and copies of it."""

    def __init__(self, root: Path, size: int) -> None:
        self._size = size
        self._made: list[str] = []
        self._images = [docker("import", "-", stdin=root)]
        self._root = Path(docker("info", "-f", "{{.DockerRootDir}}"))
        self._checkpoints = 0
        self._first = self._create(self._images[0])
        docker("start", self._first)

    def _create(self, image: str) -> str:
        options = ["--network=none", "--log-driver=none", "--interactive", "--security-opt=no-new-privileges"]
        container = docker("create", *options, image, "/usr/bin/python3", "-c", _PROGRAM, str(self._size))
        self._made.append(container)
        return container

    def checkpoint(self) -> float:
        """Seconds for its memory and disk; restores are of the last."""
        self._checkpoints += 1
        start = time.perf_counter()
        docker("checkpoint", "create", "--leave-running", self._first, f"c{self._checkpoints}")
        self._images.append(docker("commit", self._first))
        return time.perf_counter() - start

    def restore(self, n: int = 1) -> float:
        """Seconds until `n` copies run, which are made at once."""
        with ThreadPoolExecutor(n) as pool:
            start = time.perf_counter()
            copies = list(pool.map(lambda _: self._restore(), range(n)))
            took = time.perf_counter() - start
        docker("rm", "--force", *copies)
        self._made = [container for container in self._made if container not in copies]
        return took

    def _restore(self) -> str:
        copy, name = self._create(self._images[-1]), f"c{self._checkpoints}"
        source = self._root / f"containers/{self._first}/checkpoints/{name}"
        target = self._root / f"containers/{copy}/checkpoints/{name}"
        shutil.copytree(source, target)
        (target / "unique").write_text(copy)
        docker("start", "--checkpoint", name, copy)
        return copy

    def __enter__(self) -> Bare:
        return self

    def __exit__(self, *exc_info: object) -> None:
        docker("rm", "--force", *self._made)
        docker("rmi", "--force", *reversed(self._images))  # children first


def docker(*words: str, stdin: Path | None = None) -> str:
    """What a command prints. `stdin`: a folder that it is given as an archive."""
    with contextlib.ExitStack() as stack:
        tar = None
        if stdin is not None:
            tar = stack.enter_context(
                subprocess.Popen(["tar", "-C", str(stdin), "-c", "."], stdout=subprocess.PIPE)
            )
        result = subprocess.run(
            ["docker", *words],
            stdin=tar.stdout if tar is not None else subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    if result.returncode:
        raise RuntimeError(f"docker {' '.join(words)}: {result.stderr.strip()}")
    return result.stdout.strip()
