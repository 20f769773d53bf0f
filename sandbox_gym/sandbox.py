"""The user's Sandbox: create, run code in, fork, checkpoint, rewind, throw away."""

from __future__ import annotations

import builtins
import io
import os
import posixpath
import tarfile
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from sandbox_gym import _idle
from sandbox_gym.api import (
    Backend,
    CodeResult,
    ErrorInfo,
    ExecResult,
    FileInfo,
    Limits,
    Live,
    Rng,
    SandboxSpec,
    Taken,
    make_mounts,
    parse_bytes,
)
from sandbox_gym.backends import lookup
from sandbox_gym.channel import GuestError
from sandbox_gym.errors import LimitExceeded, ProtocolError, SandboxDied, SandboxError, SandboxTimeout, SnapshotError
from sandbox_gym.guest import wire
from sandbox_gym.guest.wire import Op
from sandbox_gym.seeds import copy_seeds

_START_TIMEOUT = 60.0
_GRACE = 2.0  # seconds that a cell has to react to its interrupt before the sandbox is killed
_MARGIN = 10.0  # the guest keeps a command's deadline; past this much more, the guest itself hangs
_CHUNK = 8 << 20
_GUEST_ERRORS = (
    "FileNotFoundError",
    "FileExistsError",
    "NotADirectoryError",
    "IsADirectoryError",
    "PermissionError",
    "OSError",
    "ValueError",
)
_DEFAULTS = Limits()
_UNSET: Any = object()


class Snapshot:
    """Memory and disk of a sandbox at one instant, restored any number of times, at once if you like.

    A handle: the snapshot goes when `delete` is called, or with the last handle's garbage; what was restored from it
    lives on. `engine`: what captured it; `why`: the reason for that engine; `depth_left`: how many more snapshots can
    nest in its copies.
    """

    def __init__(self, backend: Backend, taken: Taken, spec: SandboxSpec, parent: Snapshot | None, label: str | None):
        self.id = taken.id
        self.engine = taken.engine
        self.why = taken.why
        self.depth_left = taken.depth_left
        self.label = label
        self.parent_id = parent.id if parent is not None else None
        self._parent = weakref.ref(parent) if parent is not None else None
        self._backend = backend
        self._spec = spec
        self._release = weakref.finalize(self, backend.release_later, taken.id)
        self._release.atexit = False  # the process's end ends the supervisor, and with it everything
        _snapshots[self.id] = self

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
            self._backend.release(self.id)

    @staticmethod
    def list() -> builtins.list[Snapshot]:
        """The snapshots of this process, oldest first."""
        return [snapshot for snapshot in _snapshots.values() if not snapshot.deleted]

    def __repr__(self) -> str:
        label = f" {self.label!r}" if self.label else ""
        return f"<Snapshot {self.id}{label} {'deleted' if self.deleted else self.engine}>"


_snapshots: weakref.WeakValueDictionary[str, Snapshot] = weakref.WeakValueDictionary()
_sandboxes: dict[str, Sandbox] = {}


