"""The client's side of the gVisor backend: starts the supervisor once, asks it for sandboxes."""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from typing import Any

from sandbox_gym.api import Deviation, Live, Taken
from sandbox_gym.backends.native import disk
from sandbox_gym.backends.shared.supervised import Supervised, max_sandboxes
from sandbox_gym.channel import Channel
from sandbox_gym.guest.stdio import Stdio

from . import runsc


class GvisorBackend(Supervised):
    """See `sandbox_gym.api.Backend`. One instance a process; a forked child gets its own supervisor."""

    name = "gvisor"
    launch = "sandbox_gym.backends.gvisor.launch"
    batch = 16  # they are made at once
    deviations: Sequence[Deviation] = (
        Deviation("network.connections_end_in_copies", "no snapshot while connections to outside are open"),
        Deviation("snapshot.saved_and_loaded", "snapshots can't be written to files"),
    )
    any_depth = True
    rest_engine = "auto"

    def __init__(self) -> None:
        super().__init__(max_sandboxes(), runsc.find().path, disk.image_folder())

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
    ) -> Taken:
        """Nothing has to settle, and nothing is in the way: the kernel inside saves itself."""
        request = {"op": "snapshot", "id": live.id, "keep": keep, "engine": engine, "timeout": timeout}
        message, _ = self._ask(request, timeout)
        if not keep:
            live.channel.close()
        return Taken(message["id"], message["engine"], message["why"], message["depth_left"])

    def _lives(self, message: dict[str, Any], fds: builtins.list[int]) -> builtins.list[Live]:
        """Two descriptors each: what comes of the guest, what goes to it."""
        pipes: builtins.list[Any] = [Stdio(*fds[i : i + 2]) for i in range(0, len(fds), 2)]
        return [
            Live(row["id"], row["name"], Channel(pipe, row["name"]))
            for row, pipe in zip(message["sandboxes"], pipes, strict=True)
        ]

    def put_on_disk(self, snapshot_id: str, *, timeout: float) -> None:
        """It is there already."""
        self._ask({"op": "on_disk", "snapshot": snapshot_id}, timeout)
