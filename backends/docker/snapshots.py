"""What snapshots and copies are made of: a checkpoint that criu writes for docker, and a commit of the disk."""

from __future__ import annotations

import contextlib
import glob
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from sandbox_gym.errors import BackendUnavailable, SandboxDied, SandboxError, SnapshotError

from .daemon import Daemon, Refused
from .groups import Groups

CHECKPOINT = "sandbox"  # a checkpoint's name, in the folder of the container that holds it
ENABLE = (
    'checkpoints are an experimental feature of docker that needs criu: put {"experimental": true} into '
    "/etc/docker/daemon.json, install criu 4.1 or newer where the daemon's PATH finds it "
    "(scripts/install-criu.sh does, to /usr/local/sbin), and restart the daemon (systemctl restart docker). "
    'Without, snapshot(scope="disk") captures the files alone'
)
OPTIONS = ("tcp-established", "file-locks", "ext-unix-sk", "link-remap", "network-lock skip")
CONFIGURE = f"options for criu go into /etc/criu/runc.conf, one a line: {', '.join(OPTIONS)}"
_MOST_LOG = 1 << 20
_TEMPORARY = "/tmp"  # containerd's, where its service says nothing else


class Checkpoints:
    """Of one daemon, whose folder must be this machine's, and this process root, to hand checkpoints on."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._root: str | None = None

    def check(self) -> None:
        """Raises SnapshotError with what is lacking."""
        info = self._daemon.info()
        if not info["ExperimentalBuild"]:
            raise SnapshotError(f"this docker daemon takes no checkpoints: {ENABLE}")
        root = str(info["DockerRootDir"])
        if not os.access(f"{root}/containers", os.W_OK | os.X_OK):
            raise SnapshotError(
                f"a copy is made of files in {root}/containers, where this user can't write: run as root. Without, "
                'snapshot(scope="disk") captures the files alone'
            )
        self._root = root

    def folder(self, container: str) -> str:
        """Where the daemon looks for a container's checkpoints."""
        if self._root is None:
            self.check()
        return f"{self._root}/containers/{container}/checkpoints"

    @contextlib.contextmanager
    def standing_still(self, container: str, groups: Groups) -> Iterator[None]:
        """No process of it runs meanwhile: so memory and disk are of one instant. Raises SnapshotError where the
        container engine has let it run on in between.
        """
        try:
            self._daemon.ask("POST", f"/containers/{container}/pause")
        except Refused as refused:
            raise _gone_or(refused, container) from None
        try:
            yield
            if not groups.is_frozen():
                raise SnapshotError(
                    "this docker's container engine lets a paused container run when it takes a checkpoint, so that "
                    "memory and disk would be of different moments: containerd 1.6 or newer does not"
                )
        finally:
            with contextlib.suppress(Refused):  # it has ended
                self._daemon.ask("POST", f"/containers/{container}/unpause")

    def write(self, container: str, store: str, timeout: float) -> int:
        """The memory of a container that stands still, into the folder of another. Returns its bytes on disk. Raises
        SnapshotError.
        """
        folder = self.folder(store)
        body = {"CheckpointID": CHECKPOINT, "CheckpointDir": folder, "Exit": False}
        try:
            os.makedirs(folder, mode=0o700, exist_ok=True)
            self._daemon.ask("POST", f"/containers/{container}/checkpoints", body=body, timeout=timeout)
        except OSError as error:
            if isinstance(error, SandboxError):
                raise
            raise SnapshotError(f"a checkpoint can't be written to {folder}: {error}") from None
        except Refused as refused:
            raise SnapshotError(_explained(str(refused))) from None
        return sum(path.stat().st_size for path in Path(folder, CHECKPOINT).iterdir())

    def commit(self, container: str, labels: dict[str, str], timeout: float) -> str:
        """The disk of a container as an image. Raises SnapshotError."""
        stated = " ".join(f"{key}={value}" for key, value in labels.items())
        params = {"container": container, "pause": 0, "changes": [f"LABEL {stated}"]}
        try:
            return str(self._daemon.ask("POST", "/commit", params=params, body={}, timeout=timeout)["Id"])
        except Refused as refused:
            raise SnapshotError(f"its disk can't be captured: {refused}") from None

    def lend(self, store: str, container: str) -> None:
        """Gives a container that has not started the files of a checkpoint, as links. Raises SnapshotError."""
        target = f"{self.folder(container)}/{CHECKPOINT}"
        try:
            os.makedirs(target, mode=0o700)
            for entry in os.scandir(f"{self.folder(store)}/{CHECKPOINT}"):
                os.link(entry.path, f"{target}/{entry.name}")
            # containerd keeps one under its content's hash while it starts it, and takes no second of the same.
            Path(target, f"{container}.unique").write_text(container)
        except OSError as error:
            raise SnapshotError(f"a checkpoint can't be read for a copy: {error}") from None

    def start(self, container: str, *, checkpoint: bool, timeout: float) -> None:
        """Raises SnapshotError, and BackendUnavailable where there is no checkpoint."""
        params = {"checkpoint": CHECKPOINT} if checkpoint else {}
        try:
            self._daemon.ask("POST", f"/containers/{container}/start", params=params, timeout=timeout)
        except Refused as refused:
            if checkpoint:
                raise SnapshotError(f"a copy can't be made: {_explained(str(refused))}") from None
            raise BackendUnavailable(f"a container can't be started: {refused}") from None
        finally:
            if checkpoint:
                _drop_unpacked(container)


def _drop_unpacked(container: str) -> None:
    """containerd unpacks the checkpoint that it starts from into a temporary folder, which it leaves there: the memory
    of a guest.
    """
    for mark in glob.glob(f"{_TEMPORARY}/ctrd-checkpoint*/{container}.unique"):
        folder = os.path.dirname(mark)
        if os.lstat(folder).st_uid == 0:  # in a folder where anyone may make some
            shutil.rmtree(folder, ignore_errors=True)


def _gone_or(refused: Refused, container: str) -> SandboxError:
    if refused.status in (404, 409):
        return SandboxDied(f"container {container[:12]} has ended")
    return SnapshotError(str(refused))


def _explained(message: str) -> str:
    """What criu says in its log, where that can be read, and what mends it."""
    if "experimental" in message or "executable file not found" in message or 'exec: "criu"' in message:
        return f"{message}: {ENABLE}"
    logged = re.search(r"(?:path= ?|log file: )(/[^\s:]+\.log)", message)
    lines: list[str] = []
    if logged:
        with contextlib.suppress(OSError), open(logged[1], errors="replace") as file:
            lines = [line.strip() for line in file.read(_MOST_LOG).splitlines() if "Error" in line]
    said = f"{message}: {'; '.join(lines[:4])}" if lines else message
    return f"{said}. {CONFIGURE}" if "criu" in said else said
