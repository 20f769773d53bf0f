"""Stops sandboxes that nobody has called for a while: one thread, started with the first that asks for it."""

from __future__ import annotations

import threading
import time
import weakref
from typing import Any

_changed = threading.Condition()
# sandbox -> (timeout, last used)
_watched: weakref.WeakKeyDictionary[Any, tuple[float, float]] = weakref.WeakKeyDictionary()
_thread: threading.Thread | None = None


def watch(sandbox: Any, timeout: float) -> None:
    global _thread
    with _changed:
        _watched[sandbox] = (timeout, time.monotonic())
        if _thread is None or not _thread.is_alive():
            _thread = threading.Thread(target=_run, name="sandbox-gym-idle", daemon=True)
            _thread.start()
        _changed.notify()


def touch(sandbox: Any) -> None:
    """A call has just ended."""
    if _watched:
        with _changed:
            if sandbox in _watched:
                _watched[sandbox] = (_watched[sandbox][0], time.monotonic())


def forget(sandbox: Any) -> None:
    with _changed:
        _watched.pop(sandbox, None)


def _run() -> None:
    while True:
        with _changed:
            now = time.monotonic()
            due = [sandbox for sandbox, (timeout, used) in _watched.items() if used + timeout <= now]
            if not due:
                ends = [used + timeout for timeout, used in _watched.values()]
                _changed.wait(min(ends) - now if ends else None)
                continue
        for sandbox in due:
            _stop(sandbox)


def _stop(sandbox: Any) -> None:
    # A call is under way, which is use; others must not wait for it.
    if not sandbox._lock.acquire(blocking=False):
        touch(sandbox)
        return
    try:
        timeout, used = _watched.get(sandbox, (0.0, float("inf")))
        if used + timeout <= time.monotonic():
            sandbox._stop_idle()
            touch(sandbox)
    finally:
        sandbox._lock.release()
