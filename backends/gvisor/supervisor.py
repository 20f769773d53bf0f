"""The supervisor: one single-threaded process per client, process 1 of a pid namespace, that makes every sandbox.

Here are a client's requests; `population` keeps the sandboxes, `engine` runs runsc's commands. When it ends, for
whatever reason, the kernel kills all that lives in its namespace; `shared/janitor` then removes what is left on disk.
"""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path
from typing import Any

from sandbox_gym.api import Limits, SandboxSpec
from sandbox_gym.backends.shared import protocol
from sandbox_gym.backends.shared.desk import Reply
from sandbox_gym.errors import BackendUnavailable, LimitExceeded, SandboxError, SnapshotError
from sandbox_gym.network import Allow

from .box import Box, Image
from .bundle import Family, Root, make_root
from .engine import Engine, Failure
from .population import Population

_PAGE = 100  # rows of `list` in one message
_DEPTH_LEFT = 1 << 30  # an image depends on no other
_WHY = "gVisor's kernel saves all that it holds: memory, processes, files"


class Supervisor:
    def __init__(self, folder: Path, engine: Engine, guests: Population, unenforced: list[str]) -> None:
        self._base = folder / "base"
        self._engine = engine
        self._guests = guests
        self._unenforced = unenforced
        self._roots: dict[str, Root] = {}

    def run(self) -> None:
        while True:
            self._guests.turn()

    # ---- coming ---------------------------------------------------------------------------------------------------

    def _do_create(self, request: dict[str, Any], reply: Reply) -> None:
        spec = protocol.spec_from_json(request["spec"])
        self._guests.check_budget()
        self._guests.check([request["name"]])

        def done(box: Box, failure: Failure | None) -> None:
            if failure is not None:
                self._guests.discard(box)
                kind = "SandboxTimeout" if failure.late else "BackendUnavailable"
                reply({"error": kind, "message": f"no sandbox came to be: {failure.text}"})
                return
            self._guests.admit(box, secrets.token_hex(6))
            self._hand_out([box], reply)

        self._engine.run(self._family(spec), request["name"], request["timeout"], done)

    def _do_restore(self, request: dict[str, Any], reply: Reply) -> None:
        image = self._guests.images.get(request["snapshot"])
        if image is None:
            raise SnapshotError(f"snapshot {request['snapshot']} is gone: it was deleted")
        names, replaced = request["names"], request["replace"]
        self._guests.check_budget()
        self._guests.check(names, replaced=replaced)
        allow = image.network
        if "network" in request:
            allow = Allow.from_json(request["network"]) if request["network"] else None
        order: list[Box] = []
        failures: list[Failure] = []
        waiting = len(names)

        def done(box: Box, failure: Failure | None) -> None:
            nonlocal waiting
            waiting -= 1
            if failure is not None:
                failures.append(failure)
            if waiting:
                return
            if not failures:
                self._admit_copies(order, image, replaced)
                self._hand_out(order, reply)
            else:
                for each in order:
                    self._guests.discard(each)
                kind = "SandboxTimeout" if failures[0].late else "SnapshotError"
                reply({"error": kind, "message": f"snapshot {image.id}: {failures[0].text}"})

        for name in names:
            try:
                order.append(self._engine.restore(image, allow, name, request["timeout"], done))
            except (OSError, BackendUnavailable) as error:  # those that were begun answer for all
                failures.append(Failure(str(error)))
                waiting -= 1
        if not waiting:
            raise SnapshotError(f"snapshot {image.id}: {failures[0].text}")

    def _admit_copies(self, boxes: list[Box], image: Image, replaced: str | None) -> None:
        for box in boxes:
            box.origin = image.id
            if replaced is not None:
                self._guests.take_place(box, replaced)
            else:
                self._guests.admit(box, secrets.token_hex(6))

    def _hand_out(self, boxes: list[Box], reply: Reply) -> None:
        message = {
            "sandboxes": [{"id": box.id, "name": box.name} for box in boxes],
            "unenforced": self._unenforced,
        }
        came = reply(message, [fd for box in boxes for fd in box.ends])
        for box in boxes:
            box.close_ends()  # the client's are the only ones: the guest ends with them
            if not came:
                box.kill("its client is gone")

    def _family(self, spec: SandboxSpec) -> Family:
        """What sandboxes of this spec share; their root file system is made once. Raises BackendUnavailable."""
        self._check_limits(spec.limits)
        key = repr((spec.rootfs, spec.env.get("PATH"), spec.mounts, spec.python_path, spec.in_place))
        if key not in self._roots:
            folder = self._base / str(len(self._roots))
            try:
                self._roots[key] = make_root(spec, folder)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
        return Family(spec, self._roots[key])

    def _check_limits(self, limits: Limits) -> None:
        refused = sorted(limits.explicit & set(self._unenforced))
        if refused:
            raise BackendUnavailable(
                f"{', '.join(refused)} can't be enforced here: no control group is writable. Mount /sys/fs/cgroup "
                f"for writing, or pass {', '.join(f'{name}=None' for name in refused)}"
            )

    # ---- snapshots ------------------------------------------------------------------------------------------------

    def _do_snapshot(self, request: dict[str, Any], reply: Reply) -> None:
        box = self._guests.get(request["id"])
        if request["engine"] not in ("auto", "gvisor"):
            raise SnapshotError(
                f"sandbox {box.name}: the gvisor backend's only engine is gvisor, not {request['engine']}: take the "
                "snapshot with engine='auto'"
            )
        self._check_connections(box)
        self._guests.check_budget()
        self._check_room(box)

        def done(image: Image | None, failure: str) -> None:
            if image is None or self._guests.boxes.get(box.id) is not box:
                if image is not None:
                    image.held = False
                    image.drop_unneeded()
                why = failure or "it ended meanwhile"
                reply(
                    {
                        "error": "SnapshotError",
                        "message": f"sandbox {box.name}: no snapshot came to be: {why}",
                    }
                )
                return
            self._guests.images[image.id] = image
            taken = {"id": image.id, "engine": "gvisor", "why": _WHY, "depth_left": _DEPTH_LEFT}
            if request["keep"]:
                box.origin = image.id
                reply(taken)
            else:
                self._guests.when_gone(box, lambda: reply(taken))
                box.kill("it became a snapshot")

        self._engine.checkpoint(box, request["timeout"], done)

    def _check_connections(self, box: Box) -> None:
        """Raises SnapshotError."""
        count = box.wires.connections() if box.wires is not None else 0
        if count:
            raise SnapshotError(
                f"sandbox {box.name}: {count} connection(s) to outside are open in it, and gVisor's snapshot would end "
                "them: close them first"
            )

    def _check_room(self, box: Box) -> None:
        """Raises LimitExceeded."""
        status = os.statvfs(self._engine.images)
        room, needed = status.f_bavail * status.f_frsize, box.group.memory_bytes()
        if needed > room:
            raise LimitExceeded(
                f"sandbox {box.name}: its memory of {needed} bytes has no space on the disk of snapshots, where {room} "
                "bytes are left: delete some, or set SANDBOX_GYM_DISK_DIR"
            )

    def _do_on_disk(self, request: dict[str, Any], reply: Reply) -> None:
        if request["snapshot"] not in self._guests.images:
            raise SnapshotError(f"snapshot {request['snapshot']} is gone: it was deleted")
        reply({})

    def _do_release(self, request: dict[str, Any], reply: Reply) -> None:
        self._guests.release(request["snapshot"])
        reply({})

    # ---- while they live, and their end -------------------------------------------------------------------------

    def _do_terminate(self, request: dict[str, Any], reply: Reply) -> None:
        box = self._guests.boxes.get(request["id"])
        if box is None:
            reply({})
        else:
            self._guests.when_gone(box, lambda: reply({}))
            box.kill(request.get("reason") or "it was terminated")

    def _do_interrupt(self, request: dict[str, Any], reply: Reply) -> None:
        box = self._guests.get(request["id"])

        def done(code: int, said: str) -> None:
            if code:
                message = f"sandbox {box.name} could not be interrupted: {said or code}"
                reply({"error": "SandboxError", "message": message})
            else:
                reply({})

        self._engine.interrupt(box, done)

    def _do_death(self, request: dict[str, Any], reply: Reply) -> None:
        def tell() -> None:
            reply({"reason": self._guests.deaths.get(request["id"], "it is not known here")})

        box = self._guests.boxes.get(request["id"])
        if box is None:
            tell()
        else:  # its pipes closed, and its exit is on the way
            self._guests.when_gone(box, tell)
            box.kill()  # no reason of ours: its exit tells whether a limit was

    def _do_usage(self, request: dict[str, Any], reply: Reply) -> None:
        found = self._guests.boxes.get(request["id"]) or self._guests.images.get(request["id"])
        if found is None:
            raise SandboxError(f"no sandbox or snapshot {request['id']}")
        reply(found.usage())

    def _do_records(self, request: dict[str, Any], reply: Reply) -> None:
        outlet = self._guests.get(request["id"]).outlet
        if outlet is None:
            reply({"records": [], "more": False})
        else:
            outlet.records(request["after"], reply)

    def _do_budget(self, request: dict[str, Any], reply: Reply) -> None:
        self._guests.set_budget(request["budget"])
        reply({})

    def _do_list(self, request: dict[str, Any], reply: Reply) -> None:
        rows, start = self._guests.rows(), request.get("start", 0)
        reply({"rows": rows[start : start + _PAGE], "more": len(rows) > start + _PAGE})
