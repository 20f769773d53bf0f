"""The client's side of the native backend: starts the supervisor once, asks it for sandboxes."""

from __future__ import annotations

import builtins
import dataclasses
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from sandbox_gym import errors
from sandbox_gym.api import Deviation, Live, SandboxSpec, Taken
from sandbox_gym.backends.shared import protocol
from sandbox_gym.backends.shared.supervised import Supervised, max_sandboxes
from sandbox_gym.channel import Channel, GuestError
from sandbox_gym.guest.wire import Op
from sandbox_gym.images import store

from . import exchange, fingerprint


class NativeBackend(Supervised):
    """See `sandbox_gym.api.Backend`. One instance a process; a forked child gets its own supervisor."""

    name = "native"
    launch = "sandbox_gym.backends.native.launch"
    batch = 64  # as many descriptors as one message carries
    deviations: Sequence[Deviation] = ()
    rest_engine = "fork"  # which refuses one in which something else runs: that one isn't idle

    def __init__(self) -> None:
        super().__init__(max_sandboxes())
        self.disk = self._facts["disk"]
        self.any_depth = bool(self._facts["any_depth"])

    # ---- Backend --------------------------------------------------------------------------------------------------

    def snapshot(
        self,
        live: Live,
        *,
        keep: bool,
        engine: str,
        settled: bool,
        obstacle: str | None = None,
        timeout: float,
        levels: int = 1,
        budgeted: bool = True,
    ) -> Taken:
        request = {"op": "snapshot", "id": live.id, "keep": keep, "engine": engine, "settled": settled}
        request |= {"obstacle": obstacle, "levels": levels, "budgeted": budgeted}
        message, fds = self._ask({**request, "timeout": timeout}, timeout * 3)
        if fds:
            live.channel.replace(socket.socket(fileno=fds[0]))
        elif not keep:
            live.channel.close()
        return Taken(message["id"], message["engine"], message["why"], message["depth_left"])

    def _lives(self, message: dict[str, Any], fds: builtins.list[int]) -> builtins.list[Live]:
        return [
            Live(row["id"], row["name"], Channel(socket.socket(fileno=fd), row["name"]))
            for row, fd in zip(message["sandboxes"], fds, strict=True)
        ]

    def put_on_disk(self, snapshot_id: str, *, timeout: float) -> None:
        (live,) = self.restore(snapshot_id, names=[None], timeout=timeout, budgeted=False)
        try:
            live.channel.call(Op.SETTLE, True, timeout=timeout)
            taken = self.snapshot(
                live, keep=False, engine="criu", settled=True, timeout=timeout, budgeted=False
            )
            self._ask({"op": "supplant", "snapshot": snapshot_id, "by": taken.id}, timeout)
        except GuestError as error:
            raise errors.SnapshotError(
                f"snapshot {snapshot_id}: its guest could not be made ready: {error}"
            ) from None
        finally:
            self.terminate(live)

    # ---- Archiving ------------------------------------------------------------------------------------------------

    def facts(self, spec: SandboxSpec) -> dict[str, Any]:
        return fingerprint.facts(spec)

    def lacks(self, facts: Mapping[str, Any], state: Mapping[str, Any]) -> builtins.list[str]:
        return fingerprint.lacks(facts, self.spec_of(state))

    def describe(self, snapshot_id: str) -> dict[str, Any]:
        return self._ask({"op": "describe", "snapshot": snapshot_id}, 30.0)[0]

    def pack(self, snapshot_id: str, part: int, write: Callable[[bytes], object], *, timeout: float) -> int:
        request = {"op": "pack", "snapshot": snapshot_id, "part": part, "timeout": timeout}
        return int(self._carry(lambda sock: exchange.pull(sock, request, write, timeout), timeout)["files"])

    def unpack(
        self,
        spec: SandboxSpec,
        state: Mapping[str, Any],
        files: Sequence[int],
        blocks: Iterable[bytes],
        *,
        timeout: float,
    ) -> Taken:
        request = {**state, "op": "unpack", "spec": protocol.spec_to_json(spec), "timeout": timeout}
        request["files"] = list(files)
        request["budgeted"] = True
        reply = self._carry(lambda sock: exchange.push(sock, request, blocks, timeout), timeout)
        return Taken(reply["id"], reply["engine"], reply["why"], reply["depth_left"])

    def spec_of(self, state: Mapping[str, Any]) -> SandboxSpec:
        spec = protocol.spec_from_json(state["spec"])
        if spec.image is not None:  # which lies elsewhere on another machine
            spec = dataclasses.replace(spec, rootfs=store.default().root(spec.image))
        return spec

    def _carry(self, request: Callable[[socket.socket], dict[str, Any]], timeout: float) -> dict[str, Any]:
        """A request with bytes beside it. Raises what the caller's end of the pipe raised, as it was."""
        try:
            with self._connection(timeout + 10.0) as sock:
                message = request(sock)
        except exchange.CallerFailed as failed:
            raise failed.error from None
        if "error" in message:
            raise getattr(errors, message["error"])(message["message"])
        return message
