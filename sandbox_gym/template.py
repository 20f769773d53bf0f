"""Templates: sandboxes that were set up once, kept on disk under a name, to start from in milliseconds."""

from __future__ import annotations

import builtins
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sandbox_gym import _records, archive
from sandbox_gym._records import UNSET
from sandbox_gym._snapshot import Snapshot
from sandbox_gym._store import Store, check_name, default_folder
from sandbox_gym.api import Backend, CodeResult, ExecResult, Limits, SandboxSpec, parse_bytes
from sandbox_gym.archive import Damaged
from sandbox_gym.backends import lookup
from sandbox_gym.errors import SandboxDied, SandboxError, SnapshotError
from sandbox_gym.network import Allow
from sandbox_gym.sandbox import Sandbox

_TIMEOUT = 600.0  # seconds to save or load one
_MOST_OUTPUT = 4000  # characters of a failed step's output in the error
_MOST_READY = 8  # of a process: template and limits

Step = str | Callable[[Sandbox], object]


@dataclass(frozen=True)
class Template:
    """A name in a store of templates (`$SANDBOX_GYM_HOME`, else in your data folder): whoever uses it gets what was
    built under that name last. Made by `build` and `get`; `Sandbox.create(image=template)` starts from it.
    """

    name: str
    folder: str

    # ---- making and finding -------------------------------------------------------------------------------------

    @staticmethod
    def build(
        name: str,
        image: Any = None,
        setup: Sequence[Step] = (),
        *,
        backend: str = "native",
        step_timeout: float = 600.0,
        **options: Any,
    ) -> Template:
        """Makes a sandbox of `image`, sets it up, and keeps it with its memory: in place of a template of that name.

        `setup`: steps in order, each a line for the shell, or a function that is given the sandbox
        (`lambda box: box.run_code("import numpy")`: what it imports is in memory from the start). `step_timeout`:
        seconds for a line. `options`: limits, `env` and `mounts`, as for `Sandbox.create`. Needs root, and criu.

        Raises:
            SandboxError: a step failed, with its output; nothing is kept then.
            BackendUnavailable, SnapshotError: this machine can't write a snapshot to disk, or not this one.
        """
        check_name(name)
        if isinstance(setup, str):
            raise ValueError("setup is a list of steps, not one line")
        for step in setup:
            if not isinstance(step, str) and not callable(step):
                raise ValueError(
                    f"a step is a line for the shell, or a function of the sandbox, not {step!r}"
                )
        lasting = {"name", "ttl", "idle_timeout", "ephemeral"} & options.keys()
        if lasting:
            raise ValueError(f"{', '.join(sorted(lasting))}: give it to Sandbox.create(image=template)")
        archive.archiving(lookup.get(backend)).facts(SandboxSpec())
        template = Template(name, default_folder())
        with Sandbox.create(backend=backend, image=image, **options) as box:
            for number, step in enumerate(setup, 1):
                _tell(f"template {name}: step {number} of {len(setup)}: {_title(step)}")
                _run(box, name, number, step, step_timeout)
            snapshot = box.snapshot(engine="criu")
        try:
            template._store.save(name, snapshot, _TIMEOUT)
        finally:
            snapshot.delete()
        _tell(f"template {name}: kept in {template.folder}")
        return template

    @staticmethod
    def get(name: str) -> Template:
        """Raises KeyError when there is none of that name."""
        template = Template(name, default_folder())
        template._store.used(name)
        return template

    @staticmethod
    def list() -> builtins.list[Template]:
        """All of them, by name."""
        folder = default_folder()
        return [Template(name, folder) for name in Store(folder).names()]

    @staticmethod
    def prune(max_bytes: int | str) -> builtins.list[str]:
        """Deletes those that were used least lately, until the others take at most that much ("10Gi") together. Returns
        their names.
        """
        most = max_bytes if type(max_bytes) is int and max_bytes == 0 else parse_bytes(max_bytes)
        return Store(default_folder()).prune(most)

    def delete(self) -> None:
        """Takes it from the disk. Idempotent. Sandboxes that were started from it go on."""
        self._store.delete(self.name)

    # ---- what it is ---------------------------------------------------------------------------------------------

    @property
    def size_bytes(self) -> int:
        """On disk, with what it shares with other templates. Raises KeyError when it was deleted, SnapshotError."""
        try:
            return self._store.read(self.name).stored_bytes
        except Damaged as error:
            raise SnapshotError(f"template {self.name}: {error}; build it again") from None

    @property
    def used(self) -> float:
        """When it was built or started from last, in seconds since the epoch. Raises KeyError."""
        return self._store.used(self.name)

    @property
    def _store(self) -> Store:
        return Store(self.folder)

    # ---- starting -----------------------------------------------------------------------------------------------

    def start(
        self,
        name: str | None = None,
        *,
        backend: str = "native",
        cpus: float | None = UNSET,
        memory: int | str | None = UNSET,
        disk: int | str | None = UNSET,
        pids: int | None = UNSET,
        ttl: float | None = None,
        idle_timeout: float | None = None,
        ephemeral: bool = True,
        network: Allow | None = None,
    ) -> Sandbox:
        """A sandbox at the end of the set-up; `Sandbox.create(image=template)` does this. Limits that are not given are
        the template's. The first in a process, and the first under other limits, is loaded from disk; those that
        follow are copies of it. Random numbers go on differently in each.

        Raises:
            KeyError: it was deleted.
            SnapshotError: it is damaged, or this machine lacks what it needs.
        """

        def change(spec: SandboxSpec) -> SandboxSpec:
            limits = _merged(spec.limits, cpus, memory, disk, pids)
            return replace(spec, limits=limits, ttl=ttl, idle_timeout=idle_timeout, ephemeral=ephemeral)

        wish = cpus, memory, disk, pids, ttl, idle_timeout, ephemeral
        slot = _slot((self, self._store.stamp(self.name), repr(wish)))
        gone: Backend | None = None
        for last in (False, True):
            chosen = lookup.get(backend, failed=gone)
            try:
                return Sandbox._restore(slot.get(self, chosen, change), [name], "diverge", network)[0]
            except (SandboxDied, SnapshotError):
                # What was ready may have been killed, or its supervisor: then it is loaded again. Else that is no help.
                if last or not slot.forget():
                    raise
                gone = chosen if _is_gone(chosen) else None
        raise AssertionError("unreachable")

    def _load(self, backend: Backend, change: Callable[[SandboxSpec], SandboxSpec]) -> Snapshot:
        """From disk; then its first copy stands still as what the others are copied from, where fork can do that."""
        try:
            with self._store.opened(self.name) as (manifest, blobs):
                image = archive.restore_parts(backend, manifest, blobs, _TIMEOUT, change=change)
        except (Damaged, SnapshotError) as error:
            raise SnapshotError(f"template {self.name}: {error}; build it again") from None
        # Not "same": a first reseeding may take long (numpy loads its generators), and is done here for all copies.
        return archive.make_ready(image, rng="diverge")


