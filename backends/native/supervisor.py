"""The supervisor: one single-threaded process per client, process 1 of a pid namespace, that makes every sandbox.

It waits on the client's lifeline, on a listening socket for requests, and on every guest's pidfd. Here are the
requests; `population` keeps the guests, `copies` makes them. When it ends, for whatever reason, the kernel kills all
that lives in its namespace; `launch` then removes what is left on disk.
"""

from __future__ import annotations

import os
import resource
import secrets
import shutil
import socket
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sandbox_gym.api import Limits
from sandbox_gym.errors import BackendUnavailable, LimitExceeded, SandboxError, SnapshotError

from . import disk, planner, protocol, rootfs
from .copies import CopyFailed, Expected, Maker, deadline_in
from .loop import Loop
from .node import Family, Node
from .population import MAX_DEPTH, Population

_DESCRIPTORS_EACH, _DESCRIPTORS_KEPT = 5, 256
_PAGE = 100  # rows of `list` in one message


class Supervisor:
    def __init__(
        self, folder: Path, maker: Maker, userns_fd: int, *, privileged: bool, cap: int, unenforced: list[str]
    ) -> None:
        self._folder = folder
        self._maker = maker
        self._userns_fd = userns_fd
        self._privileged = privileged
        self._cap = cap
        self._unenforced = unenforced
        self.loop = Loop()
        self._families: dict[str, tuple[rootfs.Rootfs, Any]] = {}
        self._guests = Population(self.loop, maker)

    def run(self) -> None:
        while True:
            self._guests.turn()

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
            reply(
                {"error": kind, "message": f"the supervisor failed at {request.get('op')}: {error}\n{where}"}
            )

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
            self._guests.admit(node, secrets.token_hex(6), node.name, None)
            self._hand_out([node], reply)

        self._guests.expect(Expected(node, None, done, deadline_in(request["timeout"])))

    def _do_snapshot(self, request: dict[str, Any], reply: Callable[..., bool]) -> None:
        node = self._guests.get(request["id"])
        refusal = planner.refusal(node.pid, node.control_inode, node.group.members())
        if refusal is not None:
            raise SnapshotError(
                f"sandbox {node.name}: the fork engine can't capture this state: {refusal}. "
                "End what holds it, or wait for the criu engine"
            )
        if not request["keep"]:
            node.freeze_disk()
            self._guests.sandboxes.pop(node.id)
            reply(self._guests.become_snapshot(node))
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
            self._guests.sandboxes.pop(node.id, None)
            taken = self._guests.become_snapshot(node)
            self._guests.admit(heir, *identity)
            if not reply(taken, [heir.control.fileno()]):
                heir.kill("its client is gone")

        self._guests.expect(Expected(heir, node, done, deadline_in(request["timeout"])))

    def _do_restore(self, request: dict[str, Any], reply: Callable[..., bool]) -> None:
        source = self._guests.snapshots.get(request["snapshot"])
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
                self._guests.admit(expected.node, secrets.token_hex(6), expected.node.name, source.id)
                made.append(expected.node)
            if not waiting and not failures:
                if request["replace"] is not None:
                    self._guests.take_place(made[0], request["replace"])
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
            self._guests.expect(expected)

    def _do_release(self, request: dict[str, Any], reply: Callable[..., bool]) -> None:
        self._guests.release(request["snapshot"])
        reply({})

    def _do_terminate(self, request: dict[str, Any], reply: Callable[..., bool]) -> None:
        node = self._guests.sandboxes.get(request["id"])
        if node is None:
            reply({})
        else:
            self._guests.terminate(node, request.get("reason") or "it was terminated", lambda: reply({}))

    def _do_interrupt(self, request: dict[str, Any], reply: Callable[..., bool]) -> None:
        node = self._guests.get(request["id"])
        os.kill(node.pid, 2)
        reply({})

    def _do_death(self, request: dict[str, Any], reply: Callable[..., bool]) -> None:
        node = self._guests.sandboxes.get(request["id"])
        if node is not None:  # its socket closed, and its exit is on the way
            node.on_exit.append(lambda: reply({"reason": self._guests.deaths.get(request["id"], "")}))
            node.kill("")  # no reason of ours: its exit tells whether a limit was
            return
        reply({"reason": self._guests.deaths.get(request["id"], "it is not known here")})

    def _do_usage(self, request: dict[str, Any], reply: Callable[..., bool]) -> None:
        node = self._guests.sandboxes.get(request["id"]) or self._guests.snapshots.get(request["id"])
        if node is None:
            raise SandboxError(f"no sandbox or snapshot {request['id']}")
        memory = node.group.memory_bytes()
        reply({"oom_kills": node.group.oom_kills(), "memory_bytes": memory, "disk_bytes": node.disk_bytes()})

    def _do_list(self, request: dict[str, Any], reply: Callable[..., bool]) -> None:
        rows = [node.row() for node in (*self._guests.sandboxes.values(), *self._guests.snapshots.values())]
        start = request.get("start", 0)
        reply({"rows": rows[start : start + _PAGE], "more": len(rows) > start + _PAGE})

    def _hand_out(self, nodes: list[Node], reply: Callable[..., bool]) -> None:
        message = {
            "sandboxes": [{"id": node.id, "name": node.name} for node in nodes],
            "unenforced": self._unenforced,
        }
        if not reply(message, [node.control.fileno() for node in nodes]):
            for node in nodes:
                node.kill("its client is gone")

    # ---- checks -----------------------------------------------------------------------------------------------

    def _check_room(self, names: list[str | None], *, replaced: str | None = None) -> None:
        self._check_descriptors(len(names))
        live = self._guests.living - (replaced in self._guests.sandboxes)
        if live + len(names) > self._cap:
            raise LimitExceeded(
                f"{live} sandboxes live here and {len(names)} more would pass the cap of {self._cap}: terminate some, "
                "or set SANDBOX_GYM_MAX_SANDBOXES before the first one"
            )
        taken = {node.name for node in self._guests.sandboxes.values()}
        for name in names:
            if name is not None and (name in taken or names.count(name) > 1):
                raise SandboxError(
                    f"a sandbox named {name!r} lives already: names are unique among the living"
                )

    def _check_descriptors(self, more: int) -> None:
        """Every guest, snapshots included, holds some; without a check the first to fail would be anyone's."""
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        guests = len(self.loop)  # a little more than they are
        if (guests + more) * _DESCRIPTORS_EACH + _DESCRIPTORS_KEPT > most:
            raise LimitExceeded(
                f"{guests} sandboxes and snapshots live here and {more} more would need more open files than the "
                f"{most} allowed: delete snapshots, or raise the hard limit (ulimit -Hn)"
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
