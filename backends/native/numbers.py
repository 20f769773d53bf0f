"""Inode numbers of layers, so that no two files of one sandbox have the same.

Each btrfs subvolume counts its inodes from 256 on, and overlayfs shows those of all layers as of one device: two files
from two layers would look like one, to cp(1), mv(1) and whoever else compares device and inode. So a layer that comes
to lie on others is a snapshot of an empty subvolume that has counted further than they have; a snapshot goes on from
there.
"""

from __future__ import annotations

import os
from collections.abc import Callable

FIRST = 256  # what a new subvolume begins with
_APART = (
    64  # from one start to the next: a layer that makes fewer files leaves the next ones fit to lie on it
)


class Numbers:
    """`make_subvolume(name)` makes one. Counting costs 8 us a number."""

    def __init__(self, folder: str, make_subvolume: Callable[[str], None]) -> None:
        make_subvolume("numbers")
        self._folder = f"{folder}/numbers"
        self.fd = os.open(self._folder, os.O_RDONLY)  # of the subvolume to take a snapshot of
        self._last = FIRST

    def reach(self, above: int) -> int:
        """Counts past `above`, and past what was reached before; what a snapshot taken now starts with."""
        goal = max(above, self._last + _APART)
        while self._last < goal:
            self._last = highest(self._folder)
        # The last one stays, or a snapshot, which looks for the highest that is there, would start lower.
        marker = os.open(f"{self._folder}/new", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._last = os.fstat(marker).st_ino
        os.close(marker)
        os.rename(f"{self._folder}/new", f"{self._folder}/last")
        return self._last


def highest(folder: str) -> int:
    """An inode number above all others in a subvolume. Raises OSError."""
    fd = os.open(folder, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        return os.fstat(fd).st_ino
    finally:
        os.close(fd)
