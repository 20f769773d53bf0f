"""Where unpacked images lie, each in a folder that its digest names: of any number of processes, at once.

Whoever unpacks one does that in a draft and holds a lock on it, for which others wait; the draft gets its name when all
is there, with what is in it on disk. A lock ends with its process, and what a draft without one holds is thrown away.
Whoever runs sandboxes of an image holds a lock that is shared; an image under such a lock is not deleted.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from sandbox_gym import _home
from sandbox_gym.errors import BackendUnavailable
from sandbox_gym.guest.syscalls import libc

from . import deadline
from .trees import FOLDER, clear

# Of an image's folder, the one that is the sandbox's /: an overlay of any user can show it, without redirects.
ROOT = ".root"
_RECORD = "image.json"
_PATIENCE = 5.0  # seconds for a lock that is held over a rename


def default() -> Store:
    return Store(_home.folder("images"))


class Store:
    def __init__(self, folder: str) -> None:
        self.folder = folder

    def root(self, digest: str) -> str:
        """The path of an image's root file system, whether it is there or not."""
        return os.path.join(self.folder, digest, ROOT)

    def digests(self) -> list[str]:
        """Of what is there, whole."""
        try:
            return sorted(name for name in os.listdir(self.folder) if not name.startswith("."))
        except FileNotFoundError:
            return []

    def record(self, digest: str) -> dict[str, Any] | None:
        """What was said of an image when it was added; None where it is not there. Raises SandboxError."""
        _home.check_owner(self.folder)
        try:
            with open(os.path.join(self.folder, digest, _RECORD), "rb") as file:
                found = json.load(file)
        except FileNotFoundError:
            return None
        assert isinstance(found, dict)
        return found

    def used(self, digest: str) -> float:
        """When it was added or asked for last, in seconds since the epoch; 0 where it is gone."""
        try:
            return os.stat(os.path.join(self.folder, digest, _RECORD)).st_mtime
        except FileNotFoundError:
            return 0.0

    def touch(self, digest: str) -> None:
        with suppress(FileNotFoundError):
            os.utime(os.path.join(self.folder, digest, _RECORD))

    def add(self, digest: str, fill: Callable[[int], dict[str, Any]], until: float) -> dict[str, Any]:
        """An image's record. Where it is not there, `fill` is given the descriptor of an empty folder, puts its root
        file system there, and returns the record. Raises what `fill` does, SandboxTimeout, SandboxError, OSError.
        """
        _home.make(self.folder)
        while (record := self.record(digest)) is None:
            with self._draft(digest, until) as draft:
                if draft is None:
                    continue  # another process has finished it, or given up
                os.mkdir(ROOT, 0o700, dir_fd=draft)
                root = os.open(ROOT, FOLDER, dir_fd=draft)
                try:
                    record = fill(root)
                finally:
                    os.close(root)
                with open(
                    _RECORD, "x", opener=lambda name, flags: os.open(name, flags, 0o600, dir_fd=draft)
                ) as file:
                    json.dump(record, file)
                # A machine that stops now must not find names without content.
                if libc.syncfs(draft):
                    raise OSError("an image could not be written to disk")
                os.rename(self._draft_path(digest), os.path.join(self.folder, digest))
        self.touch(digest)
        return record

    def delete(self, digest: str) -> bool:
        """Whether it is gone: not while any process has sandboxes of it."""
        _home.check_owner(self.folder)
        path = os.path.join(self.folder, digest)
        return self._take_away(path) if os.path.isdir(path) else True

    def sweep(self) -> None:
        """Removes what killed processes have left half made, or half removed."""
        _home.check_owner(self.folder)
        with suppress(FileNotFoundError):
            for name in os.listdir(self.folder):
                if name.startswith("."):
                    self._take_away(os.path.join(self.folder, name))

    def _take_away(self, path: str) -> bool:
        """Removes a folder that nobody has a lock on. Whether it is gone."""
        try:
            fd = os.open(path, FOLDER)
        except FileNotFoundError:
            return True
        try:
            if not _lock(fd, fcntl.LOCK_EX):
                return False
            away = os.path.join(self.folder, f".{secrets.token_hex(8)}")
            with suppress(FileNotFoundError):
                if os.path.samestat(os.stat(path), os.fstat(fd)):
                    os.rename(path, away)
                    clear(fd)
                    os.rmdir(away)
        finally:
            os.close(fd)
        return True

    def _draft_path(self, digest: str) -> str:
        return os.path.join(self.folder, f".{digest}")

    @contextmanager
    def _draft(self, digest: str, until: float) -> Iterator[int | None]:
        """The descriptor of an image's empty draft, locked; None when it came to an end while this waited for it."""
        path = self._draft_path(digest)
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)
        try:
            fd = os.open(path, FOLDER)
        except FileNotFoundError:
            yield None
            return
        try:
            while not _lock(fd, fcntl.LOCK_EX):
                deadline.check(until)
                time.sleep(0.02)
            if not _is_at(fd, path):
                yield None
                return
            clear(fd)
            try:
                yield fd
            except BaseException:
                clear(fd)
                os.rmdir(path)
                raise
        finally:
            os.close(fd)


def hold(root: str) -> int:
    """A descriptor that keeps an image, whose root file system this is, from being deleted while it is open. Raises
    BackendUnavailable.
    """
    path = os.path.dirname(root)
    until = time.monotonic() + _PATIENCE
    while True:
        try:
            fd = os.open(path, FOLDER)
        except FileNotFoundError:
            break
        if _lock(fd, fcntl.LOCK_SH) and _is_at(fd, path):
            os.utime(_RECORD, dir_fd=fd)  # a use of it
            return fd
        os.close(fd)
        if time.monotonic() > until:
            break
        time.sleep(0.005)
    raise BackendUnavailable(f"the image in {path} was deleted: make it again, as by Image.from_oci_archive")


def _lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(fd: int, path: str) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except FileNotFoundError:
        return False
