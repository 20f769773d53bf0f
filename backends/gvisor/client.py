"""The client's side of the gVisor backend: starts the supervisor once, asks it for sandboxes."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any, Literal

from sandbox_gym.api import Deviation, Live, SandboxSpec, Taken
from sandbox_gym.backends.native import disk
from sandbox_gym.backends.shared import protocol
from sandbox_gym.backends.shared.supervised import Supervised, max_sandboxes, python_path
from sandbox_gym.channel import Channel
from sandbox_gym.guest.stdio import Stdio
from sandbox_gym.network import Allow

from . import runsc

_BATCH = 16  # copies that one request asks for: they are made at once


class GvisorBackend(Supervised):
    """See `sandbox_gym.api.Backend`. One instance a process; a forked child gets its own supervisor."""

    name = "gvisor"
    launch = "sandbox_gym.backends.gvisor.launch"
    deviations: Sequence[Deviation] = (
        Deviation("network.connections_end_in_copies", "no snapshot while connections to outside are open"),
        Deviation("snapshot.saved_and_loaded", "snapshots can't be written to files"),
    )
    any_depth = True
    rest_engine = "auto"

    def __init__(self) -> None:
        self._warned = False
        super().__init__(max_sandboxes(), runsc.find().path, disk.image_folder())

    def create(self, spec: SandboxSpec, *, name: str | None, timeout: float) -> Live:
        if spec.rootfs is None:
            spec = dataclasses.replace(spec, python_path=python_path())
        request = {"op": "create", "spec": protocol.spec_to_json(spec), "name": name, "timeout": timeout}
        message, fds = self._ask(request, timeout)
        self._warn(spec, message["unenforced"])
        return _lives(message, fds)[0]

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

    def restore(
        self,
        snapshot_id: str,
        *,
        names: Sequence[str | None],
        timeout: float,
        replace: Live | None = None,
        network: Allow | Literal["same"] | None = "same",
    ) -> list[Live]:
        made: list[Live] = []
        try:
            for start in range(0, len(names), _BATCH):
                batch = list(names[start : start + _BATCH])
                request = {"op": "restore", "snapshot": snapshot_id, "names": batch, "timeout": timeout}
                request["replace"] = replace.id if replace is not None else None
                if network != "same":
                    request["network"] = network.to_json() if network is not None else None
                made += _lives(*self._ask(request, timeout))
        except BaseException:
            for live in made:
                self.terminate(live)
            raise
        return made

    def put_on_disk(self, snapshot_id: str, *, timeout: float) -> None:
        """It is there already."""
        self._ask({"op": "on_disk", "snapshot": snapshot_id}, timeout)

    def _warn(self, spec: SandboxSpec, unenforced: Sequence[str]) -> None:
        limits = {"cpus": spec.limits.cpus, "memory": spec.limits.memory_bytes}
        missing = [name for name in unenforced if limits[name] is not None]
        if missing and not self._warned:
            self._warned = True
            warnings.warn(
                f"default limits not enforced here: {', '.join(missing)} (no writable control group). Asking for one "
                "explicitly is an error; see `sandbox-gym doctor`",
                RuntimeWarning,
                stacklevel=5,
            )


def _lives(message: dict[str, Any], fds: Sequence[int]) -> list[Live]:
    """Two descriptors each: what comes of the guest, what goes to it."""
    pipes: list[Any] = [Stdio(*fds[i : i + 2]) for i in range(0, len(fds), 2)]
    return [
        Live(row["id"], row["name"], Channel(pipe, row["name"]))
        for row, pipe in zip(message["sandboxes"], pipes, strict=True)
    ]
