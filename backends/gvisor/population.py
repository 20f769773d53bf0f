"""The sandboxes and snapshots of a supervisor, those in the making, and the dead whose traces are still there."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from sandbox_gym.errors import BackendUnavailable, BudgetExceeded, LimitExceeded, SandboxDied, SandboxError

from .box import Box, Image
from .engine import Engine

_DEATHS_KEPT = 1000
_LOOK_AGAIN = 0.01  # seconds, at the dead whose processes are still going
_HELPS = "delete snapshots and terminate sandboxes"


class Population:
    def __init__(self, engine: Engine, cap: int) -> None:
        self.engine = engine
        self.boxes: dict[str, Box] = {}
        self.images: dict[str, Image] = {}
        self.deaths: dict[str, str] = {}  # why the last thousand ended, by id
        self._dying: list[Box] = []
        self._cap = cap
        self._budget: dict[str, int] = {}

    # ---- time -----------------------------------------------------------------------------------------------------

    def turn(self) -> None:
        """Waits for the next events, handles them, and what is due."""
        self.engine.jobs.loop.turn(None, now=False, patience=self._patience)
        now = time.monotonic()
        self.engine.jobs.expire(now)
        self.engine.expire(now)
        for box in [box for box in self.boxes.values() if box.dies_at is not None and box.dies_at <= now]:
            box.kill("its time to live is over")
        self.engine.jobs.reap()  # gVisor's processes, which nobody waits for
        for box in [box for box in self._dying if box.remove()]:
            self._dying.remove(box)
            for callback in box.on_exit:
                callback()

    def _patience(self) -> float:
        """Seconds until something is due without an event."""
        if self._dying:
            return _LOOK_AGAIN
        due = [*self.engine.deadlines(), *self.engine.jobs.deadlines()]
        due += [box.dies_at for box in self.boxes.values() if box.dies_at is not None]
        return max(0.0, min(due) - time.monotonic()) if due else -1

    # ---- coming and going -----------------------------------------------------------------------------------------

    def admit(self, box: Box, sandbox_id: str) -> None:
        """One that has come is a sandbox under this id."""
        box.id, box.name = sandbox_id, box.name or sandbox_id
        ttl = box.family.spec.ttl
        if ttl is not None and box.dies_at is None:
            box.dies_at = time.monotonic() + ttl
        self.boxes[box.id] = box
        self.engine.jobs.loop.watch(box.pidfd, lambda: self._exited(box))

    def take_place(self, heir: Box, sandbox_id: str) -> None:
        """The copy goes on under the id, name and age of a sandbox that ends now, or has ended."""
        old = self.boxes.pop(sandbox_id, None)
        if old is not None:
            heir.created, heir.dies_at, heir.name = old.created, old.dies_at, old.name
            if heir.outlet is not None:
                heir.outlet.inherit(old.outlet)
            old.kill("a snapshot was restored in its place")
        self.admit(heir, sandbox_id)

    def discard(self, box: Box) -> None:
        """One that has not come."""
        box.kill()
        self._bury(box)

    def get(self, sandbox_id: str) -> Box:
        """Raises SandboxDied, with the reason, when it is no more."""
        box = self.boxes.get(sandbox_id)
        if box is None:
            reason = self.deaths.get(sandbox_id, "it is not known here")
            raise SandboxDied(f"sandbox {sandbox_id} is gone: {reason}")
        return box

    def _exited(self, box: Box) -> None:
        killed = box.group.oom_kills() and not box.reason
        limit = box.family.spec.limits.memory_bytes
        reason = f"memory: its limit of {limit} bytes was reached" if killed else box.reason
        if self.boxes.get(box.id) is box:
            del self.boxes[box.id]
            self.deaths[box.id] = reason or "its process ended, crashed or closed its standard output"
            while len(self.deaths) > _DEATHS_KEPT:
                self.deaths.pop(next(iter(self.deaths)))
        box.kill()
        self._bury(box)

    def _bury(self, box: Box) -> None:
        for fd in (box.pidfd, box.messages):
            self.engine.jobs.loop.unwatch(fd)
        box.close()
        self._dying.append(box)

    def release(self, snapshot_id: str) -> None:
        """Gives up a snapshot's handle. Idempotent."""
        image = self.images.pop(snapshot_id, None)
        if image is not None:
            image.held = False
            image.drop_unneeded()

    # ---- room -----------------------------------------------------------------------------------------------------

    def set_budget(self, budget: dict[str, int | None]) -> None:
        """Bytes of "memory" and of "disk". Raises BackendUnavailable where nothing counts them."""
        if budget["memory"] is not None and not self.engine.groups.folders:
            raise BackendUnavailable(
                "the memory of sandboxes can't be counted here: there are no control groups"
            )
        self._budget = {what: most for what, most in budget.items() if most is not None}

    def check_budget(self) -> None:
        """Before more is made. Raises BudgetExceeded."""
        held = {
            "memory": sum(box.group.memory_bytes() for box in self.boxes.values()),
            "disk": sum(image.disk_bytes for image in self.images.values()),
        }
        for what, most in self._budget.items():
            if held[what] >= most:
                raise BudgetExceeded(
                    f"the sandboxes and snapshots of this process hold {held[what]} bytes of {what}, and its budget is "
                    f"{most}: {_HELPS}"
                )

    def check(self, names: list[str | None], *, replaced: str | None = None) -> None:
        """For that many more, less the one that is replaced. Raises LimitExceeded, SandboxError for a taken name."""
        live = len(self.boxes) + len(self.engine.coming) - (replaced in self.boxes)
        if live + len(names) > self._cap:
            raise LimitExceeded(
                f"{live} sandboxes live here and {len(names)} more would pass the cap of {self._cap}: terminate some, "
                "or set SANDBOX_GYM_MAX_SANDBOXES before the first one"
            )
        taken = {box.name for box in self.boxes.values()} | {coming.box.name for coming in self.engine.coming}
        for name in names:
            if name is not None and (name in taken or names.count(name) > 1):
                raise SandboxError(
                    f"a sandbox named {name!r} lives already: names are unique among the living"
                )

    def rows(self) -> list[dict[str, Any]]:
        return [box.row() for box in self.boxes.values()] + [image.row() for image in self.images.values()]

    def when_gone(self, box: Box, tell: Callable[[], object]) -> None:
        box.on_exit.append(tell)
