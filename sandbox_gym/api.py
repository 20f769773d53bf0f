"""The records and protocols that cross layers: what a sandbox is asked to be, what its calls return, what makes it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from sandbox_gym.network import Allow, NetworkRecord

if TYPE_CHECKING:
    from sandbox_gym.channel import Channel

Rng = Literal["same", "diverge"] | int
"""A copy's random state: as its origin's, or reseeded (from the system, or from an int of your own)."""

MAX_MOUNTS = 128
_UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}


def parse_bytes(size: int | str) -> int:
    """`"1Gi"`, `"512M"`, `4096` as a number of bytes. Raises ValueError for anything else, zero and below included."""
    if isinstance(size, bool) or not isinstance(size, (int, str)):
        raise ValueError(f"a size is an int of bytes or a string like '1Gi', not {size!r}")
    if isinstance(size, int):
        value = size
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", size.lower())
        if not match or match[2] not in _UNITS:
            raise ValueError(f"{size!r} is no size: write bytes, or a number with K, M, G, T, Ki, Mi, Gi, Ti")
        value = int(float(match[1]) * _UNITS[match[2]])
    if value <= 0:
        raise ValueError(f"a size is above zero, not {size!r} (None means no limit)")
    return value


@dataclass(frozen=True)
class Limits:
    """What a sandbox may use. None means no limit. `explicit` names the ones that the caller asked for: one of those
    that can't be enforced is an error, a default that can't be is a warning.
    """

    cpus: float | None = 1.0
    memory_bytes: int | None = 2**30
    disk_bytes: int | None = 2**31
    pids: int | None = 256
    explicit: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Mount:
    """A host folder or file that the sandbox sees, read-only, at `target`."""

    source: str
    target: str


@dataclass(frozen=True)
class SandboxSpec:
    """Everything that makes a sandbox what it is; copies share it."""

    limits: Limits = field(default_factory=Limits)
    rootfs: str | None = (
        None  # None: this host's Python environment; else a directory that holds a root file system
    )
    env: Mapping[str, str] = field(default_factory=dict)
    mounts: Sequence[Mount] = ()
    python_path: Sequence[str] | None = (
        None  # folders that go on the guest's sys.path; None: those of the client's
    )
    ttl: float | None = None  # seconds of life
    idle_timeout: float | None = None  # seconds without a call
    ephemeral: bool = True
    image: str | None = None  # the digest of the unpacked image whose root file system that is
    workdir: str | None = None  # where programs start; None: /workspace
    network: Allow | None = None  # what it may reach; None: nothing
    in_place: Sequence[str] = ()  # packages' folders that are shown too: what editable installs lead to


def make_mounts(mounts: Sequence[str | os.PathLike[str] | tuple[Any, Any] | Mount]) -> tuple[Mount, ...]:
    """`"/data"`, `("/data", "/mnt/data")` or a Mount; sources must exist. Raises FileNotFoundError, ValueError."""
    if len(mounts) > MAX_MOUNTS:
        raise ValueError(
            f"a sandbox takes at most {MAX_MOUNTS} mounts, not {len(mounts)}: mount a folder above them"
        )
    made = []
    for mount in mounts:
        if isinstance(mount, Mount):
            source, target = mount.source, mount.target
        elif isinstance(mount, tuple):
            source, target = os.fspath(mount[0]), os.fspath(mount[1])
        else:
            source = target = os.path.abspath(os.fspath(mount))
        real = os.path.realpath(source)
        if not os.path.exists(real):
            raise FileNotFoundError(f"mount source {source!r} does not exist")
        if not target.startswith("/") or ".." in Path(target).parts:
            raise ValueError(f"a mount's target is an absolute path without '..', not {target!r}")
        made.append(Mount(real, os.path.normpath(target)))
    return tuple(made)


@dataclass(frozen=True)
class ErrorInfo:
    """An exception in the guest, as data."""

    type: str
    message: str
    traceback: str

    def __str__(self) -> str:
        return f"{self.type}: {self.message}"


@dataclass(frozen=True)
class Artifact:
    """Something that a cell has shown. `mime`: "image/png" (figures and pictures), "text/csv" (tables), or
    "application/vnd.plotly.v1+json" (a plotly figure where no browser could draw it; `plotly.io.from_json` reads it).
    `data`: its bytes, from the guest: a PNG by its first bytes, and no more is promised.
    """

    mime: str
    data: bytes


@dataclass(frozen=True)
class CodeResult:
    """What `run_code` returns. `value`: repr of the last expression, None if there is none. `duration` in seconds;
    `stdout_cut`, `stderr_cut`: bytes that were dropped past the bound. `artifacts`: what the cell has shown beside
    text, in its order; `notes`: what is missing among them, and why.
    """

    stdout: str
    stderr: str
    value: str | None
    error: ErrorInfo | None
    timed_out: bool
    duration: float
    artifacts: tuple[Artifact, ...] = ()
    stdout_cut: int = 0
    stderr_cut: int = 0
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return self.error is None and not self.timed_out


@dataclass(frozen=True)
class ExecResult:
    """What `shell` and `exec` return. `exit_code`: the program's, or 128 + the signal that ended it. `limit`: the limit
    that killed it ("memory"), if one did. `duration` in seconds; `*_cut`: bytes dropped past the bound.
    """

    exit_code: int
    stdout: str
    stderr: str
    timed_out: bool
    duration: float
    stdout_cut: int = 0
    stderr_cut: int = 0
    limit: str | None = None

    @property
    def ok(self) -> bool:
        return self.exit_code == 0 and not self.timed_out


@dataclass(frozen=True)
class ShellResult(ExecResult):
    """What a session's `run` returns. `ended`: its shell is gone, and the next command begins with a fresh one."""

    ended: bool = False


