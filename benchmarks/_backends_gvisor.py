"""The gvisor backend beside bare `runsc`, for the same root file system and a Python that answers."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks._backends_docker import resident_bytes
from benchmarks._backends_network import CLIENT, MEGABYTES, SERVER
from benchmarks._report import Row
from benchmarks.branch import restore_times
from sandbox_gym.sandbox import Sandbox
from sandbox_gym.testing.topics.images import small_root

# As large in memory as a guest of ours.
_PROGRAM = """
import os, sys
held = os.urandom(max(0, int(sys.argv[1]) - int(open('/proc/self/statm').read().split()[1]) * 4096))
for line in sys.stdin: print(line, end='', flush=True)
"""


def run(quick: bool) -> list[Row]:
    rounds = 16 if quick else 30
    with tempfile.TemporaryDirectory(prefix="sandbox-gym-bench-") as folder:
        root = small_root(Path(folder))
        with (
            Sandbox.create(backend="gvisor", image=root) as box,
            Bare(Path(folder), root, resident_bytes(box)) as bare,
        ):
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
            snapshot.delete()
    return [
        _row("snapshot", snapping, "runsc checkpoint", bare_snapping),
        _row("restore to its first answer", ours, "runsc restore", theirs),
    ]


def _row(what: str, ours: list[float], reference: str, theirs: list[float]) -> Row:
    return Row(f"gvisor: {what}", statistics.median(ours), "s", reference, statistics.median(theirs), 1.3)


@contextlib.contextmanager
def wired() -> Iterator[Callable[[], float]]:
    """Bytes a second that a bare sandbox gets from a server at the other end of a pair of virtual cards."""
    ours, theirs = (f"sandbox-gym-bench-{os.getpid()}-{end}" for end in "ab")
    with contextlib.ExitStack() as stack:
        for name in (ours, theirs):
            _run("ip", "netns", "add", name)
            stack.callback(_run, "ip", "netns", "delete", name)
        _run(
            "ip",
            "link",
            "add",
            "card0",
            "netns",
            ours,
            "type",
            "veth",
            "peer",
            "name",
            "card0",
            "netns",
            theirs,
        )
        for name, address in ((ours, "192.0.2.1/24"), (theirs, "192.0.2.2/24")):
            _run("ip", "-n", name, "link", "set", "card0", "up")
            _run("ip", "-n", name, "address", "add", address, "dev", "card0")
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sandbox-gym-bench-")))
        command = ["ip", "netns", "exec", ours, sys.executable, "-c", SERVER, "192.0.2.1"]
        server = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        stack.callback(server.kill)
        assert server.stdout is not None
        arguments = ["-", "192.0.2.1", server.stdout.readline().strip(), str(MEGABYTES)]
        config = _config(small_root(folder), ["-c", CLIENT, *arguments])
        config["linux"]["namespaces"][1]["path"] = f"/run/netns/{theirs}"
        (folder / "config.json").write_text(json.dumps(config))
        # Else runsc, where it is not in a network namespace of its own, fails on kernels from 6.11.
        hidden = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /proc/sys/net; exec "$@"', "sh"]
        runsc = [*_command(folder), "--network=sandbox", "run", f"--bundle={folder}"]

        def measure() -> float:
            # A sandbox takes the address from the card for itself, and does not give it back.
            _run("ip", "-n", theirs, "address", "replace", "192.0.2.2/24", "dev", "card0")
            return float(_run(*hidden, *runsc, f"bench-{secrets.token_hex(4)}"))

        yield measure


def _run(*words: str) -> str:
    result = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    if result.returncode:
        raise RuntimeError(f"{' '.join(words)[:200]}: {result.stderr.strip()[-1000:]}")
    return result.stdout


def _command(folder: Path) -> list[str]:
    runsc = importlib.import_module("sandbox_gym.backends.gvisor.runsc").find().path
    return [runsc, f"--root={folder}/state", "--platform=systrap", "--overlay2=none", "--ignore-cgroups"]


class Bare:
    """A sandbox by the commands of runsc alone, which answers lines on its standard output, and copies of it."""

    def __init__(self, folder: Path, root: Path, size: int) -> None:
        self._folder, self._bundle = folder, folder / "bundle"
        self._command = [*_command(folder), "--network=none"]
        self._bundle.mkdir()
        (self._bundle / "config.json").write_text(json.dumps(_config(root, ["-c", _PROGRAM, str(size)])))
        self._checkpoints = 0
        self._first = self._start("run")
        _ask(self._first[1])

    def checkpoint(self) -> float:
        """Seconds; restores are of the last."""
        self._checkpoints += 1
        start = time.perf_counter()
        self._do(
            "checkpoint",
            "--compression=none",
            "--leave-running",
            f"--image-path={self._image}",
            self._first[0],
        )
        took = time.perf_counter() - start
        shutil.rmtree(self._folder / f"image-{self._checkpoints - 1}", ignore_errors=True)
        return took

    def restore(self) -> float:
        """Seconds to a copy's first answer."""
        start = time.perf_counter()
        name, process = self._start("restore", f"--image-path={self._image}")
        _ask(process)
        took = time.perf_counter() - start
        self._end(name, process)
        return took

    @property
    def _image(self) -> Path:
        return self._folder / f"image-{self._checkpoints}"

    def _start(self, *words: str) -> tuple[str, subprocess.Popen[bytes]]:
        name = f"bench-{secrets.token_hex(4)}"
        command = [*self._command, *words, f"--bundle={self._bundle}", name]
        return name, subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def _end(self, name: str, process: subprocess.Popen[bytes]) -> None:
        self._do("kill", name, "KILL")
        process.communicate(timeout=60)
        self._do("delete", "--force", name)

    def _do(self, *words: str) -> None:
        subprocess.run([*self._command, *words], check=True, capture_output=True, timeout=60)

    def __enter__(self) -> Bare:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._end(*self._first)


def _ask(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(b"hello\n")
    process.stdin.flush()
    answer = process.stdout.readline()
    assert answer == b"hello\n", answer


def _config(root: Path, arguments: list[str]) -> Any:
    return {
        "ociVersion": "1.0.0",
        "process": {"args": ["/usr/bin/python3", *arguments], "cwd": "/", "env": ["PATH=/usr/bin:/bin"]},
        "root": {"path": str(root), "readonly": True},
        "mounts": [{"destination": "/proc", "type": "proc"}, {"destination": "/dev", "type": "tmpfs"}],
        "linux": {"namespaces": [{"type": kind} for kind in ("pid", "network", "ipc", "uts", "mount")]},
    }