# ---- what is ready in this process -------------------------------------------------------------------------------


@dataclass
class _Slot:
    """A template under certain limits; loaded by the first who needs it, while others wait for that."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    snapshot: Snapshot | None = None

    def get(
        self, template: Template, backend: Backend, change: Callable[[SandboxSpec], SandboxSpec]
    ) -> Snapshot:
        with self.lock:
            # Of another backend: of a supervisor that is gone, or of the process that this one was forked from.
            if self.snapshot is None or self.snapshot._backend is not backend:
                self.snapshot = None
                self.snapshot = template._load(backend, change)
            return self.snapshot

    def forget(self) -> bool:
        """Whether there was anything."""
        with self.lock:
            had, self.snapshot = self.snapshot is not None, None
            return had


_slots: OrderedDict[object, _Slot] = OrderedDict()
_lock = threading.Lock()


def _slot(key: object) -> _Slot:
    """The slots that were used least lately are given up, and their snapshots with the last handle on them."""
    with _lock:
        slot = _slots.setdefault(key, _Slot())
        _slots.move_to_end(key)
        while len(_slots) > _MOST_READY:
            _slots.popitem(last=False)
        return slot


def _is_gone(backend: Backend) -> bool:
    try:
        backend.list()
    except SandboxDied:
        return True
    return False


def _merged(limits: Limits, cpus: Any, memory: Any, disk: Any, pids: Any) -> Limits:
    """A template's limits, but for those that are given. Raises ValueError."""
    given = _records.make_limits(cpus, memory, disk, pids)
    own = {
        name
        for name, value in (("cpus", cpus), ("memory", memory), ("disk", disk), ("pids", pids))
        if value is UNSET
    }
    return Limits(
        limits.cpus if "cpus" in own else given.cpus,
        limits.memory_bytes if "memory" in own else given.memory_bytes,
        limits.disk_bytes if "disk" in own else given.disk_bytes,
        limits.pids if "pids" in own else given.pids,
        given.explicit | (limits.explicit & own),
    )


# ---- steps -------------------------------------------------------------------------------------------------------


def _run(box: Sandbox, name: str, number: int, step: Step, timeout: float) -> None:
    """Raises SandboxError."""
    result = box.shell(step, timeout=timeout) if isinstance(step, str) else step(box)
    if not isinstance(result, (ExecResult, CodeResult)) or result.ok:
        return
    if result.timed_out:
        how = "did not end in time"
    elif isinstance(result, ExecResult):
        how = f"ended with {result.exit_code}"
    else:
        how = f"raised {result.error}"
    output = f"{result.stdout}{result.stderr}".strip()[-_MOST_OUTPUT:]
    raise SandboxError(f"template {name}: step {number}, {_title(step)}, {how}\n{output}")


def _title(step: Step) -> str:
    return repr(step[:200]) if isinstance(step, str) else getattr(step, "__name__", repr(step))


def _tell(line: str) -> None:
    """Progress, to whoever watches."""
    if sys.stderr.isatty():
        print(line, file=sys.stderr, flush=True)
