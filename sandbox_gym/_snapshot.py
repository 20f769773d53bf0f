"""Handles on snapshots."""

from __future__ import annotations

import builtins
import contextlib
import os
import time
import weakref
from typing import NoReturn

from sandbox_gym.api import Backend, SandboxSpec, Taken
from sandbox_gym.errors import SandboxDied


class Snapshot:
    """Memory and disk of a sandbox at one instant, restored any number of times, at once if you like.

    A handle: the snapshot goes when `delete` is called, or with the last handle's garbage; what was restored from it
    lives on. `engine`: what captured it; `why`: the reason for that engine; `depth_left`: how many more snapshots nest
    in its copies as it is; beyond, they are rebased (by criu, in 0.2 s) where root makes them, and an error elsewhere.
    """

    def __init__(
        self, backend: Backend, taken: Taken, spec: SandboxSpec, parent: Snapshot | None, label: str | None
    ):
        self.id = taken.id
        self.engine = taken.engine
        self.why = taken.why
        self.depth_left = taken.depth_left
        self.label = label
        self.parent_id = parent.id if parent is not None else None
        self._parent = weakref.ref(parent) if parent is not None else None
        self.kind: str | None = None  # of the environment in it, where it is one's
        self.used_at = time.monotonic()  # when it was taken or restored last
        self._backend = backend
        self._spec = spec
        self._release = weakref.finalize(self, backend.release_later, taken.id)
        self._release.atexit = False  # the process's end ends the supervisor, and with it everything
        _snapshots[self.id] = self

    def check_kind(self, kind: str) -> None:
        """Raises ValueError where it is of another kind of environment, whose first step would end the sandbox."""
        if self.kind not in (None, kind):
            raise ValueError(f"{self!r} is of another environment: {self.kind}, not {kind}")

    @property
    def parent(self) -> Snapshot | None:
        """The snapshot that its sandbox came from, while there is a handle on it."""
        return self._parent() if self._parent is not None else None

    @property
    def memory_bytes(self) -> int:
        """What its sandbox's control group accounts to it; pages shared with copies count once, here."""
        return self._backend.usage(self.id)["memory_bytes"]

    @property
    def disk_bytes(self) -> int:
        """What it and the snapshots below it have written to disk."""
        return self._backend.usage(self.id)["disk_bytes"]

    @property
    def deleted(self) -> bool:
        return not self._release.alive

    def delete(self) -> None:
        """Drops it. Idempotent. Sandboxes restored from it go on."""
        if self._release.detach() is not None:
            _snapshots.pop(self.id, None)
            with contextlib.suppress(SandboxDied):  # the supervisor is gone, and every snapshot with it
                self._backend.release(self.id)

    def save(self, place: str | os.PathLike[str], *, timeout: float = 600.0) -> None:
        """Writes it as one archive: to a path, or any URL that fsspec knows (`s3://`, `memory://`). A file is there
        whole or not at all, and readable by you alone: all that was in the sandbox's memory is in it. Needs root and
        criu.

        Raises:
            SnapshotError, BackendUnavailable: it can't be written as files, and why.
            OSError: the place can't be written to.
        """
        from sandbox_gym import archive

        archive.save(self, place, timeout=timeout)

    @staticmethod
    def load(place: str | os.PathLike[str], *, backend: str = "native", timeout: float = 600.0) -> Snapshot:
        """A snapshot from an archive, of this or another machine, which must have the same Python environment (or root
        file system) and the processor's features. Trust it as you would a program that you run as root: criu, which is
        root, makes processes of what is in it, and a hash proves only that this is what was written.

        Raises:
            SnapshotError: it is damaged, or this machine lacks something, and what; nothing of it is left then.
            OSError: it can't be read.
        """
        from sandbox_gym import archive

        return archive.load(place, backend=backend, timeout=timeout)

    @staticmethod
    def list() -> builtins.list[Snapshot]:
        """The snapshots of this process, oldest first."""
        return [snapshot for snapshot in _snapshots.values() if not snapshot.deleted]

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{self!r} can't be pickled, since it lives with this process: save() writes an archive that any process "
            "can load(), and a job of sandbox_gym.ray takes it along by itself"
        )

    def __repr__(self) -> str:
        label = f" {self.label!r}" if self.label else ""
        return f"<Snapshot {self.id}{label} {'deleted' if self.deleted else self.engine}>"


_snapshots: weakref.WeakValueDictionary[str, Snapshot] = weakref.WeakValueDictionary()


def held(backend: Backend) -> list[Snapshot]:
    """The snapshots that this process has of a backend."""
    return [snapshot for snapshot in Snapshot.list() if snapshot._backend is backend]
