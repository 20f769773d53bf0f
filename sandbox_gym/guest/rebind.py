"""Whether this process is a copy whose memory still is of its origin's mounts, and the end of that.

A copy is a clone: what it has mapped of files (the interpreter, its libraries, the link /proc/self/exe) is still of
the mounts of the process that was cloned, which no look-up in its own mount namespace finds. That harms nothing until
CRIU is to dump it, or a child of it. `remap` does the work; it is loaded where it is needed, since a guest compiles all
that it imports.
"""

from __future__ import annotations

import os
import time

_started = time.time()
_stale = False
_hooked = False


def mark_stale() -> None:
    """Every copy of this process will need `rebind`. For the copier, which calls this before the clone: what a copy
    writes itself costs it a page.
    """
    global _stale, _hooked
    if not _hooked:
        os.register_at_fork(before=_before_fork)  # the copier's own clone calls no such hook
        _hooked = True
    _stale = True


def needs_rebind() -> bool:
    """Whether this process is a copy, or a child of one, in which `rebind` has not succeeded yet."""
    return _stale


def rebind() -> None:
    """Maps every file in this process's memory again, from its own root. What the memory holds stays as it is.

    Raises:
        OSError: as `remap.remap` does.
    """
    global _stale
    from .remap import remap

    remap(_started)
    _stale = False


def _before_fork() -> None:
    """A child inherits the mappings, and nobody could call `rebind` in it."""
    if _stale:
        rebind()
