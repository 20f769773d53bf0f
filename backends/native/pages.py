"""What criu has written of a task's memory: the file of pages, and which of them it leaves to others to bring."""

from __future__ import annotations

import ctypes
import errno
import os
import struct

from . import rpc
from .areas import Area, Areas

PAGE = 4096
MOST = 1 << 20  # bytes loaded at once
_PE_LAZY = 2  # criu/include/pagemap.h


class Pages:
    """The file that holds a task's pages, and a buffer that the kernel copies from."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._block = bytearray(MOST)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._block))

    def load(self, offset: int, length: int) -> None:
        """Fills the buffer's start. Raises OSError."""
        view = memoryview(self._block)[:length]
        if os.preadv(self._fd, [view], offset) != length:
            raise OSError(errno.EIO, "an image's pages break off")


def read_image(folder: int, pid: int) -> tuple[Pages, Areas]:
    """A task's pages that criu leaves out. Raises OSError, ValueError."""
    head, *entries = _messages(_read(folder, f"pagemap-{pid}.img"))
    offset = 0
    areas: list[Area] = []
    for entry in entries:
        start, size = entry[1], (entry.get(5) or entry[2]) * PAGE  # 5: from criu 4.2 on
        if entry.get(4, 0) & _PE_LAZY:
            areas.append((start, start + size, offset))
        offset += size
    fd = os.open(f"pages-{head[1]}.img", os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)
    return Pages(fd), Areas(areas)


def _read(folder: int, name: str) -> bytes:
    with open(os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder), "rb") as file:
        return file.read()


def _messages(image: bytes) -> list[dict[int, int]]:
    """What an image consists of: two magic numbers, and messages with their lengths before them."""
    found, place = [], 8
    while place < len(image):
        (length,) = struct.unpack_from("I", image, place)
        place += 4
        found.append(dict(rpc.fields(image[place : place + length])))
        place += length
    return found