class Sandbox:
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
        self._checkpoints: list[Snapshot] = []
        self._oom_kills = 0
        _sandboxes[self.id] = self
        if spec.idle_timeout is not None:
            _idle.watch(self, spec.idle_timeout)

    # ---- making -------------------------------------------------------------------------------------------------

    @classmethod
    def create(
        cls,
        name: str | None = None,
        *,
        backend: str = "native",
        image: str | os.PathLike[str] | None = None,
        cpus: float | None = _UNSET,
        memory: int | str | None = _UNSET,
        disk: int | str | None = _UNSET,
        pids: int | None = _UNSET,
        network: None = None,
        env: Mapping[str, str] | None = None,
        mounts: Sequence[Any] = (),
        ttl: float | None = None,
        idle_timeout: float | None = None,
        ephemeral: bool = True,
        timeout: float = _START_TIMEOUT,
    ) -> Sandbox:
        """A fresh sandbox.

        `image`: None for this host's own Python environment (read-only beneath, writable above), or a folder that holds
        a root file system. `cpus` (default 1.0), `memory` ("1Gi"), `disk` ("2Gi"), `pids` (256): limits; None is no
        limit. `env`: all of the guest's environment that is yours; none of the host's goes in. `mounts`: host folders
        to show, read-only: a path, or (source, target). `ttl`, `idle_timeout`: seconds until it ends, and until it
        stops for want of calls; with `ephemeral=False` an idle one is only put to rest, and wakes at the next call.

        Raises:
            BackendUnavailable: this machine lacks something, or a limit that was asked for can't be enforced.
            LimitExceeded: as many sandboxes live as may.
            SandboxTimeout: it did not start within `timeout` seconds.
        """
        if network is not None:
            raise NotImplementedError("the network is closed; rules that open it are not built yet")
        limits = make_limits(cpus, memory, disk, pids)
        rootfs = None
        if image is not None:
            rootfs = os.path.realpath(image)
            if not os.path.isdir(rootfs):
                raise ValueError(f"image {image!r}: only a folder with a root file system is supported so far")
        spec = SandboxSpec(
            limits, rootfs, dict(env or {}), make_mounts(mounts), (), ttl, idle_timeout, ephemeral
        )
        chosen = lookup.get(backend)
        return cls(chosen, chosen.create(spec, name=name, timeout=timeout), spec, None)

    @classmethod
    def restore(cls, snapshot: Snapshot, name: str | None = None, *, rng: Rng = "same") -> Sandbox:
        """A running sandbox at the state of a snapshot. Raises SnapshotError when that is gone.

        `rng="same"`: its random numbers go on exactly as the origin's; `"diverge"`: reseeded from the system; an int:
        reseeded from it (Python's `random`, NumPy's global state, a hosted environment's np_random).
        """
        return cls._restore(snapshot, [name], rng)[0]

    @classmethod
    def restore_many(cls, snapshot: Snapshot, n: int, *, rng: Rng = "same") -> builtins.list[Sandbox]:
        """`n` of them at once, all or none."""
        return cls._restore(snapshot, [None] * n, rng)

    @classmethod
    def _restore(cls, snapshot: Snapshot, names: Sequence[str | None], rng: Rng) -> builtins.list[Sandbox]:
        if snapshot.deleted:
            raise SnapshotError(f"{snapshot!r} was deleted: take another snapshot")
        backend = snapshot._backend
        lives = backend.restore(snapshot.id, names=names, timeout=_START_TIMEOUT)
        made = [cls(backend, live, snapshot._spec, snapshot) for live in lives]
        for box, seed in zip(made, copy_seeds(rng, len(made))):
            box._reseed(seed)
        return made

    def fork(self, n: int, prefix: str | None = None, *, rng: Rng = "same") -> builtins.list[Sandbox]:
        """`n` running copies of this very state, sealed from each other; this one runs on.

        `prefix="ep-"` names them ep-1 ... ep-n. Raises SnapshotError, LimitExceeded.
        """
        if n < 1:
            raise ValueError(f"fork makes at least one copy, not {n}")
        names = [f"{prefix}{i + 1}" if prefix is not None else None for i in range(n)]
        snapshot = self.snapshot()
        try:
            return self._restore(snapshot, names, rng)
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
        raise KeyError(f"no live sandbox {id_or_name!r} in this process: there are {[b.name for b in Sandbox.list()]}")

    # ---- running things -----------------------------------------------------------------------------------------

    def run_code(self, code: str, timeout: float = 30.0) -> CodeResult:
        """Runs a cell of Python; names it defines are there for the next. The last expression's repr is the value.

        An exception is data in `result.error`. After `timeout` seconds the cell is interrupted and what it started is
        killed; one that ignores the interrupt for two seconds takes the sandbox with it (later calls say so).
        """
        with self._awake():
            try:
                fields = self._live.channel.call(Op.CODE, {"code": code}, timeout=timeout)
            except SandboxTimeout:
                return self._interrupt(timeout)
            except (SandboxDied, ProtocolError, GuestError) as error:
                raise self._fatal(error) from None
        return _code_result(fields, self.name)

    def _interrupt(self, timeout: float) -> CodeResult:
        """Ends a cell that has run too long: SIGINT, then all of the sandbox."""
        self._backend.interrupt(self._live)
        try:
            frame = self._live.channel.wait(Op.CODE, timeout=_GRACE)
            result = _code_result(wire.decode(frame.meta, frame.data), self.name)
        except (SandboxTimeout, SandboxDied, ProtocolError, GuestError, wire.WireError):
            reason = f"a cell did not stop {_GRACE} s after its timeout of {timeout} s"
            self._end("dead", reason)
            error = ErrorInfo("SandboxDied", f"{reason}: the sandbox was killed", "")
            return CodeResult("", "", None, error, True, timeout + _GRACE)
        return CodeResult(**{**result.__dict__, "timed_out": True})

    def shell(
        self,
        command: str,
        timeout: float = 60.0,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
    ) -> ExecResult:
        """Runs a command line in bash (sh where there is none). Children left in the background live on, and never hold
        the call; a time-out kills everything that the call started.
        """
        line = 'if command -v bash >/dev/null; then exec bash -c "$0"; else eval "$0"; fi'
        return self.exec(["/bin/sh", "-c", line, command], timeout, cwd=cwd, env=env, stdin=stdin)

    def exec(
        self,
        argv: Sequence[str],
        timeout: float = 60.0,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
    ) -> ExecResult:
        """Runs a program without a shell. A program that isn't there is exit code 127, as in a shell.

        The first MiB of each stream is kept; `stdout_cut` and `stderr_cut` say how much was not.
        """
        request = {"argv": list(argv), "timeout": timeout, "cwd": cwd, "env": dict(env) if env else None, "stdin": stdin}
        fields = self._call(Op.EXEC, request, timeout=timeout + _MARGIN)
        limit = None
        if fields.get("exit_code") == 137:  # SIGKILL: by the memory limit, if that counts one more
            kills = self._backend.usage(self.id)["oom_kills"]
            limit = "memory" if kills > self._oom_kills else None
            self._oom_kills = kills
        return _checked(ExecResult, {**fields, "limit": limit}, self.name)

    # ---- files --------------------------------------------------------------------------------------------------

    def read_file(self, path: str, *, max_bytes: int = 512 << 20) -> bytes:
        """Raises FileNotFoundError, IsADirectoryError, ...; LimitExceeded when it is larger than `max_bytes`."""
        blocks: builtins.list[bytes] = []
        size, end = 0, False
        while not end:
            reply = self._file_call(Op.READ, {"path": path, "offset": size, "size": _CHUNK})
            blocks.append(reply["data"])
            size, end = size + len(reply["data"]), reply["end"]
            if size > max_bytes:
                raise LimitExceeded(f"sandbox {self.name}: {path} is larger than {max_bytes} bytes (max_bytes=)")
        return b"".join(blocks)

    def read_text(self, path: str, encoding: str = "utf-8") -> str:
        return self.read_file(path).decode(encoding)

    def write_file(self, path: str, data: bytes | str, *, mode: int | None = None) -> None:
        """Writes a file, its folders too where they are missing. Raises OSError: "No space left" included."""
        block = data.encode() if isinstance(data, str) else bytes(data)
        for start in range(0, max(1, len(block)), _CHUNK):
            part = block[start : start + _CHUNK]
            self._file_call(Op.WRITE, {"path": path, "data": part, "append": start > 0, "mode": mode})

    def list_files(
        self, path: str = ".", *, recursive: bool = False, max_entries: int = 100_000
    ) -> builtins.list[FileInfo]:
        """The entries of a folder, by name; links are not followed."""
        rows = self._file_call(Op.LIST, {"path": path, "recursive": recursive, "most": max_entries})
        return [_checked(FileInfo, dict(zip(("path", "kind", "size", "mode", "mtime"), row)), self.name) for row in rows]

    def upload(self, source: str | os.PathLike[str], target: str) -> None:
        """Copies a host file or folder to `target` in the sandbox. Raises FileNotFoundError, OSError."""
        source = Path(source)
        if not source.is_dir():
            self.write_file(target, source.read_bytes(), mode=source.stat().st_mode & 0o777)
            return
        with tempfile.TemporaryFile() as spool:
            with tarfile.open(fileobj=spool, mode="w:") as archive:
                archive.add(source, arcname=".", filter=_owned_by_guest)
            size = spool.seek(0, io.SEEK_END)
            spool.seek(0)
            with self._awake():
                for start in range(0, size, _CHUNK):
                    last = start + _CHUNK >= size
                    self._file_call(Op.UNPACK, {"data": spool.read(_CHUNK), "target": target, "last": last})

    def download(self, source: str, target: str | os.PathLike[str], *, max_bytes: int = 8 << 30) -> None:
        """Copies a file or folder of the sandbox to the host path `target`. The guest is not trusted: nothing is written
        outside `target`, device files and links that leave it are refused. Raises FileNotFoundError, LimitExceeded.
        """
        with tempfile.TemporaryFile() as spool, self._awake():
            reply = self._file_call(Op.PACK, {"path": source, "offset": 0})
            while True:
                spool.write(reply["data"])
                if spool.tell() > max_bytes:
                    raise LimitExceeded(f"sandbox {self.name}: {source} is larger than {max_bytes} bytes (max_bytes=)")
                if reply["end"]:
                    break
                reply = self._file_call(Op.PACK, {"path": None, "offset": spool.tell()})
            spool.seek(0)
            _extract(spool, Path(target), posixpath.basename(posixpath.normpath(source)), self.name)

    def _file_call(self, op: Op, value: Any) -> Any:
        try:
            return self._call(op, value, timeout=60.0)
        except GuestError as error:
            kind = error.info["type"] if error.info["type"] in _GUEST_ERRORS else "OSError"
            raise getattr(builtins, kind)(f"sandbox {self.name}: {error.info['message']}") from None

    # ---- snapshots ----------------------------------------------------------------------------------------------

    def snapshot(self, label: str | None = None, *, engine: Literal["auto", "fork"] = "auto") -> Snapshot:
        """This very state, memory and disk; the sandbox runs on.

        Raises:
            SnapshotError: the state can't be captured (the message names what stands in the way), or snapshots nest
                too deep; the sandbox goes on unharmed.
        """
        if engine not in ("auto", "fork"):
            raise ValueError(f"engine {engine!r} is not built: choose 'auto' or 'fork'")
        return self._take(keep=True, label=label)

    def freeze(self, label: str | None = None) -> Snapshot:
        """The sandbox itself becomes the snapshot: costs nothing, and the sandbox is over. For search nodes."""
        snapshot = self._take(keep=False, label=label)
        self._end("terminated", None)
        return snapshot

    def _take(self, *, keep: bool, label: str | None) -> Snapshot:
        with self._awake():
            try:
                taken = self._backend.snapshot(self._live, keep=keep, timeout=_START_TIMEOUT)
            except SandboxDied as error:
                raise self._fatal(error) from None
            snapshot = Snapshot(self._backend, taken, self._spec, self.parent, label)
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
                found = [c for c in self._checkpoints if (label is None or c.label == label) and not c.deleted]
                if not found:
                    labels = [c.label for c in self._checkpoints]
                    raise KeyError(f"sandbox {self.name} has no checkpoint {label!r}: there are {labels}")
                snapshot = found[-1]
            if snapshot.deleted:
                raise SnapshotError(f"{snapshot!r} was deleted: rewind to another")
            if self._state == "terminated":
                raise SandboxDied(f"sandbox {self.name} was terminated: Sandbox.restore makes a new one")
            (live,) = self._backend.restore(snapshot.id, names=[None], timeout=_START_TIMEOUT, replace=self._live)
            self._live.channel.replace(live.channel.detach())
            self._state, self.parent, self._oom_kills = "running", snapshot, 0
            _sandboxes[self.id] = self
            self._reseed(next(iter(copy_seeds(rng, 1))))

    def _reseed(self, seed: int | None) -> None:
        if seed is not None:
            self._call(Op.RESEED, seed, timeout=30.0)

    # ---- the end ------------------------------------------------------------------------------------------------

    @property
    def status(self) -> str:
        """ "running", "stopped" (idle, wakes at the next call), "dead" (it ended by itself) or "terminated"."""
        return self._state

    def terminate(self) -> None:
        """Kills everything in it and frees what it held, checkpoints too. Idempotent."""
        with self._lock:
            for checkpoint in self._checkpoints:
                checkpoint.delete()
            self._checkpoints.clear()
            if self._resting is not None:
                self._resting.delete()
            self._end("terminated", "it was terminated")

    def _end(self, state: Literal["dead", "terminated"], reason: str | None) -> None:
        was, self._state = self._state, state
        _sandboxes.pop(self.id, None)
        _idle.forget(self)
        if was == "running" and reason is not None:
            try:
                self._backend.terminate(self._live, reason)
            except SandboxDied:  # the supervisor is gone, and everything with it
                pass

    def _stop_idle(self) -> None:
        """Called by the idle watch: ends an ephemeral sandbox, puts another to rest."""
        with self._lock:
            if self._state != "running":
                return
            if self._spec.ephemeral:
                self._end("dead", f"it was idle for {self._spec.idle_timeout} s")
                return
            try:
                taken = self._backend.snapshot(self._live, keep=False, timeout=_START_TIMEOUT)
            except SnapshotError:  # something in it still runs: it isn't idle, only unasked
                return
            self._resting = Snapshot(self._backend, taken, self._spec, self.parent, None)
            self._state = "stopped"

    @contextmanager
    def _awake(self) -> Iterator[None]:
        """Holds the sandbox's lock over a call; wakes a stopped sandbox, refuses one that is gone."""
        with self._lock:
            if self._state == "stopped":
                assert self._resting is not None
                resting, self._resting = self._resting, None
                self.rewind(resting)
                resting.delete()
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

    # ---- calls to the guest --------------------------------------------------------------------------------------

    def _call(self, op: Op, value: Any = None, *, timeout: float) -> Any:
        """One request to the guest. Raises GuestError for what its handler raised; anything worse ends the sandbox."""
        with self._awake():
            try:
                return self._live.channel.call(op, value, timeout=timeout)
            except (SandboxTimeout, SandboxDied, ProtocolError) as error:
                raise self._fatal(error) from None

    def _request(self, op: Op, meta: bytes = b"", *data: Any, timeout: float) -> wire.Frame:
        """`_call` with bytes both ways."""
        with self._awake():
            try:
                return self._live.channel.request(op, meta, *data, timeout=timeout)
            except (SandboxTimeout, SandboxDied, ProtocolError) as error:
                raise self._fatal(error) from None

    def _fatal(self, error: Exception) -> Exception:
        """Ends the sandbox over an error, which comes back with the cause in its message."""
        if isinstance(error, GuestError):
            error = ProtocolError(f"sandbox {self.name}: its interpreter failed: {error}")
        try:
            reason = self._backend.death(self._live) if isinstance(error, SandboxDied) else ""
        except SandboxError as gone:
            reason = str(gone)
        self._end("dead", str(error))
        if reason.startswith("memory"):
            return LimitExceeded(f"sandbox {self.name} was killed: {reason}; create it with a larger memory=")
        if isinstance(error, SandboxDied):
            return SandboxDied(f"sandbox {self.name} is gone: {reason}")
        return type(error)(f"{error}; it was killed")


