"""Files that are there whole or not at all, also when their writer is killed."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from typing import BinaryIO


class Draft:
    """A file in `folder` without a name, until it gets one. A context manager: what has none by then is gone.

    Readable by its owner alone. On a file system that has no such files it is a hidden one, which a writer that is
    killed leaves behind.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._temporary = os.path.join(folder, f".{secrets.token_hex(8)}.part")
        flags = os.O_RDWR | os.O_CLOEXEC
        try:
            fd = os.open(folder, flags | os.O_TMPFILE, 0o600)
            self._named = False
        except OSError as error:
            # EISDIR: the flag is unknown, and what is left of it asks for a folder.
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR):
                raise
            fd = os.open(self._temporary, flags | os.O_CREAT | os.O_EXCL, 0o600)
            self._named = True
        self.file: BinaryIO = open(fd, "w+b")

    def publish(self, path: str) -> None:
        """Gives it a name in the same file system, in place of what has that name."""
        self.file.flush()
        if not self._named:
            fd = self.file.fileno()
            # Without a folder's descriptor, which an absolute path ignores, Python calls link(2), which would link the
            # link in /proc itself.
            os.link(f"/proc/self/fd/{fd}", self._temporary, src_dir_fd=fd)
            self._named = True
        os.replace(self._temporary, path)
        self._named = False

    def close(self) -> None:
        self.file.close()
        if self._named:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._temporary)

    def __enter__(self) -> Draft:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
