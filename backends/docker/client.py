"""The docker backend: containers of a daemon on this machine."""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import os
import secrets
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, cast

from sandbox_gym.api import Deviation, Live, SandboxSpec, Taken
from sandbox_gym.backends.egress.network import changed_variables
from sandbox_gym.backends.native.client import python_path
from sandbox_gym.backends.native.rootfs import NEEDED
from sandbox_gym.channel import Channel
from sandbox_gym.errors import BackendUnavailable, ProtocolError, SandboxDied, SandboxError, SnapshotError
from sandbox_gym.guest import wire
from sandbox_gym.guest.wire import Op
from sandbox_gym.network import Allow, NetworkRecord

from . import owners
from .container import config
from .daemon import Daemon, Refused
from .deaths import Deaths
from .groups import Groups
from .keeping import Keeping
from .limits import Enforced
from .owners import Owner
from .population import Box, Population, Shot
from .roots import Root, Roots
from .snapshots import Checkpoints
from .stream import Attached

_MOST_AT_ONCE = 16  # copies in the making
_TOLD, _ENDED = 2.0, 10.0  # seconds for the daemon to tell of a container's end: by itself, by its removal
_LAYERS = 120  # of an image, at most: docker takes 125


class DockerBackend:
    """See `sandbox_gym.api.Backend`. `option`: the daemon's runtime for containers ("docker:runsc")."""

    name = "docker"
    deviations: Sequence[Deviation] = ()
    any_depth = False

    def __init__(self, option: str | None = None) -> None:
        self._daemon = Daemon()
        self._runtime = option
        self._pid = os.getpid()
        info = self._daemon.info()
        if option is not None and option not in info["Runtimes"]:
            raise BackendUnavailable(
                f"the docker daemon has no runtime {option!r}, but {', '.join(sorted(info['Runtimes']))}: add it under "
                '"runtimes" in /etc/docker/daemon.json, and restart the daemon'
            )
        self._owner = Owner.this()
        self._roots = Roots(self._daemon, self._owner)
        self._checkpoints = Checkpoints(self._daemon)
        cap = int(os.environ.get("SANDBOX_GYM_MAX_SANDBOXES", "1024"))
        self._population = Population(self._daemon, cap)
        self._engine = "gvisor" if option == "runsc" else "criu"
        self._deaths = Deaths(self._daemon, self._owner.run, self._ended)
        self._enforced = Enforced(info)
        self._unreferenced: deque[str] = deque()  # snapshots whose last handle was garbage
        self._closed = False
        self._keeper = Keeping(self._daemon.url, self._owner.run)

    # ---- Backend --------------------------------------------------------------------------------------------------

    def create(self, spec: SandboxSpec, *, name: str | None, timeout: float) -> Live:
        until = time.monotonic() + timeout
        self._tend()
        if spec.rootfs is None:
            spec = dataclasses.replace(spec, python_path=python_path())
        with self._population.room([name]):
            root = self._roots.get(spec, until)
            return self._make(spec, root, None, spec.network, name, secrets.token_hex(6), until)

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
        self._tend()
        box = self._population.get(live.id)
        if engine == "fork":
            raise SnapshotError(f"sandbox {box.name}: docker has no fork engine: leave engine= out")
        depth = 1 + (box.origin.depth if box.origin is not None else 0)
        if depth + levels - 1 > _LAYERS:
            raise SnapshotError(
                f"sandbox {box.name}: docker stacks at most {_LAYERS} snapshots: restore from an earlier one"
            )
        full = engine != "disk"
        if full:
            self._checkpoints.check()
            if not settled:
                raise SnapshotError(
                    f"sandbox {box.name}: a checkpoint needs a guest that has made itself ready"
                )
        shot = self._capture(box, full, depth, timeout, keep=keep)
        self._population.keep(shot)
        if not keep:
            live.channel.close()
        why = "docker takes no others" if full else "the disk alone was asked for"
        return Taken(shot.id, self._engine if full else "disk", why, _LAYERS - depth)

    def restore(
        self,
        snapshot_id: str,
        *,
        names: Sequence[str | None],
        timeout: float,
        replace: Live | None = None,
        network: Allow | Literal["same"] | None = "same",
    ) -> list[Live]:
        until = time.monotonic() + timeout
        self._tend()
        shot = self._population.shot(snapshot_id)
        allow = shot.network if network == "same" else network
        old = self._population.boxes.get(replace.id) if replace is not None else None

        def copy(name: str | None) -> Live:
            box_id = replace.id if replace is not None else secrets.token_hex(6)
            return self._make(
                shot.spec, shot.root, shot, allow, old.name if old else name, box_id, until, old
            )

        with self._population.room(names, replace.id if replace is not None else None):
            return self._all(copy, names)

    def set_budget(self, *, memory: int | None, disk: int | None) -> None:
        if memory is not None or disk is not None:
            raise BackendUnavailable(
                "docker keeps no budget over containers: bound each, by memory= and disk="
            )

    def put_on_disk(self, snapshot_id: str, *, timeout: float) -> None:
        self._population.shot(snapshot_id)  # where a checkpoint is from the beginning

    def release(self, snapshot_id: str) -> None:
        self._population.release(snapshot_id)

    def release_later(self, snapshot_id: str) -> None:
        self._unreferenced.append(snapshot_id)

    def terminate(self, live: Live, reason: str | None = None) -> None:
        live.channel.close()
        box = self._population.boxes.get(live.id)
        if box is not None:
            self._end(box, reason or "it was terminated")
            self._population.drop_images()

    def interrupt(self, live: Live) -> None:
        box = self._population.get(live.id)
        try:
            self._daemon.ask("POST", f"/containers/{box.container}/kill", params={"signal": "SIGINT"})
        except Refused as refused:
            raise SandboxDied(f"sandbox {box.name} is gone ({refused})") from None

    def death(self, live: Live) -> str:
        box = self._population.boxes.get(live.id)
        if box is not None and self._deaths.code(box.container, _TOLD) is None:
            self._end(box, "")  # its output ended, and it has not
        box = box or self._population.dead(live.id)
        return self._reason(box) if box is not None else "it is not known here"

    def usage(self, node_id: str) -> dict[str, int]:
        shot = self._population.shots.get(node_id)
        if shot is not None:
            copies = sum(box.origin is shot for box in builtins.list(self._population.boxes.values()))
            disk = self._size(shot.image) - self._size(shot.root.image)
            return {"memory_bytes": shot.memory_bytes, "disk_bytes": disk, "oom_kills": 0, "children": copies}
        box = self._population.get(node_id)
        groups = self._groups(box)
        found = self._daemon.ask("GET", f"/containers/{box.container}/json", params={"size": 1})
        return {
            "memory_bytes": groups.memory_bytes(),
            "disk_bytes": int(found.get("SizeRw") or 0),
            "oom_kills": groups.oom_kills(),
            "children": max(0, groups.processes() - 1),
        }

    def network_log(self, live: Live) -> builtins.list[NetworkRecord]:
        box = self._population.get(live.id)
        found: builtins.list[NetworkRecord] = []
        after, more = 0, True
        while more:
            page = self._keeper.ask("records", container=box.container, after=after)
            for row in page["records"]:
                after = row.pop("n")
                found.append(NetworkRecord(**row))
            more = page["more"]
        return found

    def list(self) -> builtins.list[dict[str, Any]]:
        return [
            {
                "id": box.id,
                "name": box.name,
                "state": "running",
                "age": time.time() - box.created,
                "parent": box.origin.id if box.origin is not None else None,
                "memory_bytes": self._groups(box).memory_bytes(),
                "pid": self._groups(box).pid,
            }
            for box in builtins.list(self._population.boxes.values())
        ]

    def alive(self) -> bool:
        return not self._closed and self._keeper.alive()

    def close(self) -> None:
        """Ends every container of this client, and removes what was made for them. Idempotent."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        cleared = self._keeper.close()
        self._deaths.close()
        if not cleared:  # it was killed
            with contextlib.suppress(SandboxError):  # the daemon, too: what it has is removed once it is back
                owners.remove_run(self._daemon, self._owner.run)

    # ---- making -----------------------------------------------------------------------------------------------------

    def _make(
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
        self._deaths.listen()
        self._enforced.check(spec.limits)
        labels = {**self._owner.labels("sandbox"), owners.ID: box_id, owners.NAME: name or box_id}
        if shot is not None:
            labels[owners.PARENT] = shot.id
        image = shot.image if shot is not None else root.image
        container = self._create(spec, root, image, network, labels)
        box = Box(box_id, name or box_id, container, spec, root, network, shot)
        try:
            channel = self._start(box, until)
            if network is not None:
                self._open_network(box, old)
            self._set_end(box, old)
        except BaseException:
            with contextlib.suppress(SandboxError):
                self._daemon.remove_container(container)
            raise
        self._population.admit(box)
        if old is not None:
            old.reason = "a snapshot was restored in its place"
            self._remove(old)
        if self._deaths.code(container, 0) is not None:  # before it was admitted
            self._ended(container)
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
            raise BackendUnavailable(f"a container can't be made: {refused}") from None

    def _start(self, box: Box, until: float) -> Channel:
        shot = box.origin
        checkpointed = shot is not None and shot.checkpointed
        if shot is not None and checkpointed:
            self._checkpoints.lend(shot.store, box.container)
        sock = self._daemon.attach(box.container, timeout=_left(until))
        channel = Channel(cast(socket.socket, Attached(sock)), box.name)
        try:
            self._checkpoints.start(box.container, checkpoint=checkpointed, timeout=_left(until))
            if shot is not None and checkpointed:
                changed = changed_variables(shot.network, box.network)
                if changed:
                    channel.post(Op.ADOPT, wire.encode({"variables": changed})[0], timeout=_left(until))
            else:
                channel.wait(Op.READY, timeout=_left(until))
        except (SandboxDied, ProtocolError) as error:
            channel.close()
            raise BackendUnavailable(f"{error}: {self._stillborn(box)}") from None
        except BaseException:
            channel.close()
            raise
        return channel

    def _stillborn(self, box: Box) -> str:
        code = self._deaths.code(box.container, _TOLD)
        if self._deaths.by_memory(box.container):
            return "its memory limit is too small for a guest"
        hint = f" ({NEEDED})" if box.spec.rootfs is not None else ""
        return f"its interpreter ended with exit code {code}{hint}"

    def _open_network(self, box: Box, old: Box | None) -> None:
        assert box.network is not None
        if self._engine == "gvisor":
            raise BackendUnavailable(
                'network rules are served in a namespace of the kernel\'s, and gVisor has its own: use backend="gvisor"'
            )
        self._keeper.ask(
            "open",
            container=box.container,
            pid=self._groups(box).pid,
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

    def _all(self, copy: Callable[[str | None], Live], names: Sequence[str | None]) -> builtins.list[Live]:
        """All or none, side by side."""
        if len(names) == 1:
            return [copy(names[0])]
        with ThreadPoolExecutor(min(len(names), _MOST_AT_ONCE)) as pool:
            made = [pool.submit(copy, name) for name in names]
        failures = [error for future in made if (error := future.exception()) is not None]
        if failures:
            for future in made:
                if future.exception() is None:
                    self.terminate(future.result())
            raise failures[0]
        return [future.result() for future in made]

    def _capture(self, box: Box, full: bool, depth: int, timeout: float, *, keep: bool) -> Shot:
        until = time.monotonic() + timeout
        shot_id = secrets.token_hex(6)
        labels = {**self._owner.labels("snapshot"), owners.ID: shot_id, owners.NAME: box.name}
        body = {"Image": box.origin.image if box.origin is not None else box.root.image, "Cmd": ["/none"]}
        body |= {"Labels": labels, "HostConfig": {"NetworkMode": "none", "LogConfig": {"Type": "none"}}}
        store = str(self._daemon.ask("POST", "/containers/create", body=body)["Id"])
        memory, connections = 0, ()
        try:
            with self._checkpoints.standing_still(box.container, self._groups(box)):
                if full:
                    memory = self._checkpoints.write(box.container, store, _left(until))
                    if box.network is not None:
                        asked = {"container": box.container, "pid": self._groups(box).pid}
                        connections = self._keeper.ask("connections", **asked)["connections"]
                image = self._checkpoints.commit(box.container, labels, _left(until))
            if not keep:
                self._end(box, "it became a snapshot")
        except BaseException:
            with contextlib.suppress(SandboxError):
                self._daemon.remove_container(store)
            raise
        network = box.network
        return Shot(
            shot_id, image, store, full, box.spec, box.root, network, connections, box.origin, memory, depth
        )

    # ---- the end ----------------------------------------------------------------------------------------------------

    def _end(self, box: Box, reason: str) -> None:
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

    def _ended(self, container: str) -> None:
        """Of any container of this client."""
        box = self._population.of_container(container)
        if box is not None:
            self._population.drop(box)
            self._forget(box)

    def _reason(self, box: Box) -> str:
        code = self._deaths.code(box.container, _ENDED)
        if box.reason:
            return box.reason
        if self._deaths.by_memory(box.container):
            return f"memory: its limit of {box.spec.limits.memory_bytes} bytes was reached"
        if box.dies_at is not None and time.monotonic() >= box.dies_at:
            return "its time to live is over"
        return f"its process ended (exit code {code}), crashed or closed its output"

    # ---- small things -----------------------------------------------------------------------------------------------

    def _tend(self) -> None:
        """Before anything is made: what garbage has left goes. Raises SandboxDied where nothing can be made any more."""
        if not self.alive():
            raise SandboxDied("the keeper of this process's containers is gone")
        while self._unreferenced:
            self._population.release(self._unreferenced.popleft())

    def _groups(self, box: Box) -> Groups:
        if box.groups is None:
            try:
                pid = int(self._daemon.inspect(box.container)["State"]["Pid"])
            except Refused as refused:
                raise SandboxDied(f"sandbox {box.name} is gone ({refused})") from None
            box.groups = Groups(box.container, pid)
        return box.groups

    def _size(self, image: str) -> int:
        return int(self._daemon.ask("GET", f"/images/{image}/json")["Size"])


def _left(until: float) -> float:
    return max(0.001, until - time.monotonic())
