"""One budget of memory and disk for all sandboxes and snapshots of this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from sandbox_gym import _snapshot
from sandbox_gym._snapshot import Snapshot
from sandbox_gym.api import Backend, parse_bytes
from sandbox_gym.backends import lookup
from sandbox_gym.errors import BudgetExceeded, SandboxError

_TIMEOUT = 60.0
_PATIENCE = 0.5  # seconds that the memory of what has just been deleted may take to be free
_T = TypeVar("_T")
_STUCK = (
    "no snapshot can be put on disk, since what each holds is needed by sandboxes and snapshots that came from it. "
    "Delete snapshots and terminate sandboxes"
)
_lock = threading.Lock()  # one thread at a time makes room
_evict = False


def set_budget(
    memory: int | str | None = None,
    disk: int | str | None = None,
    *,
    evict: bool = False,
    backend: str = "native",
) -> None:
    """Bounds what all sandboxes and snapshots of this process hold together (bytes, or "8Gi"; None is no bound).

    It is looked at before a sandbox or snapshot is made, which then raises BudgetExceeded. What lives may still grow,
    up to its own limits. With `evict`, where memory is short the snapshots that were used least lately go to disk
    first: a frozen process becomes an image, which takes 0.2 s and longer, as does its restore. That can be done with
    one that nothing hangs from, neither a running sandbox nor a snapshot taken in one: the snapshots of a sandbox that
    goes on hang from each other. Needs root. Ends with the process's supervisor.

    Raises:
        BackendUnavailable: nothing counts that memory or disk here.
    """
    global _evict
    sizes = {"memory": memory, "disk": disk}
    parsed = {what: None if size is None else parse_bytes(size) for what, size in sizes.items()}
    lookup.get(backend).set_budget(**parsed)
    _evict = evict


def within(backend: Backend, make: Callable[[], _T]) -> _T:
    """`make`, again and again while it is over the budget and a snapshot can be put on disk."""
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            return make()
        except BudgetExceeded as error:
            if time.monotonic() < deadline:
                time.sleep(_PATIENCE / 50)
                continue
            if not _evict or "bytes of memory" not in str(error):
                raise
            if not _make_room(backend):
                held = str(error).partition(":")[0]
                raise BudgetExceeded(f"{held}: {_STUCK}") from None
        deadline = time.monotonic() + _PATIENCE


def _make_room(backend: Backend) -> bool:
    with _lock:
        for snapshot in sorted(_snapshot.held(backend), key=lambda snapshot: snapshot.used_at):
            if snapshot.engine == "fork" and _put_on_disk(backend, snapshot):
                return True
    return False


def _put_on_disk(backend: Backend, snapshot: Snapshot) -> bool:
    try:
        if backend.usage(snapshot.id)["children"]:  # it would stay in memory for their sake
            return False
        backend.put_on_disk(snapshot.id, timeout=_TIMEOUT)
    except SandboxError:  # deleted meanwhile, or criu can't: another may do
        return False
    snapshot.engine, snapshot.why = "criu", f"put on disk to keep the memory budget; before: {snapshot.why}"
    return True
