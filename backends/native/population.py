"""The guests of a supervisor: those expected, sandboxes, snapshots, and the dead that are still to be taken apart."""

from __future__ import annotations

import secrets
import select
import time
from collections.abc import Callable
from typing import Any

from sandbox_gym.backends.shared.jobs import Jobs
from sandbox_gym.errors import SandboxDied, SnapshotError

from .copies import CopyFailed, CopyLate, Expected, Maker, deadline_in, read_announcement, read_refusal
from .images import Image
from .node import Node

# The kernel nests 32 pid namespaces; the host's, the supervisor's and the first guest's are below.
MAX_DEPTH = 29
_ENOUGH = "16Mi"  # 10 MiB do for the host's Python 3.11
_DEATHS_KEPT = 1000
_DYING_KEPT = 64  # beyond that, the dead are taken apart before anything else


class Population:
    """Guests come, live, become snapshots, and go. `loop` tells of each; nothing here knows a client."""

    def __init__(self, jobs: Jobs, maker: Maker) -> None:
        self.loop = jobs.loop
        self.sandboxes: dict[str, Node] = {}
        self.snapshots: dict[str, Node | Image] = {}
        self.deaths: dict[str, str] = {}  # why the last thousand ended, by id
        self._jobs = jobs
        self._maker = maker
        self.expected: list[Expected] = []
        self._dying: list[Node] = []  # ended, and still to be taken apart
        self._awaited = 0  # ends that a client waits for

    @property
    def living(self) -> int:
        """How many sandboxes there are, those in the making included."""
        return len(self.sandboxes) + len(self.expected)

    # ---- time -----------------------------------------------------------------------------------------------------

    def turn(self) -> None:
        """Waits for the next events, handles them, and what is due. Idle moments go to what comes next."""
        idle = None if self.expected else self._idle
        self.loop.turn(idle, now=self._awaited > 0, patience=self._patience)
        self._expire()
        while len(self._dying) > _DYING_KEPT and self._bury():
            pass

    def _idle(self) -> bool:
        return self._prepare() or self._bury()

    def _prepare(self) -> bool:
        try:
            return self._maker.prepare()
        except OSError:  # a request that needs the same fails the same way, and its client hears of it
            return False

    def _patience(self) -> float:
        """Seconds until something is due without an event."""
        due = [expected.deadline for expected in self.expected]
        due += [node.dies_at for node in self.sandboxes.values() if node.dies_at is not None]
        due += self._jobs.deadlines()
        if self._dying:
            due.append(deadline_in(0.02))
        return max(0.0, min(due) - time.monotonic()) if due else -1

    def _expire(self) -> None:
        now = time.monotonic()
        self._jobs.expire(now)
        for expected in [e for e in self.expected if e.deadline <= now]:
            self.arrive(expected, CopyLate("it did not answer in time"))
        for node in [n for n in self.sandboxes.values() if n.dies_at is not None and n.dies_at <= now]:
            node.kill("its time to live is over")

    # ---- coming ---------------------------------------------------------------------------------------------------

    def expect(self, expected: Expected, *, announces: bool = True) -> None:
        """A guest is on its way; `expected.done` hears how it ended. One that doesn't announce itself is told of by
        whoever makes it, to `arrive`.
        """
        self.expected.append(expected)
        if announces:
            self.loop.watch(expected.node.control.fileno(), lambda: self._announced(expected))
        source = expected.source
        if source is not None and source.control.fileno() not in self.loop:
            self.loop.watch(source.control.fileno(), lambda: self._refused(source))

    def _announced(self, expected: Expected) -> None:
        try:
            read_announcement(expected.node)
        except (CopyFailed, OSError) as failure:
            source = expected.source
            if source is not None and select.select([source.control], [], [], 0)[0]:
                self._refused(source)  # its word, which came first, says why; else it would reach the client
            else:
                short = ""
                if expected.node.group.oom_kills():
                    enough = f" ({_ENOUGH} is enough for one that does nothing)" if source is None else ""
                    short = f"its memory limit is too small for a guest{enough}: "
                self.arrive(expected, CopyFailed(f"{short}{failure}"))
        else:
            self.arrive(expected, None)

    def _refused(self, source: Node) -> None:
        """The origin itself spoke: the oldest of its expected copies can't be made."""
        message = read_refusal(source)
        for expected in [e for e in self.expected if e.source is source]:
            if "No space left" in message:
                message = f"snapshots nest too deep here (level {source.depth}): restore from an earlier one"
            self.arrive(expected, CopyFailed(message))
            break
        else:
            self.loop.unwatch(source.control.fileno())

    def arrive(self, expected: Expected, failure: CopyFailed | None) -> None:
        node, source = expected.node, expected.source
        self.expected.remove(expected)
        self.loop.unwatch(node.control.fileno())
        if source is not None and not any(e.source is source for e in self.expected):
            self.loop.unwatch(source.control.fileno())
        if failure is None:
            self.loop.watch(node.pidfd, lambda: self._exited(node))
        else:
            node.close()
            self._dying.append(node)
        expected.done(expected, failure)
        if failure is None and not node.is_confined():  # after the reply: the client wakes up meanwhile
            node.kill("its process was not in its control group")

    def admit(self, node: Node, sandbox_id: str, name: str, origin: str | None) -> None:
        """A guest that has come is a sandbox under this id."""
        node.id, node.name, node.origin = sandbox_id, name or sandbox_id, origin
        ttl = node.family.spec.ttl
        if ttl is not None and node.dies_at is None:
            node.dies_at = deadline_in(ttl)
        self.sandboxes[node.id] = node

    def become_snapshot(self, node: Node) -> dict[str, Any]:
        """The sandbox itself is the snapshot from now on: `id`, `engine`, `why`, `depth_left`."""
        node.frozen, node.handles, node.dies_at = True, 1, None
        node.close_network()
        node.branched_from = node.id
        node.id = node.name = secrets.token_hex(6)
        self.snapshots[node.id] = node
        why = "one single-threaded process with nothing shared"
        return {"id": node.id, "engine": "fork", "why": why, "depth_left": MAX_DEPTH - node.depth}

    def succeed(self, node: Node, heir: Node) -> None:
        """The heir is the sandbox from now on."""
        heir.dies_at, heir.created, heir.branched_from = node.dies_at, node.created, node.branched_from
        if heir.outlet is not None:
            heir.outlet.inherit(node.outlet)
        self.sandboxes.pop(node.id, None)
        self.admit(heir, node.id, node.name, node.origin)

    def take_place(self, heir: Node, sandbox_id: str) -> None:
        """The copy goes on under the id, name and age of a sandbox that ends now, or has ended."""
        del self.sandboxes[heir.id]
        old = self.sandboxes.pop(sandbox_id, None)
        name = heir.name
        if heir.branched_from == sandbox_id:  # back to a moment of its own
            heir.branched_from = old.branched_from if old is not None else None
        if old is not None:
            heir.created, heir.dies_at, name = old.created, old.dies_at, old.name
            if heir.outlet is not None:
                heir.outlet.inherit(old.outlet)
            old.kill("a snapshot was restored in its place")
        self.admit(heir, sandbox_id, name, heir.origin)

    def get(self, sandbox_id: str) -> Node:
        """Raises SandboxDied, with the reason, when it is no more."""
        node = self.sandboxes.get(sandbox_id)
        if node is None:
            reason = self.deaths.get(sandbox_id, "it is not known here")
            raise SandboxDied(f"sandbox {sandbox_id} is gone: {reason}")
        return node

    # ---- going ----------------------------------------------------------------------------------------------------

    def terminate(self, node: Node, reason: str, ended: Callable[[], object]) -> None:
        """Kills a sandbox; `ended` is called when its processes are gone."""

        def tell() -> None:
            self._awaited -= 1
            ended()

        self._awaited += 1
        node.on_exit.append(tell)
        node.kill(reason)

    def release(self, snapshot_id: str) -> None:
        """Gives up a snapshot's handle. Idempotent."""
        taken = self.snapshots.pop(snapshot_id, None)
        if taken is not None:
            taken.handles = 0
            if isinstance(taken, Image):
                taken.drop_unneeded()
            else:
                self._drop_unneeded(taken)

    def supplant(self, snapshot_id: str, by: str, done: Callable[[], object]) -> None:
        """An image takes the place of a frozen process, under its id. `done` is called when the process is gone, or at
        once when something hangs from it. Raises SnapshotError.
        """
        old, image = self.snapshots.get(snapshot_id), self.snapshots.get(by)
        if not isinstance(old, Node) or not isinstance(image, Image):
            raise SnapshotError(f"snapshot {snapshot_id} can't be put on disk: it, or its image, is gone")
        del self.snapshots[by]
        image.id, image.branched_from = snapshot_id, old.branched_from
        self.snapshots[snapshot_id] = image
        old.id = by  # its end must not be taken for the image's
        old.handles = 0
        if old.children:
            done()
        else:
            old.on_exit.append(done)
            self._drop_unneeded(old)

    def _exited(self, node: Node) -> None:
        self.loop.unwatch(node.pidfd)
        self._jobs.reap()
        self._maker.forget(node)
        killed = node.group.oom_kills()
        limit = node.family.spec.limits.memory_bytes
        reason = (
            f"memory: its limit of {limit} bytes was reached" if killed and not node.reason else node.reason
        )
        if self.sandboxes.get(node.id) is node:
            del self.sandboxes[node.id]
        self.snapshots.pop(node.id, None)
        self.deaths[node.id] = reason or "its process ended, crashed or closed its control socket"
        while len(self.deaths) > _DEATHS_KEPT:
            self.deaths.pop(next(iter(self.deaths)))
        self.loop.unwatch(node.control.fileno())
        node.close()
        for expected in [e for e in self.expected if e.source is node]:
            self.arrive(expected, CopyFailed("the origin's process ended"))
        for callback in node.on_exit:
            callback()
        node.on_exit.clear()
        self._dying.append(node)

    def _bury(self) -> bool:
        """Takes apart what one of the dead has left. False when there is none, or all of it is still in use."""
        for node in self._dying:
            if node.children:
                continue
            if not node.group.remove():
                node.group.kill()
                continue
            self._dying.remove(node)
            node.release_layers()
            parent, node.parent = node.parent, None
            if parent is not None:
                parent.children.discard(node)
                self._drop_unneeded(parent)
            return True
        return False

    def _drop_unneeded(self, node: Node) -> None:
        """Ends a snapshot that no handle and no copy needs; `_bury` then looks at its origin in turn."""
        expected = any(e.source is node for e in self.expected)
        if node.frozen and not node.handles and not node.children and not expected:
            node.kill("nothing needs this snapshot any more")