@dataclass(frozen=True)
class ProcessInfo:
    """A process that was started. `argv`: its first 16 arguments, 256 characters of each; `pid`: inside, 0 when it
    could not be started; `exit_code`: None while it runs; `*_cut`: bytes of its output that were dropped unread.
    """

    id: str
    argv: tuple[str, ...]
    pid: int
    pty: bool
    exit_code: int | None
    stdout_cut: int
    stderr_cut: int


@dataclass(frozen=True)
class FileInfo:
    """An entry of `list_files`. `kind`: "file", "dir", "link" or "other"; `size` in bytes; `target`: where a link leads
    to, as it is written in it.
    """

    path: str
    kind: str
    size: int
    mode: int
    mtime: float
    target: str = ""


@dataclass
class Live:
    """A sandbox as its backend hands it out: an id, a channel to its guest."""

    id: str
    name: str
    channel: Channel


@dataclass(frozen=True)
class Taken:
    """A snapshot as its backend hands it out. `depth_left`: how many more nest below it as it is."""

    id: str
    engine: str
    why: str
    depth_left: int


@dataclass(frozen=True)
class Deviation:
    """What a backend does not do as the conformance suite (`sandbox_gym.testing`) has it. `check`: that check's name;
    `why`: for users, in the README's table.
    """

    check: str
    why: str


