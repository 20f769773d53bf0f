"""What a job takes along: pickles in which snapshots are tickets, and references of Ray's stay what Ray counts.

A snapshot is packed once, as an archive in Ray's object store, which brings it to each node once; a worker makes a
snapshot of its own from that. Both ends are our own trusted processes.
"""

from __future__ import annotations

import io
import pickle
import tempfile
import time
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import ray
from ray import cloudpickle

from sandbox_gym import archive
from sandbox_gym._snapshot import Snapshot
from sandbox_gym.archive import Damaged
from sandbox_gym.backends import lookup
from sandbox_gym.errors import SnapshotError
from sandbox_gym.sandbox import Sandbox

LOAD_TIMEOUT = 600.0  # seconds to pack, to fetch, or to load one


@dataclass(frozen=True)
class Ticket:
    """What stands for a snapshot on its way."""

    id: str
    backend: str
    kind: str | None


@dataclass(frozen=True)
class Packed:
    """A snapshot in the object store, for as long as there is a `ref`."""

    ticket: Ticket
    ref: Any


@dataclass(frozen=True)
class Parcel:
    """`data`: a pickle; `outside`: what it names by number, each a Ticket, or a reference or an actor of Ray's, which
    Ray must see itself to count it. `packed`: the snapshots of those tickets.
    """

    data: bytes
    outside: tuple[Any, ...]
    packed: tuple[Packed, ...]


# ---- packing ------------------------------------------------------------------------------------------------------


class Packing:
    """Of one map: each snapshot once, freed with it, or as soon as nobody has that snapshot or a parcel with it."""

    def __init__(self) -> None:
        self._packed: weakref.WeakKeyDictionary[Snapshot, Packed] = weakref.WeakKeyDictionary()

    def pack(self, value: Any) -> Parcel:
        """Raises SnapshotError, BackendUnavailable for a snapshot that can't be an archive; TypeError or PicklingError
        for what can't be pickled.
        """
        buffer = io.BytesIO()
        pickler = _Pickler(buffer, self._snapshot)
        pickler.dump(value)
        return Parcel(buffer.getvalue(), tuple(pickler.outside), tuple(pickler.packed))

    def _snapshot(self, snapshot: Snapshot) -> Packed:
        if snapshot not in self._packed:
            with tempfile.TemporaryFile() as spool:
                archive.write(snapshot, spool, LOAD_TIMEOUT)
                # Mapped: an archive may be as large as a sandbox's memory, and need not be there twice.
                ref = ray.put(np.asarray(np.memmap(spool, np.uint8, "r")))
            ticket = Ticket(snapshot.id, snapshot._backend.name, snapshot.kind)
            self._packed[snapshot] = Packed(ticket, ref)
        return self._packed[snapshot]


class _Pickler(cloudpickle.CloudPickler):
    def __init__(self, file: io.BytesIO, pack: Any) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.outside: list[Any] = []
        self.packed: list[Packed] = []
        self._pack = pack
        self._numbers: dict[int, int] = {}  # by id(): what is pickled lives until it is

    def persistent_id(self, value: Any) -> int | None:
        if isinstance(value, Sandbox):
            raise TypeError(f"{value!r} stays in its process: a job takes snapshots along, so take one of it")
        if not isinstance(value, (Snapshot, ray.ObjectRef, ray.actor.ActorHandle)):
            return None
        number = self._numbers.setdefault(id(value), len(self.outside))
        if number == len(self.outside):
            if isinstance(value, Snapshot):
                self.packed.append(self._pack(value))
                value = self.packed[-1].ticket
            self.outside.append(value)
        return number


# ---- arriving -----------------------------------------------------------------------------------------------------


class Arrivals:
    """The snapshots of a worker process, each loaded once. What can't be loaded is told to those who need it."""

    def __init__(self) -> None:
        self._arrived: dict[str, Snapshot | Exception] = {}

    def load(self, packed: Iterable[Packed]) -> None:
        for one in packed:
            if not isinstance(self._arrived.get(one.ticket.id), Snapshot):
                try:
                    self._arrived[one.ticket.id] = _load(one)
                except Exception as error:
                    self._arrived[one.ticket.id] = error

    def forget(self, ids: Iterable[str]) -> None:
        for id in ids:
            self._arrived.pop(id, None)

    def unpack(self, data: bytes, outside: tuple[Any, ...]) -> Any:
        """Raises what `load` met with, SnapshotError, and what unpickling does."""
        return _Unpickler(io.BytesIO(data), outside, self._arrived).load()


class _Unpickler(pickle.Unpickler):
    def __init__(
        self, file: io.BytesIO, outside: tuple[Any, ...], arrived: Mapping[str, Snapshot | Exception]
    ) -> None:
        super().__init__(file)
        self._outside = outside
        self._arrived = arrived

    def persistent_load(self, number: Any) -> Any:
        thing = self._outside[number]
        if isinstance(thing, Ticket):
            thing = self._arrived[thing.id]
        if isinstance(thing, Exception):
            raise thing
        return thing


def _load(packed: Packed) -> Snapshot:
    """Raises SnapshotError, and what Ray does when the archive is lost."""
    ticket = packed.ticket
    deadline = time.monotonic() + LOAD_TIMEOUT
    file = cast("Any", _Stored(ray.get(packed.ref, timeout=LOAD_TIMEOUT)))
    try:
        manifest, blobs = archive.read(file)
        backend = lookup.get(ticket.backend)
        image = archive.restore_parts(backend, manifest, blobs, deadline - time.monotonic())
    except (Damaged, SnapshotError) as error:
        raise SnapshotError(f"snapshot {ticket.id}, which came along with a job: {error}") from None
    snapshot = archive.make_ready(image, rng="same")
    snapshot.kind = ticket.kind
    return snapshot


class _Stored(io.RawIOBase):
    """Bytes where they lie in the object store, as a file."""

    def __init__(self, stored: npt.NDArray[np.uint8]) -> None:
        self._bytes = stored.data
        self._at = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        block = self._bytes[self._at : self._at + len(buffer)]
        buffer[: len(block)] = block
        self._at += len(block)
        return len(block)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (len(self._bytes) if whence == io.SEEK_END else 0)
        return self._at
