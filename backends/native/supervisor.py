"""The supervisor: one single-threaded process per client, process 1 of a pid namespace, that makes every sandbox.

It waits on the client's lifeline, on a listening socket for requests, and on every guest's pidfd. When it ends, for
whatever reason, the kernel kills all that lives in its namespace; `launch` then removes what is left on disk.
"""

from __future__ import annotations

import os
import resource
import secrets
import shutil
import socket
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sandbox_gym.api import Limits
from sandbox_gym.errors import BackendUnavailable, LimitExceeded, SandboxDied, SandboxError, SnapshotError

from . import disk, planner, protocol, rootfs
from .cgroups import Groups
from .copies import CopyFailed, Expected, Maker, deadline_in, read_announcement, read_refusal
from .loop import Loop
from .node import Family, Node

MAX_DEPTH = 29  # the kernel nests 32 pid namespaces; the host's, the supervisor's and the first guest's are below
_DEATHS_KEPT = 1000
_DYING_KEPT = 64  # beyond that, the dead are taken apart before anything else
_DESCRIPTORS_EACH, _DESCRIPTORS_KEPT = 5, 256
_PAGE = 100  # rows of `list` in one message


class Supervisor:
    def __init__(self, folder: Path, maker: Maker, userns_fd: int, *, privileged: bool, cap: int, unenforced: list[str]):
        self._folder = folder
        self._maker = maker
        self._userns_fd = userns_fd
        self._privileged = privileged
        self._cap = cap
        self._unenforced = unenforced
        self.loop = Loop()
        self._families: dict[str, tuple[rootfs.Rootfs, Any]] = {}
        self._sandboxes: dict[str, Node] = {}
        self._snapshots: dict[str, Node] = {}
        self._expected: dict[int, Expected] = {}
        self._dying: list[Node] = []  # ended, and still to be taken apart
        self._terminating = 0  # requests that wait for a guest's end
        self._deaths: dict[str, str] = {}

    # ---- the loop ---------------------------------------------------------------------------------------------

    def run(self) -> None:
        while True:
            idle = None if self._expected else self._idle
            self.loop.turn(idle, now=self._terminating > 0, patience=self._patience)
            self._expire()
            while len(self._dying) > _DYING_KEPT and self._bury():
                pass

    def _idle(self) -> bool:
        return self._prepare() or self._bury()

    def _prepare(self) -> bool:
        try:
            return self._maker.prepare()
        except OSError:  # a request that needs the same will fail the same way, and its client will hear of it
            return False

    def _patience(self) -> float:
        """Seconds until something is due without an event."""
        due = [expected.deadline for expected in self._expected.values()]
        due += [node.dies_at for node in self._sandboxes.values() if node.dies_at is not None]
        if self._dying:
            due.append(deadline_in(0.02))
        return max(0.0, min(due) - time.monotonic()) if due else -1

    def _expire(self) -> None:
        now = time.monotonic()
        for expected in [e for e in self._expected.values() if e.deadline <= now]:
            self._arrive(expected, CopyFailed("it did not answer in time"))
        for node in [n for n in self._sandboxes.values() if n.dies_at is not None and n.dies_at <= now]:
            node.kill("its time to live is over")

    def accept(self, connection: socket.socket) -> None:
        def handle() -> None:
            try:
                request, fds = protocol.receive(connection)
            except (EOFError, OSError):
                self.loop.unwatch(connection.fileno())
                connection.close()
                return
            for fd in fds:
                os.close(fd)
            self._serve(connection, request)

        self.loop.watch(connection.fileno(), handle)

    def _serve(self, connection: socket.socket, request: dict[str, Any]) -> None:
        def reply(message: dict[str, Any], fds: list[int] | None = None) -> bool:
            try:
                protocol.send(connection, message, fds)
            except OSError:  # the client's thread is gone; what was made for it must go too
                return False
            return True

        try:
            getattr(self, f"_do_{request['op']}")(request, reply)
        except SandboxError as error:
            reply({"error": type(error).__name__, "message": str(error)})
        except CopyFailed as error:
            reply({"error": "SnapshotError", "message": str(error)})
        except Exception as error:  # one bad request must not end every sandbox
            kind = "LimitExceeded" if isinstance(error, OSError) and disk.is_full(error) else "SandboxError"
            where = traceback.format_exc(limit=-3)
            reply({"error": kind, "message": f"the supervisor failed at {request.get('op')}: {error}\n{where}"})

    # ---- requests ---------------------------------------------------------------------------------------------

    def _do_create(self, request: dict[str, Any], reply: Callable[..., bool]) -> None:
        spec = protocol.spec_from_json(request["spec"])
        self._check_room([request["name"]])
        self._check_limits(spec.limits)
        key = repr((spec.rootfs, spec.mounts, spec.python_path))
        if key not in self._families:
            folder = self._folder / "base" / str(len(self._families))
            try:
                built = rootfs.build(spec, folder, self._privileged)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
            self._families[key] = built, built.base(self._userns_fd, self._privileged)
        family = Family(spec, *self._families[key])
        node = self._maker.first(family, request["name"])

        def done(expected: Expected, failure: CopyFailed | None) -> None:
            if failure is not None:
                reply({"error": "BackendUnavailable", "message": str(failure)})
                return
            self._admit(node, secrets.token_hex(6), node.name, None)
            self._hand_out([node], reply)

        self._expect(Expected(node, None, done, deadline_in(request["timeout"])))

    def _do_snapshot(self, request: dict[str, Any], reply: Callable[..., bool]) -> None:
        node = self._living(request["id"])
        refusal = planner.refusal(node.pid, node.control_inode, node.group.members())
        if refusal is not None:
            raise SnapshotError(
                f"sandbox {node.name}: the fork engine can't capture this state: {refusal}. "
                "End what holds it, or wait for the criu engine"
            )
        if not request["keep"]:
            node.freeze_disk()
            self._sandboxes.pop(node.id)
            reply(self._become_snapshot(node))
            return
        self._check_depth(node)
        self._check_descriptors(1)
        try:
            heir = self._maker.copy(node, node.name)
        except BaseException:
            node.thaw_disk()
            raise

        def done(expected: Expected, failure: CopyFailed | None) -> None:
            if failure is not None:
                node.thaw_disk()
                reply({"error": "SnapshotError", "message": f"sandbox {node.name}: {failure}"})
                return
            identity = node.id, node.name, node.origin
            heir.dies_at, heir.created = node.dies_at, node.created
            self._sandboxes.pop(node.id, None)
            taken = self._become_snapshot(node)
            self._admit(heir, *identity)
            if not reply(taken, [heir.control.fileno()]):
                heir.kill("its client is gone")

        self._expect(Expected(heir, node, done, deadline_in(request["timeout"])))

    def _become_snapshot(self, node: Node) -> dict[str, Any]:
        node.frozen, node.handles, node.dies_at = True, 1, None
        node.id = node.name = secrets.token_hex(6)
        self._snapshots[node.id] = node
        why = "one single-threaded process with nothing shared"
        return {"id": node.id, "engine": "fork", "why": why, "depth_left": MAX_DEPTH - node.depth}

    def _do_restore(self, request: dict[str, Any], reply: Callable[..., bool]) -> None:
        source = self._snapshots.get(request["snapshot"])
        if source is None:
            raise SnapshotError(f"snapshot {request['snapshot']} is gone: deleted, or its process was killed")
        self._check_depth(source)
        self._check_room(request["names"], replaced=request["replace"])
        made: list[Node] = []
        waiting: list[Expected] = []
        failures: list[str] = []

        def done(expected: Expected, failure: CopyFailed | None) -> None:
            waiting.remove(expected)
            if failure is not None:
                failures.append(str(failure))
            else:
                self._admit(expected.node, secrets.token_hex(6), expected.node.name, source.id)
                made.append(expected.node)
            if not waiting and not failures:
                if request["replace"] is not None:
                    self._take_place(made[0], request["replace"])
                self._hand_out(sorted(made, key=copies.index), reply)
            elif not waiting:
                for node in made:
                    node.kill("a sibling could not be made")
                reply({"error": "SnapshotError", "message": f"snapshot {source.id}: {failures[0]}"})

        copies = []
        try:
            for name in request["names"]:
                copies.append(self._maker.copy(source, name))
        except (OSError, CopyFailed) as error:
            failures.append(str(error))
        waiting += [Expected(node, source, done, deadline_in(request["timeout"])) for node in copies]
        if not waiting:
            raise SnapshotError(f"snapshot {source.id}: {failures[0]}")
        for expected in list(waiting):
            self._expect(expected)

    def _take_place(self, heir: Node, sandbox_id: str) -> None:
        """The copy goes on under the id, name and age of a sandbox that ends now, or has ended."""
        del self._sandboxes[heir.id]
        old = self._sandboxes.pop(sandbox_id, None)
        name = heir.name
        if old is not None:
            heir.created, heir.dies_at, name = old.created, old.dies_at, old.name
            old.kill("a snapshot was restored in its place")
        self._admit(heir, sandbox_id, name, heir.origin)

    def _do_release(self, request: dict[str, Any], reply: Callable[..., bool]) -> None:
        node = self._snapshots.pop(request["snapshot"], None)
        if node is not None:
            node.handles = 0
            self._drop_unneeded(node)
        reply({})

    def _do_terminate(self, request: dict[str, Any], reply: Callable[..., bool]) -> None:
        node = self._sandboxes.get(request["id"])
        if node is None:
            reply({})
            return

        def ended() -> None:
            self._terminating -= 1
            reply({})

        self._terminating += 1
        node.on_exit.append(ended)
        node.kill(request.get("reason") or "it was terminated")

    def _do_interrupt(self, request: dict[str, Any], reply: Callable[..., bool]) -> None:
        node = self._living(request["id"])
        os.kill(node.pid, 2)
        reply({})

    def _do_death(self, request: dict[str, Any], reply: Callable[..., bool]) -> None:
        node = self._sandboxes.get(request["id"])
        if node is not None:  # its socket closed, and its exit is on the way
            node.on_exit.append(lambda: reply({"reason": self._deaths.get(request["id"], "")}))
            node.kill("")  # no reason of ours: its exit tells whether a limit was
            return
        reply({"reason": self._deaths.get(request["id"], "it is not known here")})

    def _do_usage(self, request: dict[str, Any], reply: Callable[..., bool]) -> None:
        node = self._sandboxes.get(request["id"]) or self._snapshots.get(request["id"])
        if node is None:
            raise SandboxError(f"no sandbox or snapshot {request['id']}")
        memory = node.group.memory_bytes()
        reply({"oom_kills": node.group.oom_kills(), "memory_bytes": memory, "disk_bytes": node.disk_bytes()})

    def _do_list(self, request: dict[str, Any], reply: Callable[..., bool]) -> None:
        rows = [node.row() for node in (*self._sandboxes.values(), *self._snapshots.values())]
        start = request.get("start", 0)
        reply({"rows": rows[start : start + _PAGE], "more": len(rows) > start + _PAGE})

    # ---- guests come and go -------------------------------------------------------------------------------------

    def _expect(self, expected: Expected) -> None:
        fd = expected.node.control.fileno()
        self._expected[fd] = expected
        self.loop.watch(fd, lambda: self._announced(expected))
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
                short = "its memory limit is too small for a guest: " if expected.node.group.oom_kills() else ""
                self._arrive(expected, CopyFailed(f"{short}{failure}"))
        else:
            self._arrive(expected, None)

    def _refused(self, source: Node) -> None:
        """The origin itself spoke: the oldest of its expected copies can't be made."""
        message = read_refusal(source)
        for expected in [e for e in self._expected.values() if e.source is source]:
            if "No space left" in message:
                message = f"snapshots nest too deep here (level {source.depth}): restore from an earlier one"
            self._arrive(expected, CopyFailed(message))
            break
        else:
            self.loop.unwatch(source.control.fileno())

    def _arrive(self, expected: Expected, failure: CopyFailed | None) -> None:
        node, source = expected.node, expected.source
        fd = node.control.fileno()
        del self._expected[fd]
        self.loop.unwatch(fd)
        if source is not None and not any(e.source is source for e in self._expected.values()):
            self.loop.unwatch(source.control.fileno())
        if failure is None:
            self.loop.watch(node.pidfd, lambda: self._exited(node))
        else:
            self._maker.discard(node)
        expected.done(expected, failure)
        if failure is None and not node.is_confined():  # after the reply: the client wakes up meanwhile
            node.kill("its process was not in its control group")
        if failure is not None and source is not None:
            self._drop_unneeded(source)

    def _admit(self, node: Node, sandbox_id: str, name: str, origin: str | None) -> None:
        node.id, node.name, node.origin = sandbox_id, name or sandbox_id, origin
        ttl = node.family.spec.ttl
        if ttl is not None and node.dies_at is None:
            node.dies_at = deadline_in(ttl)
        self._sandboxes[node.id] = node

    def _hand_out(self, nodes: list[Node], reply: Callable[..., bool]) -> None:
        message = {"sandboxes": [{"id": node.id, "name": node.name} for node in nodes], "unenforced": self._unenforced}
        if not reply(message, [node.control.fileno() for node in nodes]):
            for node in nodes:
                node.kill("its client is gone")

    def _exited(self, node: Node) -> None:
        self.loop.unwatch(node.pidfd)
        self._reap()
        self._maker.forget(node)
        killed = node.group.oom_kills()
        limit = node.family.spec.limits.memory_bytes
        reason = f"memory: its limit of {limit} bytes was reached" if killed and not node.reason else node.reason
        if self._sandboxes.get(node.id) is node:
            del self._sandboxes[node.id]
        self._snapshots.pop(node.id, None)
        self._deaths[node.id] = reason or "its process ended, crashed or closed its control socket"
        while len(self._deaths) > _DEATHS_KEPT:
            self._deaths.pop(next(iter(self._deaths)))
        self.loop.unwatch(node.control.fileno())
        node.close()
        for expected in [e for e in self._expected.values() if e.source is node]:
            self._arrive(expected, CopyFailed("the origin's process ended"))
        for callback in node.on_exit:
            callback()
        node.on_exit.clear()
        self._dying.append(node)

    def _bury(self) -> bool:
        """Takes apart what one of the dead has left. False when there is none, or all of it is still in use."""
        for node in self._dying:
            if node.children or not node.group.remove():
                continue
            self._dying.remove(node)
            node.layer.drop()
            parent, node.parent = node.parent, None
            if parent is not None:
                parent.children.discard(node)
                self._drop_unneeded(parent)
            return True
        return False

    def _drop_unneeded(self, node: Node) -> None:
        """Ends a snapshot that no handle and no copy needs; `_bury` then looks at its origin in turn."""
        expected = any(e.source is node for e in self._expected.values())
        if node.frozen and not node.handles and not node.children and not expected:
            node.kill("nothing needs this snapshot any more")

    def _reap(self) -> None:
        """The first guests of families are this process's children; copies are their origin's."""
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass

    # ---- checks -----------------------------------------------------------------------------------------------

    def _living(self, sandbox_id: str) -> Node:
        node = self._sandboxes.get(sandbox_id)
        if node is None:
            reason = self._deaths.get(sandbox_id, "it is not known here")
            raise SandboxDied(f"sandbox {sandbox_id} is gone: {reason}")
        return node

    def _check_room(self, names: list[str | None], *, replaced: str | None = None) -> None:
        self._check_descriptors(len(names))
        live = len(self._sandboxes) + len(self._expected) - (replaced in self._sandboxes)
        if live + len(names) > self._cap:
            raise LimitExceeded(
                f"{live} sandboxes live here and {len(names)} more would pass the cap of {self._cap}: terminate some, "
                "or set SANDBOX_GYM_MAX_SANDBOXES before the first one"
            )
        taken = {node.name for node in self._sandboxes.values()}
        for name in names:
            if name is not None and (name in taken or names.count(name) > 1):
                raise SandboxError(f"a sandbox named {name!r} lives already: names are unique among the living")

    def _check_descriptors(self, more: int) -> None:
        """Every guest, snapshots included, holds some; without a check the first to fail would be anyone's."""
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        guests = len(self.loop)  # a little more than they are
        if (guests + more) * _DESCRIPTORS_EACH + _DESCRIPTORS_KEPT > most:
            raise LimitExceeded(
                f"{guests} sandboxes and snapshots live here and {more} more would need more open files than the {most} "
                "allowed: delete snapshots, or raise the hard limit (ulimit -Hn)"
            )

    def _check_depth(self, node: Node) -> None:
        if node.depth >= MAX_DEPTH:
            raise SnapshotError(
                f"snapshots nest at most {MAX_DEPTH} deep with the fork engine, and this is number {node.depth}: "
                "restore from an earlier snapshot"
            )

    def _check_limits(self, limits: Limits) -> None:
        refused = sorted(limits.explicit & set(self._unenforced))
        if refused:
            raise BackendUnavailable(
                f"{', '.join(refused)} can't be enforced here: no control group is writable for this user. Run as "
                "root, or under a delegated cgroup (systemd-run --user --scope -p Delegate=yes ...), or pass "
                f"{', '.join(f'{name}=None' for name in refused)}; `sandbox-gym doctor` tells more"
            )
