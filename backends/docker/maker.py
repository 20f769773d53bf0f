"""How a container becomes a sandbox, a snapshot, a copy, and how it ends."""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

from sandbox_gym.api import Live, SandboxSpec
from sandbox_gym.backends.egress.network import Connection, changed_variables
from sandbox_gym.backends.native.rootfs import NEEDED
from sandbox_gym.channel import Channel
from sandbox_gym.errors import BackendUnavailable, ProtocolError, SandboxDied, SandboxError, SnapshotError
from sandbox_gym.guest.wire import Op
from sandbox_gym.network import Allow

from . import owners
from .container import config
from .daemon import Daemon, Refused
from .deaths import Deaths
from .groups import Groups
from .keeping import Keeping
from .limits import Enforced
from .mounts import writable_mounts
from .owners import Owner
from .population import Box, Population, Shot
from .roots import Root
from .snapshots import Checkpoints
from .stream import Attached

TOLD, _ENDED = 2.0, 10.0  # seconds for the daemon to tell of a container's end: by itself, by its removal


class Maker:
    """`info`: the daemon's of itself; `runtime`: which one of its runs the containers, None for its usual one."""

    def __init__(
        self,
        daemon: Daemon,
        owner: Owner,
        keeper: Keeping,
        population: Population,
        info: Mapping[str, Any],
        runtime: str | None,
    ) -> None:
        self._daemon = daemon
        self._owner = owner
        self._keeper = keeper
        self._population = population
        self._enforced = Enforced(info)
        self._runtime = runtime
        self.engine = "gvisor" if runtime == "runsc" else "criu"
        self.checkpoints = Checkpoints(daemon)
        self.deaths = Deaths(daemon, owner.run, self.ended)
        self.deaths.listen()

    def make(
        self,
        spec: SandboxSpec,
        root: Root,
        shot: Shot | None,
        network: Allow | None,
        name: str | None,
        box_id: str,
        until: float,
        old: Box | None = None,
    ) -> Live:
        """A sandbox of that root, or of a snapshot; in the place of an old one, which then ends."""
        self.deaths.listen()
        self._enforced.check(spec.limits)
        labels = {**self._owner.labels("sandbox"), owners.ID: box_id, owners.NAME: name or box_id}
        if shot is not None:
            labels[owners.PARENT] = shot.id
        image = _base(shot, root)
        try:
            container = self._create(spec, root, image, network, labels)
        except Refused as refused:
            kind = BackendUnavailable if shot is None else SnapshotError
            raise kind(f"a container can't be made: {refused}") from None
        box = Box(box_id, name or box_id, container, spec, root, network, shot)
        channel: Channel | None = None
        try:
            channel = self._start(box, until)
            if network is not None:
                self._open_network(box, old)
            self._set_end(box, old)
        except BaseException:
            if channel is not None:
                channel.close()
            with contextlib.suppress(SandboxError):
                self._daemon.remove_container(container)
            raise
        self._population.admit(box)
        if old is not None:
            old.reason = "a snapshot was restored in its place"
            self._remove(old)
        if self.deaths.code(container, 0) is not None:  # before it was admitted
            self.ended(container)
        return Live(box.id, box.name, channel)

    def _create(
        self, spec: SandboxSpec, root: Root, image: str, network: Allow | None, labels: dict[str, str]
    ) -> str:
        sized = self._enforced.disk and spec.limits.disk_bytes is not None
        body = config(spec, root, image, network=network, labels=labels, runtime=self._runtime, sized=sized)
        try:
            return str(self._daemon.ask("POST", "/containers/create", body=body)["Id"])
        except Refused as refused:
            if sized and "storage" in str(refused).lower():
                self._enforced.no_disk()
                self._enforced.check(spec.limits)
                return self._create(spec, root, image, network, labels)
            raise

    def _start(self, box: Box, until: float) -> Channel:
        shot = box.origin
        checkpointed = shot is not None and shot.checkpointed
        if shot is not None and checkpointed:
            self.checkpoints.lend(shot.store, box.container)
        sock = self._daemon.attach(box.container, timeout=_left(until))
        channel = Channel(cast(socket.socket, Attached(sock)), box.name)
        try:
            self.checkpoints.start(box.container, checkpoint=checkpointed, timeout=_left(until))
            if shot is not None and checkpointed:
                changed = changed_variables(shot.network, box.network)
                wrong = writable_mounts(self.groups(box).pid, box.root.attached)
                if wrong and self.engine == "criu":
                    raise SnapshotError(
                        f"criu has made {', '.join(wrong)} writable in the copy, which was ended"
                    )
                if changed:
                    channel.call(Op.ADOPT, {"variables": changed}, timeout=_left(until))
            else:
                channel.wait(Op.READY, timeout=_left(until))
        except (SandboxDied, ProtocolError) as error:
            channel.close()
            kind = BackendUnavailable if shot is None else SnapshotError
            raise kind(f"{error}: {self._stillborn(box)}") from None
        except BaseException:
            channel.close()
            raise
        return channel

    def _stillborn(self, box: Box) -> str:
        code = self.deaths.code(box.container, TOLD)
        if self.deaths.by_memory(box.container):
            return "its memory limit is too small for a guest"
        hint = f" ({NEEDED})" if box.spec.rootfs is not None else ""
        return f"its interpreter ended with exit code {code}{hint}"

    def _open_network(self, box: Box, old: Box | None) -> None:
        assert box.network is not None
        if self.engine == "gvisor":
            raise BackendUnavailable(
                "network rules are served in a network namespace of the kernel, and gVisor has its own network inside: "
                'leave network= out, or use backend="docker"'
            )
        self._keeper.ask(
            "open",
            container=box.container,
            pid=self.groups(box).pid,
            allow=box.network.to_json(),
            heir_of=old.container if old is not None else None,
            ended=box.origin.connections if box.origin is not None else [],
        )

    def _set_end(self, box: Box, old: Box | None) -> None:
        if box.spec.ttl is None:
            return
        now = time.monotonic()
        box.dies_at = old.dies_at if old is not None and old.dies_at is not None else now + box.spec.ttl
        self._keeper.ask("expire", container=box.container, seconds=max(0.0, box.dies_at - now))

    def capture(self, box: Box, full: bool, depth: int, timeout: float, *, keep: bool) -> Shot:
        until = time.monotonic() + timeout
        shot_id = secrets.token_hex(6)
        labels = {**self._owner.labels("snapshot"), owners.ID: shot_id, owners.NAME: box.name}
        body: dict[str, Any] = {
            "Image": box.origin.image if box.origin is not None else box.root.image,
            "Cmd": ["/none"],
        }
        body |= {"Labels": labels, "HostConfig": {"NetworkMode": "none", "LogConfig": {"Type": "none"}}}
        store = str(self._daemon.ask("POST", "/containers/create", body=body)["Id"])
        memory, image = 0, ""
        connections: Sequence[Connection] = ()
        try:
            if (
                self.engine == "gvisor"
            ):  # what is written to disk is in its checkpoint, which is of one instant
                memory = self.checkpoints.write(box.container, store, _left(until))
            else:
                with self.checkpoints.standing_still(box.container, self.groups(box)):
                    if full:
                        memory = self.checkpoints.write(box.container, store, _left(until))
                        if box.network is not None:
                            asked = {"container": box.container, "pid": self.groups(box).pid}
                            connections = self._keeper.ask("connections", **asked)["connections"]
                    image = self.checkpoints.commit(box.container, labels, _left(until))
            if not keep:
                self.end(box, "it became a snapshot")
        except BaseException:
            with contextlib.suppress(SandboxError):
                self._daemon.remove_container(store)
                if image:
                    self._daemon.remove_image(image)
            raise
        return Shot(
            *(shot_id, image, store, full, box.spec, box.root, box.network),
            *(connections, box.origin, memory, depth),
        )

    # ---- the end ----------------------------------------------------------------------------------------------------

    def end(self, box: Box, reason: str) -> None:
        box.reason = box.reason or reason
        self._remove(box)
        self._population.drop(box)

    def _remove(self, box: Box) -> None:
        self._daemon.remove_container(box.container)
        self._forget(box)

    def _forget(self, box: Box) -> None:
        if box.network is not None or box.dies_at is not None:
            with contextlib.suppress(SandboxDied):  # the keeper is gone
                self._keeper.ask("forget", container=box.container)

    def ended(self, container: str) -> None:
        """Of any container of this client."""
        box = self._population.of_container(container)
        if box is not None:
            self._population.drop(box)
            self._forget(box)

    def reason(self, box: Box) -> str:
        code = self.deaths.code(box.container, _ENDED)
        if box.reason:
            return box.reason
        if self.deaths.by_memory(box.container):
            return f"memory: its limit of {box.spec.limits.memory_bytes} bytes was reached"
        if box.dies_at is not None and time.monotonic() >= box.dies_at:
            return "its time to live is over"
        return f"its process ended (exit code {code}), crashed or closed its output"

    def groups(self, box: Box) -> Groups:
        if box.groups is None:
            try:
                pid = int(self._daemon.inspect(box.container)["State"]["Pid"])
            except Refused as refused:
                raise SandboxDied(f"sandbox {box.name} is gone ({refused})") from None
            box.groups = Groups(box.container, pid)
        return box.groups


def _base(shot: Shot | None, root: Root) -> str:
    return root.image if shot is None or not shot.image else shot.image


def _left(until: float) -> float:
    return max(0.001, until - time.monotonic())
