"""The warmed guest that lanes are copies of, and copies of it made ahead for the episodes to come."""

from __future__ import annotations

import os
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Any

from sandbox_gym._snapshot import Snapshot
from sandbox_gym.errors import SandboxError
from sandbox_gym.guest import wire
from sandbox_gym.hosting import Remote, make, plain
from sandbox_gym.sandbox import Sandbox

_BATCH = 8  # copies that the background thread asks for at once
_MOST_RETIRED = 64  # sandboxes that wait for their end
_KEPT = 4  # warmed guests that wait for another vector environment of the same kind


class Warm:
    """A guest that has imported and made its environment, frozen; and what the host knows of that environment."""

    def __init__(self, snapshot: Snapshot, remote: Remote) -> None:
        self.snapshot = snapshot
        self.remote = remote

    @property
    def alive(self) -> bool:
        """False once its supervisor is gone."""
        return not self.snapshot.deleted and self.snapshot._backend.alive()


_kept: OrderedDict[tuple[Any, ...], Warm] = OrderedDict()
_kept_lock = threading.Lock()


def warm(request: dict[str, Any], how: dict[str, Any], *, timeout: float, anew: bool = False) -> Warm:
    """The warmed guest for a MAKE `request` in a `Sandbox.create(**how)`: made now, or, unless `anew`, kept.

    A few are kept until the process ends: starting Python and importing the environment is most of what making
    a vector environment costs.
    """
    meta, buffers = wire.encode(plain(request, "env_kwargs"))
    key = (
        os.getpid(),
        meta,
        b"".join(map(bytes, buffers)),
        repr(sorted(how.items())),
        tuple(sys.path),
        os.getcwd(),
    )
    with _kept_lock:
        found = _kept.pop(key, None)
    if found is None or anew or not found.alive:
        box = Sandbox.create(**how)
        try:
            remote = Remote(make(box, request, timeout=timeout))
            found = Warm(box.freeze(), remote)
        except BaseException:
            box.terminate()
            raise
    with _kept_lock:
        _kept[key] = found
        while len(_kept) > _KEPT:
            _kept.popitem(last=False)  # the snapshot goes with its last handle
    return found


def forget() -> None:
    """Lets the kept guests go: those that no vector environment uses end."""
    with _kept_lock:
        _kept.clear()


class Spares:
    """Running copies of a snapshot that nobody has used yet: `target` of them, made again in the background."""

    def __init__(self, snapshot: Snapshot, target: int) -> None:
        self._snapshot = snapshot
        self._target = target
        self._ready: deque[Sandbox] = deque()
        self._retired: list[Sandbox] = []
        self._changed = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    def take(self, n: int) -> list[Sandbox]:
        """`n` copies: what is ready, and the rest made now. Raises what `Sandbox.restore_many` does."""
        with self._changed:
            taken = [self._ready.popleft() for _ in range(min(n, len(self._ready)))]
            self._wake()
        if len(taken) < n:
            try:
                taken += Sandbox.restore_many(self._snapshot, n - len(taken))
            except BaseException:
                self.retire(taken)
                raise
        return taken

    def retire(self, boxes: Sequence[Sandbox]) -> None:
        """Ends sandboxes in the background; here, where that falls behind: they count among the living until they are
        gone.
        """
        with self._changed:
            self._retired += boxes
            late, self._retired = self._retired[:-_MOST_RETIRED], self._retired[-_MOST_RETIRED:]
            self._wake()
        _end(late)

    def close(self) -> None:
        """Ends every copy that nobody took, and those retired. Idempotent; returns when they are gone."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()
        _end([*self._ready, *self._retired])
        self._ready.clear()
        self._retired.clear()

    def _wake(self) -> None:
        if self._closed:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="sandbox-gym-spares", daemon=True)
            self._thread.start()
        self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._closed and not self._retired and len(self._ready) >= self._target:
                    self._changed.wait()
                if self._closed:
                    return
                retired, self._retired = self._retired, []
                missing = min(_BATCH, self._target - len(self._ready))
            try:
                made = Sandbox.restore_many(self._snapshot, missing) if missing > 0 else []
            except SandboxError:  # `take` meets the same error, and tells its caller
                made = []
            with self._changed:
                self._ready += made
                if missing > 0 and not made:
                    self._target = 0
            _end(retired)


def _end(boxes: Sequence[Sandbox]) -> None:
    """Terminates them, and waits for all at the same time: a guest ends by itself when its connection does."""
    for box in boxes:
        box._live.channel.interrupt()
    for box in boxes:
        box.terminate()
