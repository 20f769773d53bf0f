"""A docker daemon of a test's own: started by hand as root, apart from any other, and gone without a trace.

It has a mount namespace of its own: what it mounts goes with it. There /etc has options for criu, and /run is in
memory, as on most machines: criu keeps there what it knows of the kernel, and no containerd of the machine's is found.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sandbox_gym.backends.docker import snapshots
from sandbox_gym.backends.docker.daemon import Daemon
from sandbox_gym.backends.native import criu
from sandbox_gym.errors import BackendUnavailable

_PATIENCE = 60.0
_CGROUPS = Path("/sys/fs/cgroup")
_START = """
set -e
mkdir -p "$1/etc/upper/criu" "$1/etc/work"
printf '%s\\n' "$3" >"$1/etc/upper/criu/runc.conf"
mount -t overlay overlay -o "lowerdir=/etc,upperdir=$1/etc/upper,workdir=$1/etc/work" /etc
mount -t tmpfs tmpfs /run
exec dockerd --config-file "$2" >"$1/log" 2>&1
"""


@dataclass(frozen=True)
class Dockerd:
    """One that runs. `url`: for DOCKER_HOST."""

    url: str
    process: subprocess.Popen[bytes]
    folder: Path
    group: str

    def kill(self) -> None:
        """At once; its containers may live on."""
        self.process.kill()
        self.process.wait(timeout=_PATIENCE)


@contextlib.contextmanager
def running(folder: Path) -> Iterator[str]:
    """The url of a daemon that takes checkpoints, for as long as the context. `folder`: an empty one for all that it
    has; in memory (/dev/shm) it is several times as fast.
    """
    with started(folder) as daemon:
        yield daemon.url


@contextlib.contextmanager
def started(folder: Path, *, experimental: bool = True) -> Iterator[Dockerd]:
    """The same, as a process."""
    group = f"sandbox-gym-tests-{secrets.token_hex(6)}"
    (folder / "daemon.json").write_text(json.dumps(_settings(folder, group, experimental)))
    path = f"{Path(criu.find().path).parent}:{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
    # It ends with tests that are killed, too.
    command = [
        "setpriv",
        "--pdeathsig",
        "TERM",
        "unshare",
        "--mount",
        "--propagation",
        "slave",
        "sh",
        "-c",
        _START,
        "sh",
        str(folder),
    ]
    process = subprocess.Popen(
        [*command, str(folder / "daemon.json"), "\n".join(snapshots.OPTIONS)],
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # a terminal's Ctrl-C is for the tests, which then end it
        env={"PATH": path, "HOME": str(folder)},
    )
    daemon = Dockerd(f"unix://{folder}/socket", process, folder, group)
    try:
        _wait_for_answer(daemon)
        yield daemon
    finally:
        _end(daemon)


def _settings(folder: Path, group: str, experimental: bool) -> dict[str, object]:
    runsc = shutil.which("runsc", path=f"{os.environ.get('PATH', os.defpath)}:/usr/local/sbin")
    runtime = {"path": runsc, "runtimeArgs": ["--network=none", "--platform=systrap"]}
    return {
        "hosts": [f"unix://{folder}/socket"],
        "data-root": str(folder / "data"),
        "exec-root": str(folder / "exec"),
        "pidfile": str(folder / "pid"),
        "cgroup-parent": f"/{group}",
        "exec-opts": ["native.cgroupdriver=cgroupfs"],
        "experimental": experimental,
        # It touches nothing of the machine's network.
        "iptables": False,
        "ip6tables": False,
        "ip-forward": False,
        "bridge": "none",
        **({"runtimes": {"runsc": runtime}} if runsc else {}),
    }


def _wait_for_answer(daemon: Dockerd) -> None:
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            Daemon(daemon.url)
            return
        except BackendUnavailable:
            if daemon.process.poll() is not None or time.monotonic() > deadline:
                log = daemon.folder / "log"
                said = log.read_text()[-3000:] if log.exists() else ""
                raise AssertionError(f"dockerd did not start:\n{said}") from None
            time.sleep(0.05)


def _end(daemon: Dockerd) -> None:
    if daemon.process.poll() is None:
        daemon.process.send_signal(signal.SIGTERM)
        try:
            daemon.process.wait(timeout=_PATIENCE)
        except subprocess.TimeoutExpired:
            daemon.kill()
    deadline = time.monotonic() + _PATIENCE
    while left := _processes(daemon):  # a daemon that was killed leaves containers, and what holds them
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert time.monotonic() < deadline, f"processes {left} of {daemon.folder} do not end"
        time.sleep(0.01)
    for top in _groups(daemon):
        for group in sorted((path for path in top.rglob("*") if path.is_dir()), reverse=True):
            group.rmdir()
        top.rmdir()


def _groups(daemon: Dockerd) -> list[Path]:
    return [path for root in (_CGROUPS, *_CGROUPS.glob("*/")) if (path := root / daemon.group).is_dir()]


def _processes(daemon: Dockerd) -> set[int]:
    """Those of containers, by their control groups, and those that hold them, by the folder that they are told of."""
    found = {
        int(pid)
        for top in _groups(daemon)
        for file in top.rglob("cgroup.procs")
        for pid in file.read_text().split()
    }
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0")
            if f"{daemon.folder}/exec/containerd/containerd.sock".encode() in words:
                found.add(int(entry))
    return found
