"""The supervisor: one single-threaded process per client, process 1 of a pid namespace, that makes every sandbox.

It waits on the client's lifeline, on a listening socket for requests, and on every guest's pidfd. Here are the
requests; `population` keeps the guests, `copies` makes them. When it ends, for whatever reason, the kernel kills all
that lives in its namespace; `launch` then removes what is left on disk.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sandbox_gym.api import Limits, SandboxSpec
from sandbox_gym.backends.shared import protocol
from sandbox_gym.backends.shared.jobs import Jobs
from sandbox_gym.errors import BackendUnavailable, SandboxError

from . import rootfs
from .copies import CopyFailed, CopyLate, Expected, Maker, deadline_in
from .images import Imager
from .node import Family, Node
from .population import Population
from .room import Room
from .snapshots import Snapshots
from .stacks import Stacks
from .transport import Transport

_PAGE = 100  # rows of `list` in one message


class Supervisor:
    def __init__(
        self,
        folder: Path,
        jobs: Jobs,
        maker: Maker,
        imager: Imager,
        userns_fd: int,
        *,
        privileged: bool,
        cap: int,
        unenforced: list[str],
    ) -> None:
        self._folder = folder
        self._maker = maker
        self._userns_fd = userns_fd
        self._privileged = privileged
        self._unenforced = unenforced
        self._families: dict[str, tuple[rootfs.Rootfs, Any]] = {}
        self.loop = jobs.loop
        self._guests = Population(jobs, maker)
        self._room = Room(self._guests, maker.spares, maker.gateway, cap)
        stacks = Stacks(jobs, maker.spares.store)
        self._snapshots = Snapshots(jobs, self._guests, maker, imager, stacks, self._room)
        self._transport = Transport(self._guests, jobs, maker.spares.store, folder / "disk")

    def run(self) -> None:
        while True:
            self._guests.turn()

    # ---- requests ---------------------------------------------------------------------------------------------

    def _do_create(self, request: dict[str, Any], reply: Callable[..., bool]) -> None:
        spec = protocol.spec_from_json(request["spec"])
        self._room.check_budget(request)
        self._room.check([request["name"]])
        node = self._maker.first(self._family(spec), request["name"])

        def done(expected: Expected, failure: CopyFailed | None) -> None:
            if isinstance(failure, CopyLate):
                message = f"no guest answered within {request['timeout']} s: give create more time"
                reply({"error": "SandboxTimeout", "message": message})
                return
            if failure is not None:
                hint = "" if spec.rootfs is None else f" ({rootfs.NEEDED})"
                reply({"error": "BackendUnavailable", "message": f"{failure}{hint}"})
                return
            self._guests.admit(node, secrets.token_hex(6), node.name, None)
            self._hand_out([node], reply)

        self._guests.expect(Expected(node, None, done, deadline_in(request["timeout"])))

    def _do_snapshot(self, request: dict[str, Any], reply: Callable[..., bool]) -> None:
        self._snapshots.take(request, reply)

    def _do_restore(self, request: dict[str, Any], reply: Callable[..., bool]) -> None:
        self._snapshots.restore(request, reply, self._hand_out)

    def _do_budget(self, request: dict[str, Any], reply: Callable[..., bool]) -> None:
        self._room.set_budget(request["budget"])
        reply({})

    def _do_supplant(self, request: dict[str, Any], reply: Callable[..., bool]) -> None:
        self._guests.supplant(request["snapshot"], request["by"], lambda: reply({}))

    def _do_describe(self, request: dict[str, Any], reply: Callable[..., bool]) -> None:
        reply(self._transport.describe(request["snapshot"]))

    def _do_pack(self, request: dict[str, Any], reply: Callable[..., bool]) -> None:
        self._transport.pack(request, reply)

    def _do_unpack(self, request: dict[str, Any], reply: Callable[..., bool]) -> None:
        self._room.check_budget(request)
        self._transport.unpack(request, self._family(protocol.spec_from_json(request["spec"])), reply)

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
        reply({**node.usage(), "disk_bytes": node.disk_bytes()})

    def _do_records(self, request: dict[str, Any], reply: Callable[..., bool]) -> None:
        outlet = self._guests.get(request["id"]).outlet
        if outlet is None:
            reply({"records": [], "more": False})
        else:
            outlet.records(request["after"], reply)

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

    def _family(self, spec: SandboxSpec) -> Family:
        """What sandboxes of this spec share; their root file system is made once. Raises BackendUnavailable."""
        self._check_limits(spec.limits)
        key = repr((spec.rootfs, spec.env.get("PATH"), spec.mounts, spec.python_path, spec.in_place))
        if key not in self._families:
            folder = self._folder / "base" / str(len(self._families))
            try:
                built = rootfs.build(spec, folder, self._privileged)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
            self._families[key] = built, built.base(self._userns_fd, self._privileged)
        return Family(spec, *self._families[key])

    # ---- checks -----------------------------------------------------------------------------------------------

    def _check_limits(self, limits: Limits) -> None:
        refused = sorted(limits.explicit & set(self._unenforced))
        if refused:
            raise BackendUnavailable(
                f"{', '.join(refused)} can't be enforced here: no control group is writable for this user. Run as "
                "root, or under a delegated cgroup (systemd-run --user --scope -p Delegate=yes ...), or pass "
                f"{', '.join(f'{name}=None' for name in refused)}; `sandbox-gym doctor` tells more"
            )
