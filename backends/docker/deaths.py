"""Why containers have ended: the daemon says so once, as an event, since it removes them at once."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

from .daemon import Daemon
from .owners import RUN

_KEPT = 1000
_EVENTS = ("die", "oom")
_SIGKILL = 128 + 9
_JOIN = 5.0
_ORDER = 0.3  # seconds


class Deaths:
    """Listens in a thread of its own while this client runs. `ended` hears the id of each container that ends."""

    def __init__(self, daemon: Daemon, run: str, ended: Callable[[str], object]) -> None:
        self._daemon = daemon
        self._run = run
        self._ended = ended
        self._changed = threading.Condition()
        self._short_of_memory: set[str] = set()
        self._codes: dict[str, int] = {}
        self._order: deque[str] = deque()
        self._since = time.time() - 1.0
        self._socket: socket.socket | None = None
        self._closed = False
        self._thread: threading.Thread | None = None

    def listen(self) -> None:
        """Begins, or begins again where the daemon had gone. Idempotent. Raises SandboxError."""
        with self._changed:
            if self._closed or (self._thread is not None and self._thread.is_alive()):
                return
            wanted = {"label": [f"{RUN}={self._run}"], "type": ["container"], "event": _EVENTS}
            self._socket = self._daemon.events(since=self._since, filters=wanted)
            self._thread = threading.Thread(target=self._hear, args=(self._socket,), daemon=True)
            self._thread.start()

    def code(self, container: str, timeout: float) -> int | None:
        """Its exit code, once it has ended; None where nothing was heard in time."""
        with self._changed:
            self._changed.wait_for(lambda: container in self._codes or not self._hears(), timeout)
            return self._codes.get(container)

    def by_memory(self, container: str) -> bool:
        """Whether something in it was killed by its memory limit, once it has ended. The two are told in any order."""
        with self._changed:
            killed = self._codes.get(container) == _SIGKILL
            self._changed.wait_for(lambda: container in self._short_of_memory, _ORDER if killed else 0)
            return container in self._short_of_memory

    def close(self) -> None:
        """Idempotent."""
        with self._changed:
            self._closed = True
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)
        if self._thread is not None:
            self._thread.join(_JOIN)

    def _hears(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _hear(self, sock: socket.socket) -> None:
        try:
            with sock, sock.makefile("rb") as lines:
                for line in lines:
                    self._take(json.loads(line))
        except OSError:  # the daemon has gone: see `listen`
            pass
        finally:
            with self._changed:
                self._changed.notify_all()

    def _take(self, event: dict[str, object]) -> None:
        actor = event["Actor"]
        assert isinstance(actor, dict)
        container = str(actor["ID"])
        with self._changed:
            self._since = float(str(event["timeNano"])) / 1e9
            if event["Action"] == "oom":
                self._short_of_memory.add(container)
                self._changed.notify_all()
                return
            self._codes[container] = int(actor["Attributes"].get("exitCode", 0))
            self._order.append(container)
            if len(self._order) > _KEPT:
                old = self._order.popleft()
                self._codes.pop(old, None)
                self._short_of_memory.discard(old)
            self._changed.notify_all()
        self._ended(container)
