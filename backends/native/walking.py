"""Steps through folders that a guest made: one at a time, since it may nest them deeper than any path can name.

Each step gives a descriptor in place of the one before, which it closes; on failure that stays open.
"""

from __future__ import annotations

import errno
import os

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def into(fd: int, name: str) -> int:
    """To the folder `name` in `fd`; never through a link."""
    found = os.open(name, FOLDER, dir_fd=fd)
    os.close(fd)
    return found


def back(fd: int, inode: int) -> int:
    """To the folder that `fd` lies in, which is to be `inode`: whoever can move folders meanwhile could lead a walk to
    another sandbox's. Raises OSError (ESTALE).
    """
    found = os.open("..", FOLDER, dir_fd=fd)
    if os.fstat(found).st_ino != inode:
        os.close(found)
        raise OSError(errno.ESTALE, "a layer's folder was moved while the layer was read")
    os.close(fd)
    return found
