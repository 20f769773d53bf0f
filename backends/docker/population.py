"""The sandboxes and snapshots of one client, and when an image of theirs may go."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from sandbox_gym.api import SandboxSpec
from sandbox_gym.backends.egress.network import Connection
from sandbox_gym.errors import LimitExceeded, SandboxDied, SandboxError, SnapshotError
from sandbox_gym.network import Allow

from .daemon import Daemon
from .groups import Groups
from .roots import Root

_DEATHS_KEPT = 1000


@dataclass(eq=False)
class Shot:
    """A snapshot. `image`: its disk; `store`: a container that never starts, and holds the checkpoint's files in its
    folder.
    """

    id: str
    image: str  # "" where the checkpoint has the disk, too
    store: str
    checkpointed: bool  # or there is the disk alone
    spec: SandboxSpec
    root: Root
    network: Allow | None
    connections: Sequence[Connection]  # to outside, which end in copies
    origin: Shot | None  # whose image this one's is made of
    memory_bytes: int
    depth: int  # layers of disk above the root's


@dataclass(eq=False)
class Box:
    """A sandbox. `dies_at`: monotonic."""

    id: str
    name: str
    container: str
    spec: SandboxSpec
    root: Root
    network: Allow | None
    origin: Shot | None
    groups: Groups | None = None  # once looked up
    dies_at: float | None = None
    created: float = field(default_factory=time.time)
    reason: str = ""  # why it was killed, when it was


class Population:
    """Thread-safe; the daemon is asked outside of the lock."""

    def __init__(self, daemon: Daemon, cap: int) -> None:
        self._daemon = daemon
        self._cap = cap
        self._lock = threading.Lock()
        self._expected = 0
        self.boxes: dict[str, Box] = {}
        self.shots: dict[str, Shot] = {}
        self._unneeded: list[Shot] = []  # released, and their images still used
        self._dead: dict[str, Box] = {}  # the last thousand, by id

    @contextmanager
    def room(self, names: Sequence[str | None], replaced: str | None = None) -> Iterator[None]:
        """For so many more while they are made. Raises LimitExceeded, and SandboxError for a taken name."""
        with self._lock:
            live = len(self.boxes) + self._expected - (replaced in self.boxes)
            if live + len(names) > self._cap:
                raise LimitExceeded(
                    f"{live} sandboxes live here and {len(names)} more would pass the cap of {self._cap}: terminate "
                    "some, or set SANDBOX_GYM_MAX_SANDBOXES before the first one"
                )
            taken = {box.name for box in self.boxes.values() if box.id != replaced}
            for name in names:
                if name is not None and (name in taken or names.count(name) > 1):
                    raise SandboxError(
                        f"a sandbox named {name!r} lives already: names are unique among the living"
                    )
            self._expected += len(names)
        try:
            yield
        finally:
            with self._lock:
                self._expected -= len(names)

    def admit(self, box: Box) -> None:
        with self._lock:
            self.boxes[box.id] = box

    def get(self, box_id: str) -> Box:
        """Raises SandboxDied, with the reason, when it is no more."""
        box = self.boxes.get(box_id)
        if box is None:
            dead = self._dead.get(box_id)
            raise SandboxDied(f"sandbox {box_id} is gone: {dead.reason if dead else 'it is not known here'}")
        return box

    def drop(self, box: Box) -> None:
        """It is no more. Idempotent; not where another goes on under its id."""
        with self._lock:
            if self.boxes.get(box.id) is box:
                del self.boxes[box.id]
                self._dead[box.id] = box
                while len(self._dead) > _DEATHS_KEPT:
                    self._dead.pop(next(iter(self._dead)))

    def of_container(self, container: str) -> Box | None:
        """The living one."""
        with self._lock:
            return next((box for box in self.boxes.values() if box.container == container), None)

    def dead(self, box_id: str) -> Box | None:
        return self._dead.get(box_id)

    # ---- snapshots --------------------------------------------------------------------------------------------------

    def keep(self, shot: Shot) -> None:
        with self._lock:
            self.shots[shot.id] = shot

    def shot(self, shot_id: str) -> Shot:
        """Raises SnapshotError."""
        shot = self.shots.get(shot_id)
        if shot is None:
            raise SnapshotError(f"snapshot {shot_id} is gone: take another")
        return shot

    def release(self, shot_id: str) -> None:
        """Its checkpoint goes now, its image when nothing is made of it any more. Idempotent."""
        with self._lock:
            shot = self.shots.pop(shot_id, None)
            if shot is None:
                return
            self._unneeded.append(shot)
        self._daemon.remove_container(shot.store)
        self.drop_images()

    def drop_images(self) -> None:
        """Those that can go by now: of no sandbox, and no other image's base."""
        while True:
            with self._lock:
                used = {box.origin for box in self.boxes.values()}
                used |= {shot.origin for shot in (*self.shots.values(), *self._unneeded)}
                free = [shot for shot in self._unneeded if shot not in used]
            gone = [shot for shot in free if not shot.image or self._daemon.remove_image(shot.image)]
            if not gone:
                return
            with self._lock:
                self._unneeded = [shot for shot in self._unneeded if shot not in gone]
