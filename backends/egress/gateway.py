"""The supervisor's hold on the proxy that serves what its sandboxes may reach: one process for all, started when it is
first needed, and again when it was killed. The listening sockets lie in the sandboxes' network namespaces and are held
here too, so that connections wait for the next one.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sandbox_gym.backends.shared import protocol
from sandbox_gym.backends.shared.jobs import Jobs
from sandbox_gym.errors import BackendUnavailable, SandboxError
from sandbox_gym.network import Allow

from . import network

_BUFFER = 8 << 20  # bytes of orders that wait for the proxy
_PATIENCE = 1.0  # seconds that it may take no orders
_BATCH = 60  # descriptors that one message carries
_MOST_STARTS, _WITHIN = 5, 10.0  # so often in so many seconds, and no more: something ends it each time

Heard = Callable[[dict[str, Any]], object]


@dataclass(eq=False)
class Outlet:
    """What one sandbox reaches the outside by. `key`: the proxy's name for it."""

    gateway: Gateway
    key: int
    allow: Allow
    listeners: list[network.Listener]

    def inherit(self, other: Outlet | None) -> None:
        """The records of the sandbox that goes on as this one."""
        if other is not None:
            self.gateway.tell({"op": "inherit", "key": self.key, "of": other.key})

    def records(self, after: int, done: Heard) -> None:
        """`done` hears a page of what was tried, from number `after` on, or an error. Raises BackendUnavailable."""
        self.gateway.ask({"op": "records", "key": self.key, "after": after}, done)

    def addresses(self) -> set[bytes]:
        """Where its connections lead, as `sockets` has them."""
        return {network.own_address(one.sock) for one in self.listeners}

    def ends(self) -> tuple[network.End, ...]:
        """The same as texts and numbers."""
        return tuple(one.sock.getsockname()[:2] for one in self.listeners)

    def close(self) -> None:
        """Nothing goes through any more, and what is open ends. Idempotent."""
        if self.listeners:
            for listener in self.listeners:
                listener.sock.close()
            self.listeners = []
            self.gateway.forget(self)


class Gateway:
    def __init__(self, jobs: Jobs, place: network.Place = network.INSIDE) -> None:
        self.place = place
        self._jobs = jobs
        self._outlets: dict[int, Outlet] = {}
        self._count = 0
        self._orders: socket.socket | None = None
        self._pidfd = -1
        self._starts: deque[float] = deque(maxlen=_MOST_STARTS)
        self._asked: dict[int, Heard] = {}
        self._questions = 0

    @property
    def descriptors(self) -> int:
        """How many it holds."""
        return sum(len(outlet.listeners) for outlet in self._outlets.values())

    def open(self, netns_fd: int, allow: Allow) -> Outlet:
        """For the sandbox in that network namespace, or next to it. Raises OSError, BackendUnavailable."""
        self._start()
        listeners = network.inside(netns_fd, lambda: network.listen(allow, self.place))
        self._count += 1
        outlet = Outlet(self, self._count, allow, listeners)
        self._outlets[outlet.key] = outlet
        self._introduce(outlet)
        return outlet

    def forget(self, outlet: Outlet) -> None:
        self._outlets.pop(outlet.key, None)
        self.tell({"op": "close", "key": outlet.key})

    def ask(self, message: dict[str, Any], done: Heard) -> None:
        self._start()
        self._questions += 1
        self._asked[self._questions] = done
        self.tell({**message, "ticket": self._questions})

    def tell(self, message: dict[str, Any], fds: list[int] | None = None) -> None:
        """An order, which the proxy may be gone for by now: the next one hears what still matters from `_start`."""
        if self._orders is None:
            return
        try:
            protocol.send(self._orders, message, fds)
        except OSError:  # it has ended, or takes no orders any more, and ends by this; `_hear` learns of it
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _introduce(self, outlet: Outlet) -> None:
        for start in range(0, len(outlet.listeners), _BATCH):
            batch = outlet.listeners[start : start + _BATCH]
            message = {"op": "open", "key": outlet.key, "allow": outlet.allow.to_json()}
            message["listeners"] = [[one.kind, one.rule, one.port] for one in batch]
            self.tell(message, [one.sock.fileno() for one in batch])

    def _start(self) -> None:
        """Raises BackendUnavailable where it ends again and again, OSError."""
        if self._orders is not None:
            return
        now = time.monotonic()
        if len(self._starts) == _MOST_STARTS and now - self._starts[0] < _WITHIN:
            raise BackendUnavailable(
                f"the proxy of this process's sandboxes has ended {_MOST_STARTS} times in {_WITHIN:g} s: try again "
                "later, without network rules, or look at what kills it (memory?)"
            )
        self._starts.append(now)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            from .proxy import serve

            serve(theirs, self.place)
        theirs.close()
        self._pidfd = os.pidfd_open(pid)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        ours.settimeout(_PATIENCE)
        self._orders = ours
        self._jobs.loop.watch(ours.fileno(), self._hear)
        for outlet in self._outlets.values():
            self._introduce(outlet)

    def _hear(self) -> None:
        assert self._orders is not None
        try:
            message, _ = protocol.receive(self._orders)
        except (EOFError, OSError, ValueError):
            self._ended()
            return
        done = self._asked.pop(message.pop("ticket", 0), None)
        if done is not None:
            done(message)

    def _ended(self) -> None:
        """Another takes its place where something is to be served. Where none can, all is closed from now on."""
        assert self._orders is not None
        self._jobs.loop.unwatch(self._orders.fileno())
        self._orders.close()
        os.close(self._pidfd)
        self._orders, self._pidfd = None, -1
        self._jobs.reap()
        for done in self._asked.values():
            done(
                {
                    "error": "SandboxError",
                    "message": "the proxy, which has the records, was killed: ask again",
                }
            )
        self._asked.clear()
        if self._outlets:
            try:
                self._start()
            except (OSError, SandboxError):
                for outlet in list(self._outlets.values()):
                    outlet.close()