class Backend(Protocol):
    """What makes sandboxes. Every method is thread-safe and takes a timeout in seconds."""

    name: str
    deviations: Sequence[Deviation]  # on the class: told without starting anything
    any_depth: bool  # snapshots nest without end: what is too deep is rebased, which takes longer
    rest_engine: str  # by which an idle sandbox is put to rest, if that takes it

    def create(self, spec: SandboxSpec, *, name: str | None, timeout: float) -> Live:
        """Raises BackendUnavailable, LimitExceeded, SandboxTimeout."""

    def snapshot(
        self,
        live: Live,
        *,
        keep: bool,
        engine: str,
        settled: bool,
        obstacle: str | None,
        timeout: float,
        levels: int = 1,
    ) -> Taken:
        """Captures memory and disk. With `keep` the sandbox goes on, perhaps with another socket in `live.channel`;
        without, the sandbox itself becomes the snapshot. The caller holds the sandbox's lock: no call is under way.
        `settled`: the guest has made itself ready for an engine that needs it; without, such an engine is refused.
        `obstacle`: what the guest itself sees in the way of being copied.
        `levels`: how many more snapshots are to nest below this one at the least.
        Raises SnapshotError (the sandbox goes on), SandboxDied.
        """

    def restore(
        self,
        snapshot_id: str,
        *,
        names: Sequence[str | None],
        timeout: float,
        replace: Live | None = None,
        network: Allow | Literal["same"] | None = "same",
    ) -> list[Live]:
        """One new sandbox for each name, all or none. With `replace` the (only) one goes on under that sandbox's id and
        name, and what was there before is killed. `network`: what they may reach, by default what the snapshot's
        sandbox could; connections to outside that it had have ended in them.
        Raises SnapshotError, LimitExceeded.
        """

    def set_budget(self, *, memory: int | None, disk: int | None) -> None:
        """Bytes that all its sandboxes and snapshots may hold together, looked at before more is made: from then on
        `create`, `snapshot` and `restore` raise BudgetExceeded. Raises BackendUnavailable where nothing counts them.
        """

    def put_on_disk(self, snapshot_id: str, *, timeout: float) -> None:
        """Exchanges a snapshot's frozen process for an image. Its memory is free when nothing else hangs from it.
        Raises SnapshotError, BackendUnavailable.
        """

    def release(self, snapshot_id: str) -> None:
        """Drops a snapshot; it goes when nothing that was restored from it lives. Idempotent."""

    def release_later(self, snapshot_id: str) -> None:
        """`release` from a finaliser: takes no lock, sends nothing now."""

    def terminate(self, live: Live, reason: str | None = None) -> None:
        """Kills everything in the sandbox. Idempotent; returns when its processes are gone."""

    def interrupt(self, live: Live) -> None:
        """SIGINT to the guest's interpreter."""

    def death(self, live: Live) -> str:
        """Why a sandbox is gone, for an error's message; starts with "memory" where that limit killed it."""

    def usage(self, node_id: str) -> dict[str, int]:
        """Of a sandbox or snapshot: `memory_bytes`, `disk_bytes`, `oom_kills` (by its memory limit, so far),
        `children` (processes that hang from its own).
        """

    def network_log(self, live: Live) -> list[NetworkRecord]:
        """What a sandbox has tried to reach, oldest first; the last thousand. Raises SandboxDied."""

    def list(self) -> list[dict[str, Any]]:
        """The live sandboxes of this client."""

    def alive(self) -> bool:
        """False once it can make nothing any more: its supervisor was killed."""

    def close(self) -> None:
        """Ends everything this backend has made. Idempotent."""


@runtime_checkable
class Archiving(Protocol):
    """A backend whose snapshots can be files: `engine` "criu", or "fork" once a copy was taken by that. Such a snapshot
    is a `state` of plain JSON, and numbered parts. Timeouts in seconds.
    """

    def facts(self, spec: SandboxSpec) -> dict[str, Any]:
        """What a snapshot of such a sandbox relies on here, as plain JSON. Raises BackendUnavailable where there can be
        none.
        """

    def lacks(self, facts: Mapping[str, Any], state: Mapping[str, Any]) -> Sequence[str]:
        """What stands in the way, here, of a snapshot that these facts of another place belong to; in words. Raises
        BackendUnavailable, and KeyError or TypeError for what no `facts` and `describe` have told.
        """

    def describe(self, snapshot_id: str) -> dict[str, Any]:
        """A snapshot's state; of it `parts`, how many it has. Raises SnapshotError."""

    def spec_of(self, state: Mapping[str, Any]) -> SandboxSpec:
        """Of the sandbox whose snapshot has that state."""

    def pack(self, snapshot_id: str, part: int, write: Callable[[bytes], object], *, timeout: float) -> int:
        """Gives `write` the bytes of a part, which are always the same. Returns how many files are in it. Raises
        SnapshotError, and what `write` does.
        """

    def unpack(
        self,
        spec: SandboxSpec,
        state: Mapping[str, Any],
        files: Sequence[int],
        blocks: Iterable[bytes],
        *,
        timeout: float,
    ) -> Taken:
        """Makes a snapshot of all parts, one after the other, for sandboxes of that spec. All or nothing. `files`: how
        many are in each part. Raises SnapshotError, and what `blocks` does.
        """
