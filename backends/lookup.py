"""Backends by name. Each is made once a process, on first use; a forked child makes its own."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import os
import threading
from collections.abc import Callable
from typing import Any

from sandbox_gym.api import Backend, Deviation
from sandbox_gym.errors import BackendUnavailable

BUILT_IN = {
    "native": "sandbox_gym.backends.native.client:NativeBackend",
    "docker": "sandbox_gym.backends.docker.client:DockerBackend",
    "gvisor": "sandbox_gym.backends.gvisor.client:GvisorBackend",
}
ENTRY_POINTS = "sandbox_gym.backends"  # the group in which other packages name theirs
_made: dict[tuple[int, str], Backend] = {}
_lock = threading.Lock()


def get(name: str, *, failed: Backend | None = None) -> Backend:
    """The backend of that name, with an option after a colon if it takes one ("docker:runsc"): one for each process,
    name and option. `failed`: one whose supervisor turned out to be gone, not to be given again.

    Raises ValueError for an unknown name or option, BackendUnavailable where the machine can't do it.
    """
    with _lock:
        key = os.getpid(), name
        made = _made.get(key)
        if made is not None and (made is failed or not made.alive()):
            _made.pop(
                key
            ).close()  # its supervisor was killed: what that left is cleared, and the next one starts
        if key not in _made:
            _made[key] = _maker(name)()
        return _made[key]


def names() -> list[str]:
    """All that `get` knows: those built in, and those that installed packages name."""
    return sorted({*BUILT_IN, *_entry_points()})


def factory(name: str) -> Any:
    """What makes the backend of that name (its option is not looked at): imported, with nothing started.

    Raises ValueError for an unknown name, BackendUnavailable where its package can't be imported.
    """
    plain = name.partition(":")[0]
    if plain in BUILT_IN:  # which no entry point replaces
        module, _, attribute = BUILT_IN[plain].partition(":")
        return getattr(importlib.import_module(module), attribute)
    found = _entry_points().get(plain)
    if found is None:
        raise ValueError(f"no backend {name!r}: choose from {', '.join(names())}")
    try:
        return found.load()
    except Exception as error:  # whatever a module of somebody else's raises
        package = found.dist.name if found.dist is not None else "a package"
        raise BackendUnavailable(
            f"backend {plain!r} can't be imported: {type(error).__name__}: {error}; mend or uninstall {package}"
        ) from error


def deviations(name: str) -> tuple[Deviation, ...]:
    """What that backend declares not to do; nothing is started. Raises what `factory` does."""
    return tuple(factory(name).deviations)


def _maker(name: str) -> Callable[[], Backend]:
    plain, colon, option = name.partition(":")
    made = factory(name)
    if not colon:
        return made  # type: ignore[no-any-return]
    try:
        inspect.signature(made).bind(option=option)
    except TypeError:
        raise ValueError(f"backend {plain!r} takes no option: write {plain!r}, not {name!r}") from None
    return lambda: made(option=option)


def _entry_points() -> dict[str, importlib.metadata.EntryPoint]:
    """Of a name that two packages give, the first on sys.path counts, as of two modules."""
    found: dict[str, importlib.metadata.EntryPoint] = {}
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
        found.setdefault(entry.name, entry)
    return found


def shut_down() -> None:
    """Ends every backend of this process and all their sandboxes, and waits until they are gone."""
    with _lock:
        for key in [key for key in _made if key[0] == os.getpid()]:
            _made.pop(key).close()
