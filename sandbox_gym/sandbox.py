"""The user's Sandbox: create, run code in, fork, checkpoint, rewind, throw away."""

from __future__ import annotations

import builtins
import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from sandbox_gym import _audit, _budget, _capture, _idle, _records
from sandbox_gym._calls import GuestCalls
from sandbox_gym._records import UNSET
from sandbox_gym._snapshot import Snapshot
from sandbox_gym.api import Backend, Live, Rng, SandboxSpec, make_mounts
from sandbox_gym.backends import lookup
from sandbox_gym.errors import SandboxDied, SandboxError, SnapshotError
from sandbox_gym.guest.wire import Op
from sandbox_gym.images.image import Image
from sandbox_gym.network import Allow
from sandbox_gym.seeds import copy_seeds

if TYPE_CHECKING:
    from sandbox_gym.template import Template

__all__ = ["Sandbox", "Snapshot"]

_START_TIMEOUT = 60.0
_MAX_REASON = 2000  # characters
Engine = Literal["auto", "fork", "criu"]
Network = Allow | Literal["same"] | None  # "same": as the origin's

_sandboxes: dict[str, Sandbox] = {}


class Sandbox(GuestCalls):
    """One isolated container. Thread-safe: calls on one sandbox queue up, calls on several run side by side.

    Made by `create`, `restore` and `fork`. A context manager: leaving it terminates the sandbox. It also ends with the
    process that made it, however that ends.
    """

    def __init__(self, backend: Backend, live: Live, spec: SandboxSpec, parent: Snapshot | None) -> None:
        self.id = live.id
        self.name = live.name
        self.parent = parent
        self._backend = backend
        self._live = live
        self._spec = spec
        self._lock = live.channel.lock
        self._state: Literal["running", "stopped", "dead", "terminated"] = "running"
        self._resting: Snapshot | None = None  # where a sandbox that isn't ephemeral waits, once idle
        self._capturing = False  # a snapshot is being taken
        self._ending = False  # another thread terminates it while a call is under way
        self._checkpoints: builtins.list[Snapshot] = []
        self._oom_kills = 0
        _sandboxes[self.id] = self
        if spec.idle_timeout is not None:
            _idle.watch(self, spec.idle_timeout)
        _audit.made(self)

    # ---- making -------------------------------------------------------------------------------------------------

    @classmethod
    def create(
        cls,
        name: str | None = None,
        *,
        backend: str = "native",
        image: str | os.PathLike[str] | Image | Template | None = None,
        cpus: float | None = UNSET,
        memory: int | str | None = UNSET,
        disk: int | str | None = UNSET,
        pids: int | None = UNSET,
        network: Allow | None = None,
        env: Mapping[str, str] | None = None,
        mounts: Sequence[Any] = (),
        python_path: Sequence[str] | None = None,
        ttl: float | None = None,
        idle_timeout: float | None = None,
        ephemeral: bool = True,
        timeout: float = _START_TIMEOUT,
    ) -> Sandbox:
        """A fresh sandbox.

        `image`: None for this host's own Python environment (read-only beneath, writable above), an `Image`, what
        `Image.of` makes one of (a root file system's folder, an archive, the name of one that docker has), or a
        template: see `Template.start`. `cpus` (default 1.0), `memory` ("1Gi"), `disk` ("2Gi"),
        `pids` (256): limits; None is no limit. `env`: all of the guest's environment that is yours; none of the host's
        goes in. `network`: what it may reach, as `Allow([...])`; None is nothing. `mounts`: host folders to show,
        read-only: a path, or (source, target). `python_path`: folders of this host's that its Python finds packages in
        (no `image`); None is what is installed for this process's Python, and PYTHONPATH; never the folder of a script,
        or the working directory. `ttl`, `idle_timeout`: seconds
        until it ends, and until it stops for want of calls; with `ephemeral=False` an idle one is only put to rest, and
        wakes at the next call.

        Raises:
            BackendUnavailable: this machine lacks something, or a limit that was asked for can't be enforced.
            LimitExceeded: as many sandboxes live as may.
            SandboxTimeout: it did not start within `timeout` seconds.
        """
        _records.check_network(network)
        if image is not None and python_path is not None:
            raise ValueError(
                "python_path= is of this host's Python, and image= has its own: mount folders (mounts=)"
            )
        limits = _records.make_limits(cpus, memory, disk, pids)
        _records.check_seconds("timeout", timeout)
        _records.check_seconds("ttl", ttl, optional=True)
        _records.check_seconds("idle_timeout", idle_timeout, optional=True)
        if image is not None and not isinstance(image, (str, os.PathLike, Image)):
            if env or mounts:
                raise ValueError("env= and mounts= are what a template was built with: build another")
            own: dict[str, Any] = {"ttl": ttl, "idle_timeout": idle_timeout, "ephemeral": ephemeral}
            own |= {"cpus": cpus, "memory": memory, "disk": disk, "pids": pids, "network": network}
            return image.start(name, backend=backend, **own)
        root = Image.of(image)
        spec = SandboxSpec(
            *(limits, root.rootfs, {**root.env, **(env or {})}, make_mounts(mounts), python_path),
            *(ttl, idle_timeout, ephemeral, root.digest, root.workdir),
            network=network,
        )
        _records.check_names([name], _resting())
        chosen = lookup.get(backend)
        try:
            live = _budget.within(chosen, lambda: chosen.create(spec, name=name, timeout=timeout))
        except SandboxDied:  # the supervisor was killed, with all that it held: another starts
            chosen = lookup.get(backend, failed=chosen)
            live = chosen.create(spec, name=name, timeout=timeout)
        return cls(chosen, live, spec, None)

    @classmethod
    def restore(
        cls, snapshot: Snapshot, name: str | None = None, *, rng: Rng = "same", network: Network = "same"
    ) -> Sandbox:
        """A running sandbox at the state of a snapshot. Raises SnapshotError when that is gone.

        `rng="same"`: its random numbers go on exactly as the origin's; `"diverge"`: reseeded from the system; an int:
        reseeded from it (Python's `random`, NumPy's global state, a hosted environment's np_random).
        `network`: what it may reach, by default what its origin may. What that has open to outside ends in the copy.
        """
        return cls._restore(snapshot, [name], rng, network)[0]

    @classmethod
    def restore_many(cls, snapshot: Snapshot, n: int, *, rng: Rng = "same") -> builtins.list[Sandbox]:
        """`n` of them at once, all or none."""
        return cls._restore(snapshot, [None] * n, rng)

    @classmethod
    def _restore(
        cls, snapshot: Snapshot, names: Sequence[str | None], rng: Rng, network: Network = "same"
    ) -> builtins.list[Sandbox]:
        if not isinstance(snapshot, Snapshot):
            raise TypeError(f"restore takes a Snapshot (Snapshot.load reads one), not {snapshot!r}")
        if snapshot.deleted:
            raise SnapshotError(f"{snapshot!r} was deleted: take another snapshot")
        if network != "same":
            _records.check_network(network)
        seeds = copy_seeds(rng, len(names))
        backend = snapshot._backend
        _records.check_names(names, _resting())
        snapshot.used_at = time.monotonic()
        wish: dict[str, Any] = {"names": names, "timeout": _START_TIMEOUT, "network": network}
        lives = _budget.within(backend, lambda: backend.restore(snapshot.id, **wish))
        spec = snapshot._spec if network == "same" else replace(snapshot._spec, network=network)
        made = [cls(backend, live, spec, snapshot) for live in lives]
        try:
            for box, seed in zip(made, seeds):
                box._reseed(seed)
        except BaseException:
            for box in made:
                box.terminate()
            raise
        return made

    def fork(
        self, n: int, prefix: str | None = None, *, rng: Rng = "same", network: Network = "same"
    ) -> builtins.list[Sandbox]:
        """`n` running copies of this very state, sealed from each other; this one runs on.

        `prefix="ep-"` names them ep-1 ... ep-n; `rng`, `network`: see `restore`. Raises SnapshotError, LimitExceeded.
        """
        if n < 1:
            raise ValueError(f"fork makes at least one copy, not {n}")
        names = [f"{prefix}{i + 1}" if prefix is not None else None for i in range(n)]
        snapshot = self.snapshot()
        try:
            return self._restore(snapshot, names, rng, network)
        finally:
            snapshot.delete()

    @staticmethod
    def list() -> builtins.list[Sandbox]:
        """The live sandboxes of this process, oldest first."""
        return [box for box in builtins.list(_sandboxes.values()) if box.status in ("running", "stopped")]

    @staticmethod
    def get(id_or_name: str) -> Sandbox:
        """Raises KeyError when no sandbox of this process has that id or name."""
        for box in Sandbox.list():
            if id_or_name in (box.id, box.name):
                return box
        raise KeyError(
            f"no live sandbox {id_or_name!r} in this process: there are {[b.name for b in Sandbox.list()]}"
        )

    # ---- snapshots ----------------------------------------------------------------------------------------------

    def snapshot(
        self, label: str | None = None, *, engine: Engine = "auto", scope: Literal["full", "disk"] = "full"
    ) -> Snapshot:
        """This very state, memory and disk; the sandbox runs on.

        `engine="auto"`: fork (a millisecond) where that captures all there is, else criu, which takes any tree of
        processes; the snapshot's `engine` and `why` tell. `scope="disk"`: its files alone, for docker where that can't
        capture memory; copies begin with a fresh interpreter.

        Raises:
            SnapshotError: the state can't be captured (the message names what stands in the way), or snapshots nest
                too deep; the sandbox goes on unharmed.
        """
        if engine not in get_args(Engine):
            raise ValueError(f"engines are {', '.join(get_args(Engine))}, not {engine!r}")
        if scope not in ("full", "disk"):
            raise ValueError(f"a snapshot's scope is 'full' or 'disk', not {scope!r}")
        return self._take(keep=True, label=label, engine=engine if scope == "full" else "disk")

    def freeze(self, label: str | None = None) -> Snapshot:
        """The sandbox itself becomes the snapshot: costs nothing, and the sandbox is over. For search nodes."""
        snapshot = self._take(keep=False, label=label)
        self._end("terminated", None)
        return snapshot

    def _take(self, *, keep: bool, label: str | None, engine: str = "auto", levels: int = 1) -> Snapshot:
        """`levels`: how many more snapshots are to nest below this one at the least."""
        with self._awake():
            _audit.look(self)
            taken = _capture.capture(self, keep=keep, engine=engine, levels=levels)
            snapshot = Snapshot(self._backend, taken, self._spec, self.parent, label)
            _audit.taken(self, snapshot)
            if keep:
                self.parent = snapshot
            return snapshot

    def checkpoint(self, label: str | None = None) -> Snapshot:
        """A snapshot that `rewind` finds by its label."""
        snapshot = self.snapshot(label)
        with self._lock:
            self._checkpoints.append(snapshot)
        return snapshot

    def rewind(self, label: str | Snapshot | None = None, *, rng: Rng = "same") -> None:
        """Back to a checkpoint, in place: disk and memory, under the same id. No label: the latest. Works on a sandbox
        that has died, too. Raises KeyError when there is no such checkpoint, SnapshotError.
        """
        with self._lock:
            if isinstance(label, Snapshot):
                snapshot = label
            else:
                found = [
                    c for c in self._checkpoints if (label is None or c.label == label) and not c.deleted
                ]
                if not found:
                    labels = [c.label for c in self._checkpoints]
                    wanted = "no checkpoint" if label is None else f"no checkpoint {label!r}"
                    there = f"there are {labels}" if labels else "checkpoint() makes one"
                    raise KeyError(f"sandbox {self.name} has {wanted}: {there}")
                snapshot = found[-1]
            if snapshot.deleted:
                raise SnapshotError(f"{snapshot!r} was deleted: rewind to another")
            if self._state == "terminated":
                raise SandboxDied(f"sandbox {self.name} was terminated: Sandbox.restore makes a new one")
            (seed,) = copy_seeds(rng, 1)
            self._replace(snapshot)
            self.parent = snapshot
            _audit.rewound(self, snapshot)
            self._reseed(seed)

    def _replace(self, snapshot: Snapshot) -> None:
        """Goes on as a copy of `snapshot`. The supervisor keeps its name while it lives; after, it is given again."""
        name = None if self._state == "running" else self.name
        (live,) = self._backend.restore(snapshot.id, names=[name], timeout=_START_TIMEOUT, replace=self._live)
        self._live.channel.replace(live.channel.detach())
        self._state, self._oom_kills = "running", 0
        _sandboxes[self.id] = self
        if self._spec.idle_timeout is not None:
            _idle.watch(self, self._spec.idle_timeout)

    def _reseed(self, seed: int | None) -> None:
        if seed is not None:
            self._call(Op.RESEED, seed, timeout=30.0)

    # ---- the end ------------------------------------------------------------------------------------------------

    @property
    def status(self) -> str:
        """ "running", "stopped" (idle, wakes at the next call), "dead" (it ended by itself) or "terminated"."""
        return self._state

    def terminate(self) -> None:
        """Kills everything in it and frees what it held, checkpoints too. Idempotent. A call under way in another
        thread ends with SandboxDied.
        """
        self._ending = True
        while not self._lock.acquire(blocking=False):
            if not self._capturing:  # the socket may by now be the snapshot's
                self._live.channel.interrupt()
            if self._lock.acquire(timeout=0.1):  # again: the call may only now have begun to wait
                break
        try:
            for checkpoint in self._checkpoints:
                checkpoint.delete()
            self._checkpoints.clear()
            if self._resting is not None:
                self._resting.delete()
                self._resting = None
            self._end("terminated", "it was terminated")
        finally:
            self._lock.release()

    def _end(self, state: Literal["dead", "terminated"], reason: str | None) -> None:
        if self._state in ("running", "stopped"):
            _audit.ends(self, state, reason)
        was, self._state = self._state, state
        _sandboxes.pop(self.id, None)
        _idle.forget(self)
        if was == "running" and reason is not None:
            try:
                self._backend.terminate(self._live, reason[:_MAX_REASON])  # it may quote the guest
            except SandboxDied:  # the supervisor is gone, and everything with it
                self._live.channel.close()

    def _stop_idle(self) -> None:
        """Called by the idle watch: ends an ephemeral sandbox, puts another to rest."""
        with self._lock:
            if self._state != "running":
                return
            if self._spec.ephemeral:
                self._end("dead", f"it was idle for {self._spec.idle_timeout} s")
                return
            try:
                taken = _capture.capture(self, keep=False, engine=self._backend.rest_engine)
            except SandboxError:  # something in it still runs: it isn't idle, only unasked; or it has died
                return
            self._resting = Snapshot(self._backend, taken, self._spec, self.parent, None)
            self._state = "stopped"

    @contextlib.contextmanager
    def _awake(self) -> Iterator[None]:
        """Holds the sandbox's lock over a call; wakes a stopped sandbox, refuses one that is gone."""
        with self._lock:
            if self._state == "stopped":
                assert self._resting is not None
                self._replace(self._resting)
                self._resting.delete()
                self._resting = None
            if self._state != "running":
                raise SandboxDied(f"sandbox {self.name} is {self._state}: {self._reason()}")
            try:
                yield
            finally:
                _idle.touch(self)

    def _reason(self) -> str:
        if self._state == "terminated":
            return "create another, or restore a snapshot"
        try:
            return f"{self._backend.death(self._live)}; rewind it to a checkpoint, or restore a snapshot"
        except SandboxError as error:
            return str(error)

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.terminate()

    def __repr__(self) -> str:
        return f"<Sandbox {self.name} {self._state}>"


def _resting() -> builtins.list[str]:
    return [box.name for box in Sandbox.list() if box.status == "stopped"]
