"""The process beside each client that outlives it: removes all that the client has made, and serves its network rules.

It waits on the client's lifeline, on which its requests come too, one after the other. When that ends, or the client
does, everything with this run's label goes.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from sandbox_gym.backends.egress import network
from sandbox_gym.backends.egress.gateway import Gateway, Outlet
from sandbox_gym.backends.shared import protocol
from sandbox_gym.backends.shared.jobs import Jobs
from sandbox_gym.backends.shared.loop import Loop
from sandbox_gym.errors import BackendUnavailable, SandboxError
from sandbox_gym.network import Allow

from . import owners
from .daemon import Daemon

_REMOVAL = 60.0  # seconds that a container may take to go


def main() -> NoReturn:
    """`argv`: the lifeline's descriptor, the daemon's url, the run."""
    lifeline = socket.socket(fileno=int(sys.argv[1]))
    url, run = sys.argv[2:4]
    client = os.pidfd_open(os.getppid())
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # a terminal's, meant for the client
        signal.signal(number, signal.SIG_IGN)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    keeper = Keeper(Daemon(url), lifeline, client)
    lifeline.send(json.dumps({"ready": True}).encode())
    keeper.sweep()
    try:
        keeper.serve()
    except Exception:  # a bug here must not leave containers
        traceback.print_exc()
    try:
        keeper.clear(run)
    except (
        SandboxError
    ):  # the daemon is gone, too: what it has is removed by the next client, or `sandbox-gym gc`
        sys.exit(1)
    sys.exit(0)


class Keeper:
    def __init__(self, daemon: Daemon, lifeline: socket.socket, client: int) -> None:
        self._daemon = daemon
        self._lifeline = lifeline
        self._jobs = Jobs(Loop())
        self._gateway = Gateway(self._jobs)
        self._outlets: dict[str, Outlet] = {}  # by container
        self._ends: dict[str, float] = {}  # monotonic: when a container's time to live is over
        self._over = False
        self._jobs.loop.watch(lifeline.fileno(), self._hear)
        self._jobs.loop.watch(client, self._end)

    def serve(self) -> None:
        while not self._over:
            self._jobs.loop.turn(None, now=False, patience=self._patience)
            now = time.monotonic()
            self._jobs.expire(now)
            for container in [container for container, end in self._ends.items() if end <= now]:
                del self._ends[container]
                self._aside(lambda gone=container: self._daemon_of_child().remove_container(gone))  # type: ignore[misc]

    def sweep(self) -> None:
        """What dead clients have left, aside."""
        self._aside(lambda: owners.collect(self._daemon_of_child()))

    def clear(self, run: str) -> None:
        for outlet in self._outlets.values():
            outlet.close()
        owners.remove_run(self._daemon, run)

    def _aside(self, body: Callable[[], object]) -> None:
        self._jobs.start(body, _REMOVAL, lambda code: None)

    def _daemon_of_child(self) -> Daemon:
        """With connections of its own: those of before the fork are this process's."""
        return Daemon(self._daemon.url)

    def _patience(self) -> float:
        due = [*self._ends.values(), *self._jobs.deadlines()]
        return max(0.0, min(due) - time.monotonic()) if due else -1

    def _end(self) -> None:
        self._over = True

    # ---- requests ---------------------------------------------------------------------------------------------------

    def _hear(self) -> None:
        try:
            request, _ = protocol.receive(self._lifeline)
        except (EOFError, OSError):
            self._end()
            return
        try:
            getattr(self, f"_do_{request['op']}")(request)
        except SandboxError as error:
            self._reply({"error": type(error).__name__, "message": str(error)})
        except Exception as error:
            where = traceback.format_exc(limit=-3)
            self._reply({"error": "SandboxError", "message": f"{request['op']} failed: {error}\n{where}"})

    def _reply(self, message: dict[str, Any]) -> None:
        try:
            protocol.send(self._lifeline, message)
        except OSError:
            self._end()

    def _do_expire(self, request: dict[str, Any]) -> None:
        """A container is to end in so many seconds."""
        self._ends[request["container"]] = time.monotonic() + request["seconds"]
        self._reply({})

    def _do_open(self, request: dict[str, Any]) -> None:
        """A container's network: with what rules, in whose place it goes on, which connections have ended in it."""
        pid = request["pid"]
        try:
            network.end_connections(pid, [tuple(one) for one in request["ended"]])
            theirs = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
            try:
                outlet = self._gateway.open(theirs, Allow.from_json(request["allow"]))
            finally:
                os.close(theirs)
        except PermissionError as error:
            raise BackendUnavailable(
                f"network rules need root, to listen inside a container ({error}): run as root, or leave network= out"
            ) from None
        except OSError as error:
            raise BackendUnavailable(f"network rules can't be served in this container: {error}") from None
        outlet.inherit(self._outlets.get(request["heir_of"] or ""))
        self._outlets[request["container"]] = outlet
        self._reply({})

    def _do_connections(self, request: dict[str, Any]) -> None:
        """Those that lead outside, while the container stands still."""
        outlet = self._outlets[request["container"]]
        self._reply({"connections": network.connections(request["pid"], set(outlet.ends()))})

    def _do_records(self, request: dict[str, Any]) -> None:
        outlet = self._outlets.get(request["container"])
        if outlet is None:
            self._reply({"records": [], "more": False})
        else:
            outlet.records(request["after"], self._reply)

    def _do_forget(self, request: dict[str, Any]) -> None:
        """A container is gone."""
        self._ends.pop(request["container"], None)
        outlet = self._outlets.pop(request["container"], None)
        if outlet is not None:
            outlet.close()
        self._reply({})