def make_limits(cpus: Any, memory: Any, disk: Any, pids: Any) -> Limits:
    """Limits from what a caller gave; what was left out keeps its default. Raises ValueError."""
    given = {"cpus": cpus, "memory": memory, "disk": disk, "pids": pids}
    explicit = frozenset(name for name, value in given.items() if value is not _UNSET and value is not None)
    if "cpus" in explicit and not 0 < cpus <= 1024:
        raise ValueError(f"cpus is above 0 and at most 1024, not {cpus!r}")
    if "pids" in explicit and not (isinstance(pids, int) and pids > 0):
        raise ValueError(f"pids is an int above 0, not {pids!r}")
    return Limits(
        _DEFAULTS.cpus if cpus is _UNSET else cpus,
        _DEFAULTS.memory_bytes if memory is _UNSET else None if memory is None else parse_bytes(memory),
        _DEFAULTS.disk_bytes if disk is _UNSET else None if disk is None else parse_bytes(disk),
        _DEFAULTS.pids if pids is _UNSET else pids,
        explicit,
    )


def _code_result(fields: Any, name: str) -> CodeResult:
    fields = dict(fields) if isinstance(fields, dict) else {}
    if isinstance(fields.get("error"), dict):
        fields["error"] = _checked(ErrorInfo, fields["error"], name)
    return _checked(CodeResult, fields, name)


def _checked(kind: type[Any], fields: Any, name: str) -> Any:
    """A record from a guest's fields. Raises ProtocolError when they aren't its fields."""
    try:
        return kind(**fields)
    except TypeError as error:
        raise ProtocolError(f"sandbox {name}: {error}") from None


def _owned_by_guest(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    return member


def _extract(spool: Any, target: Path, base: str, name: str) -> None:
    """Unpacks a guest's archive whose one root is `base` as `target`; tarfile's data filter keeps it inside."""
    with tempfile.TemporaryDirectory(dir=target.absolute().parent, prefix=".download-") as folder:
        try:
            with tarfile.open(fileobj=spool, mode="r:") as archive:
                archive.extractall(folder, filter="data")
        except tarfile.TarError as error:
            raise ProtocolError(f"sandbox {name}: its archive is refused: {error}") from None
        os.replace(os.path.join(folder, base), target)
