"""Where templates lie: blobs by their hash, which templates share, and one manifest for each name.

Whoever gives a name to blobs, or takes one away with the blobs that no other needs, holds the lock; whoever reads holds
it while it opens them. What has no name yet is a draft, which nobody else sees.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import BinaryIO

from sandbox_gym import _home, archive
from sandbox_gym._drafts import Draft
from sandbox_gym._snapshot import Snapshot
from sandbox_gym.archive import Blob, Damaged, Manifest
from sandbox_gym.errors import SandboxTimeout

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_SUFFIX = ".json"
_LOCK_TIMEOUT = 30.0  # held only over renames
_STAMP = 76  # bytes of a manifest's file, up to the end of its hash
_ABANDONED = 86400.0  # seconds after which an unfinished file is nobody's


def default_folder() -> str:
    return _home.folder("templates")


def check_name(name: str) -> None:
    """Raises ValueError."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"a template's name is letters, digits, '.', '_' and '-', at most 100, not {name!r}")


class Store:
    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._blobs, self._names = os.path.join(folder, "blobs"), os.path.join(folder, "names")

    # ---- reading ------------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        try:
            files = os.listdir(self._names)
        except FileNotFoundError:
            return []
        return sorted(file.removesuffix(_SUFFIX) for file in files if not file.startswith("."))

    def stamp(self, name: str) -> bytes:
        """What changes when a template is built anew. Counts as a use of it. Raises KeyError."""
        with self._manifest(name) as file:
            os.utime(file.fileno(), ns=(time.time_ns(),) * 2)  # the kernel's own "now" is as coarse as 10 ms
            return file.read(_STAMP)

    def read(self, name: str) -> Manifest:
        """Raises KeyError, Damaged."""
        with self._manifest(name) as file:
            return Manifest.decode(file.read())

    def used(self, name: str) -> float:
        """When a template was used last, in seconds since the epoch. Raises KeyError."""
        with self._manifest(name) as file:
            return os.fstat(file.fileno()).st_mtime

    @contextmanager
    def opened(self, name: str) -> Iterator[tuple[Manifest, list[Blob]]]:
        """A template's parts, which are there to the end whatever is deleted meanwhile. Raises KeyError, Damaged."""
        with ExitStack() as stack:
            with self._locked(fcntl.LOCK_SH):
                manifest = self.read(name)
                blobs = []
                for part in manifest.parts:
                    try:
                        file = stack.enter_context(open(self._blob(part.sha256), "rb"))
                    except FileNotFoundError:
                        raise Damaged(f"its part {part.sha256[:12]} is missing") from None
                    if os.fstat(file.fileno()).st_size != part.stored_bytes:
                        raise Damaged(f"its part {part.sha256[:12]} is not what was written")
                    blobs.append(Blob(file, 0, part))
            yield manifest, blobs

    # ---- writing ------------------------------------------------------------------------------------------------

    def save(self, name: str, image: Snapshot, timeout: float) -> None:
        """Keeps a snapshot, which is files, under a name; in place of what had it. Raises SnapshotError, OSError."""
        self._make_folders()
        with ExitStack() as stack:
            drafts: list[Draft] = []

            def target() -> BinaryIO:
                drafts.append(stack.enter_context(Draft(self._blobs)))
                return drafts[-1].file

            manifest = archive.write_parts(image, target, name, timeout)
            listing = stack.enter_context(Draft(self._names))
            listing.file.write(manifest.encode())
            with self._locked(fcntl.LOCK_EX):
                for part, draft in zip(manifest.parts, drafts, strict=True):
                    draft.publish(self._blob(part.sha256))  # over the same, which mends one that was damaged
                listing.publish(self._file(name))
                self._drop_unneeded()

    def delete(self, name: str) -> None:
        """With the blobs that no other needs. Idempotent."""
        if os.path.isdir(self._names):
            with self._locked(fcntl.LOCK_EX):
                with suppress(FileNotFoundError):
                    os.unlink(self._file(name))
                self._drop_unneeded()

    def prune(self, max_bytes: int) -> list[str]:
        """Deletes those that were used least lately until the others' blobs are within bounds. Their names."""
        if not os.path.isdir(self._names):
            return []
        gone = []
        with self._locked(fcntl.LOCK_EX):
            for name in sorted(self.names(), key=self.used):
                if sum(self._needed().values()) <= max_bytes:
                    break
                os.unlink(self._file(name))
                gone.append(name)
            self._drop_unneeded()
        return gone

    def _needed(self) -> dict[str, int]:
        """The blobs of all names, and their bytes."""
        found = {}
        for name in self.names():
            with suppress(Damaged):  # nobody can use it, or what it needs
                found.update({part.sha256: part.stored_bytes for part in self.read(name).parts})
        return found

    def _drop_unneeded(self) -> None:
        needed = self._needed()
        for folder in (self._blobs, self._names):
            with os.scandir(folder) as entries:
                for entry in entries:
                    draft = entry.name.startswith(".")
                    abandoned = draft and time.time() - entry.stat().st_mtime > _ABANDONED
                    if abandoned or (folder == self._blobs and not draft and entry.name not in needed):
                        os.unlink(entry.path)

    # ---- folders and locks --------------------------------------------------------------------------------------

    def _file(self, name: str) -> str:
        check_name(name)
        return os.path.join(self._names, name + _SUFFIX)

    def _blob(self, digest: str) -> str:
        return os.path.join(self._blobs, digest)

    def _manifest(self, name: str) -> BinaryIO:
        _home.check_owner(self.folder)
        try:
            return open(self._file(name), "rb")
        except FileNotFoundError:
            raise KeyError(
                f"no template {name!r} in {self.folder}: there are {self.names() or 'none'}; "
                f"`sandbox-gym template build {name}` makes one"
            ) from None

    def _make_folders(self) -> None:
        _home.make(self.folder, self._blobs, self._names)
        _home.check_owner(self.folder)

    @contextmanager
    def _locked(self, kind: int) -> Iterator[None]:
        """Raises SandboxTimeout, SandboxError."""
        _home.check_owner(self.folder)
        fd = os.open(os.path.join(self.folder, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            deadline = time.monotonic() + _LOCK_TIMEOUT
            while True:
                try:
                    fcntl.flock(fd, kind | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise SandboxTimeout(
                            f"{self.folder}/lock was held by another process for {_LOCK_TIMEOUT:g} s"
                        ) from None
                    time.sleep(0.005)
            yield
        finally:
            os.close(fd)
