"""Snapshots taken and restored: which engine does it, and the steps of each, one event after another.

The fork engine freezes the guest's process and goes on as a copy of it. Where that isn't right, criu writes the tree as
an image and the guest goes on as it is. A guest that is as deep as process namespaces nest is rebased: written as an
image, made again from it at the first level, and there the fork engine goes on.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

from sandbox_gym.backends.shared.jobs import Jobs
from sandbox_gym.errors import BackendUnavailable, LimitExceeded, SandboxError, SnapshotError
from sandbox_gym.network import Allow

from . import criu, criu_planner, planner
from .copies import CopyFailed, Expected, Maker, deadline_in
from .images import Image, Imager
from .node import Node
from .population import MAX_DEPTH, Population
from .room import Room
from .stacks import Stacks

Reply = Callable[..., bool]
_MERGED_AT = MAX_DEPTH // 2  # the depth at which a chain's layers are merged, ahead of its rebase
_MARGIN = 5.0  # seconds that a job's own deadline comes before that of the guest it makes


class Snapshots:
    def __init__(
        self, jobs: Jobs, guests: Population, maker: Maker, imager: Imager, stacks: Stacks, room: Room
    ) -> None:
        self._jobs = jobs
        self._guests = guests
        self._maker = maker
        self._imager = imager
        self._stacks = stacks
        self._room = room

    # ---- taking -----------------------------------------------------------------------------------------------

    def take(self, request: dict[str, Any], reply: Reply) -> None:
        """`engine`: "fork", "criu" or "auto". The guest settles between a refusal and the request that lets criu do it
        (`settled`): its past may have left what only looks alive, and mappings that criu can't look up. `levels`: how
        many more must be able to nest below it.
        """
        node = self._guests.get(request["id"])
        engine, settled = request["engine"], request["settled"]
        if engine == "disk":
            raise SnapshotError(f"sandbox {node.name}: native captures memory too: leave scope= out")
        self._room.check_budget(request)
        refusal = planner.refusal(
            node.pid,
            node.control_inode,
            # The criu that has made it may just be ending there.
            [pid for pid in node.group.members() if pid not in self._jobs],
            [target for _, target in node.family.base.attached],
        )
        refusal = refusal or request["obstacle"]
        # What criu can't help, an ordinary user's sandboxes, uses all levels that there are.
        deep = node.depth > MAX_DEPTH - (request["levels"] if criu.installed() else 1)
        if refusal is None and not deep and engine != "criu":
            self._fork(node, request, reply)
        elif engine == "fork" or not settled:
            reason = (
                refusal or f"snapshots nest at most {MAX_DEPTH} deep with it, and this is number {node.depth}"
            )
            raise SnapshotError(f"sandbox {node.name}: the fork engine can't capture this state: {reason}")
        elif refusal is None and engine != "criu":
            self._rebase(node, request, reply)
        else:
            self._write(node, refusal or "criu was asked for", request, reply)

    def _fork(self, node: Node, request: dict[str, Any], reply: Reply) -> None:
        if not request["keep"]:
            node.freeze_disk()
            self._guests.sandboxes.pop(node.id)
            reply(self._guests.become_snapshot(node))
            return
        self._room.check_descriptors(1)
        try:
            heir = self._maker.copy(node, node.name, node.network)
        except BaseException:
            node.thaw_disk()
            raise

        def done(expected: Expected, failure: CopyFailed | None) -> None:
            if failure is not None:
                node.thaw_disk()
                reply({"error": "SnapshotError", "message": f"sandbox {node.name}: {failure}"})
                return
            self._guests.succeed(node, heir)
            taken = self._guests.become_snapshot(node)
            if not reply(taken, [heir.control.fileno()]):
                heir.kill("its client is gone")
            elif node.depth == _MERGED_AT and criu.installed():
                self._stacks.ahead(node, request["timeout"])

        self._guests.expect(Expected(heir, node, done, deadline_in(request["timeout"])))

    def _write(self, node: Node, why: str, request: dict[str, Any], reply: Reply) -> None:
        def done(image: Image | None, reason: str) -> None:
            if image is None:
                reply(_failed(node, reason))
                return
            self._guests.snapshots[image.id] = image
            image.handles, image.branched_from = 1, node.id
            if not request["keep"]:
                self._guests.sandboxes.pop(node.id, None)
                node.kill("it became a snapshot")
            reply({"id": image.id, "engine": "criu", "why": why, "depth_left": MAX_DEPTH})

        self._dump(node, why, request["timeout"], done)

    def _dump(self, node: Node, why: str, timeout: float, done: Callable[[Image | None, str], None]) -> None:
        sight = criu_planner.Sight()

        def look() -> criu_planner.Sight:
            nonlocal sight
            sight = criu_planner.look(node, criu.find())
            if sight.refusal is not None:
                raise SnapshotError(f"{nobody} {sight.refusal}")
            room = self._imager.store.room(sight.memory_bytes)
            if sight.memory_bytes > room:
                raise LimitExceeded(
                    f"sandbox {node.name}: its memory of {sight.memory_bytes} bytes has no space on the disk of "
                    f"snapshots, where {room} bytes are left: delete some, or set SANDBOX_GYM_DISK_DIR"
                )
            return sight

        def dumped(image: Image | None, reason: str) -> None:
            if image is not None:
                node.layer.share_with(image.layers[0])
            if image is not None and self._guests.sandboxes.get(node.id) is not node:
                image.drop_unneeded()
                image, reason = None, "it ended meanwhile"
            done(image, sight.explain(reason))

        nobody = f"sandbox {node.name}: no engine can capture this state. Not fork: {why}; not criu:"
        try:
            self._imager.dump(node, secrets.token_hex(6), look, timeout, dumped)
        except BackendUnavailable as error:
            raise SnapshotError(f"{nobody} {error}") from None

    def _rebase(self, node: Node, request: dict[str, Any], reply: Reply) -> None:
        timeout = request["timeout"]

        def dumped(image: Image | None, reason: str) -> None:
            if image is None:
                reply(_failed(node, reason))
                return
            try:
                self._stacks.flatten(image, timeout, lambda reason: flattened(image, reason))
            except OSError as error:
                flattened(image, str(error))

        def flattened(image: Image, reason: str) -> None:
            try:
                if not reason:
                    self._restore_image(image, node.name, node.network, timeout, restored)
                    return
            except (OSError, SandboxError) as error:
                reason = str(error)
            image.drop_unneeded()
            reply(_failed(node, reason))

        def restored(expected: Expected, failure: CopyFailed | None) -> None:
            if failure is not None:
                reply(_failed(node, str(failure)))
                return
            heir = expected.node
            self._guests.succeed(node, heir)
            node.kill("its state goes on at the first level")
            try:
                self._fork(heir, request, reply)
            except (OSError, CopyFailed, SandboxError) as error:
                # The client holds no channel to it, and the old one is gone.
                heir.kill("a snapshot could not be taken after it was rebased")
                reply(_failed(heir, str(error)))

        self._dump(node, f"snapshots nest at most {MAX_DEPTH} deep", timeout, dumped)

    # ---- restoring ----------------------------------------------------------------------------------------------

    def restore(
        self, request: dict[str, Any], reply: Reply, hand_out: Callable[[list[Node], Reply], None]
    ) -> None:
        source = self._guests.snapshots.get(request["snapshot"])
        if source is None:
            raise SnapshotError(f"snapshot {request['snapshot']} is gone: deleted, or its process was killed")
        replaced, timeout = request["replace"], request["timeout"]
        self._room.check_budget(request)
        self._room.check(request["names"], replaced=replaced)
        allow = source.network
        if "network" in request:
            allow = Allow.from_json(request["network"]) if request["network"] else None
        order: list[Node] = []
        made: list[Node] = []
        waiting = 0
        failures: list[str] = []

        def done(expected: Expected, failure: CopyFailed | None) -> None:
            nonlocal waiting
            waiting -= 1
            if failure is not None:
                failures.append(str(failure))
            else:
                self._guests.admit(expected.node, secrets.token_hex(6), expected.node.name, source.id)
                expected.node.branched_from = source.branched_from
                made.append(expected.node)
            if not waiting and not failures:
                if replaced is not None:
                    self._guests.take_place(made[0], replaced)
                hand_out(sorted(made, key=order.index), reply)
            elif not waiting:
                for node in made:
                    node.kill("a sibling could not be made")
                reply({"error": "SnapshotError", "message": f"snapshot {source.id}: {failures[0]}"})

        try:
            for name in request["names"]:
                order.append(self._start(source, name, allow, timeout, done))
                waiting += 1
        except (OSError, CopyFailed, SandboxError) as error:  # those that were begun answer for all
            failures.append(str(error))
        if not waiting:
            raise SnapshotError(f"snapshot {source.id}: {failures[0]}")

    def _start(
        self, source: Node | Image, name: str | None, allow: Allow | None, timeout: float, done: Any
    ) -> Node:
        if isinstance(source, Image):
            return self._restore_image(source, name, allow, timeout, done)
        node = self._maker.copy(source, name, allow)
        self._guests.expect(Expected(node, source, done, deadline_in(timeout)))
        return node

    def _restore_image(
        self, image: Image, name: str | None, allow: Allow | None, timeout: float, done: Any
    ) -> Node:
        def restored(reason: str) -> None:
            image.drop_unneeded()
            if expected in self._guests.expected:
                self._guests.arrive(expected, CopyFailed(reason) if reason else None)

        node = self._maker.restore(image, name, allow, timeout, restored)
        expected = Expected(node, None, done, deadline_in(timeout + _MARGIN))
        self._guests.expect(expected, announces=False)
        return node


def _failed(node: Node, reason: str) -> dict[str, Any]:
    return {"error": "SnapshotError", "message": f"sandbox {node.name}: {reason}"}
