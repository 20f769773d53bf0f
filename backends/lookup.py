"""Backends by name. Each is made once a process, on first use; a forked child makes its own."""

from __future__ import annotations

import importlib
import os
import threading

from sandbox_gym.api import Backend

_PATHS = {
    "docker": "sandbox_gym.backends.docker.client:DockerBackend",
    "native": "sandbox_gym.backends.native.client:NativeBackend",
}
_made: dict[tuple[int, str], Backend] = {}
_lock = threading.Lock()


def get(name: str, *, failed: Backend | None = None) -> Backend:
    """`failed`: one whose supervisor turned out to be gone, not to be given again.

    Raises ValueError for an unknown name, BackendUnavailable where the machine can't do it.
    """
    if name not in _PATHS:
        raise ValueError(f"no backend {name!r}: choose from {', '.join(sorted(_PATHS))}")
    with _lock:
        key = os.getpid(), name
        made = _made.get(key)
        if made is not None and (made is failed or not made.alive()):
            _made.pop(
                key
            ).close()  # its supervisor was killed: what that left is cleared, and the next one starts
        if key not in _made:
            module, _, attribute = _PATHS[name].partition(":")
            _made[key] = getattr(importlib.import_module(module), attribute)()
        return _made[key]


def shut_down() -> None:
    """Ends every backend of this process and all their sandboxes, and waits until they are gone."""
    with _lock:
        for key in [key for key in _made if key[0] == os.getpid()]:
            _made.pop(key).close()
