"""Steps through a folder of files that an archive made: by descriptors, never through a link without looking at it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Container, Sequence

from .tar import Damaged

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
MOST_PATH = 4095  # bytes of a path from the root, which then every system call takes whole
_MOST_LINKS = 40  # on the way to one file, as in the kernel


def names(path: bytes) -> list[bytes]:
    """A path's parts, for what has to stay below the root. Raises Damaged for a path that would lead out of it."""
    parts = [part for part in path.split(b"/") if part not in (b"", b".")]
    if path.startswith(b"/") or b".." in parts:
        raise Damaged(f"the path {show(path)}, which leads out of the image")
    if b"\0" in path or len(path) > MOST_PATH:
        raise Damaged(f"the path {show(path)}, which no file can have")
    return parts


def join(folder: bytes, name: bytes) -> bytes:
    return folder + b"/" + name if folder else name


def show(path: bytes) -> str:
    return repr(path[:200].decode(errors="backslashreplace"))


def into(fd: int, name: bytes) -> int:
    """A descriptor of the folder `name` in `fd`, in place of that."""
    found = os.open(name, FOLDER, dir_fd=fd)
    os.close(fd)
    return found


def resolve(
    root: int, parts: Sequence[bytes], missing: Callable[[int, bytes, bytes], None]
) -> tuple[bytes, int]:
    """The folder that a path below the open folder `root` means, as a process sees it that has `root` as its /: its
    path without links, and a descriptor. `missing(folder, name, path)` is to make a folder that is not there, perhaps
    with a file in its place, or to raise.

    Raises Damaged where a link leads out of the root.
    """
    waiting, links = list(reversed(parts)), 0
    real: list[bytes] = []
    here = os.dup(root)
    try:
        while waiting:
            name = waiting.pop()
            if name == b"..":
                if not real:
                    raise Damaged(
                        f"the path {show(b'/'.join(parts))}, which leads out of the image by a link"
                    )
                real.pop()
                here = into(here, b"..")
                continue
            path = b"/".join([*real, name])
            if len(path) > MOST_PATH:
                raise Damaged(f"the path {show(path)}, which no file can have")
            try:
                here = into(here, name)
            except FileNotFoundError:
                missing(here, name, path)
                here = into(here, name)
            except NotADirectoryError:
                links += 1
                target = _target(here, name)
                if target is None:
                    missing(here, name, path)
                    target = name
                if links > _MOST_LINKS or len(waiting) > MOST_PATH:
                    raise Damaged(f"the path {show(path)}: too many links") from None
                if target.startswith(b"/"):
                    real.clear()
                    os.close(here)
                    here = os.dup(root)
                waiting += reversed([part for part in target.split(b"/") if part not in (b"", b".")])
                continue
            real.append(name)
    except BaseException:
        os.close(here)
        raise
    return b"/".join(real), here


def _target(folder: int, name: bytes) -> bytes | None:
    """Where a link leads; None for what is none."""
    try:
        return os.readlink(name, dir_fd=folder)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return None


def clear(
    folder: int,
    path: bytes = b"",
    keep: Container[bytes] = (),
    gone: Callable[[bytes], object] = lambda path: None,
) -> None:
    """Removes what is in an open folder, whatever its modes and however deep, but not the paths in `keep`: what is kept
    has its folders kept too. `path`: that folder's own, before each of theirs; `gone` hears of each folder removed.
    """
    here = os.dup(folder)
    try:
        way = [(path, _sweep(here, path, keep))]
        while way:
            path, below = way[-1]
            if below:
                child = join(path, below[-1])
                here = into(here, below.pop())
                way.append((child, _sweep(here, child, keep)))
                continue
            way.pop()
            if way:
                here = into(here, b"..")
                if path not in keep:
                    os.rmdir(path.rpartition(b"/")[2], dir_fd=here)
                    gone(path)
    finally:
        os.close(here)


def _sweep(folder: int, path: bytes, keep: Container[bytes]) -> list[bytes]:
    """Removes what is no folder, and returns the names of those, ready to be entered."""
    with os.scandir(folder) as entries:
        found = [(os.fsencode(entry.name), entry.is_dir(follow_symlinks=False)) for entry in entries]
    below = []
    for name, is_folder in found:
        if is_folder:
            os.chmod(name, 0o700, dir_fd=folder)
            below.append(name)
        elif join(path, name) not in keep:
            os.unlink(name, dir_fd=folder)
    return below
