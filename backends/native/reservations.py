"""Address space that a guest has only reserved, so that an image of it can be restored.

Allocators and just-in-time compilers reserve many gigabytes that nobody may touch (PROT_NONE): the kernel counts none
of it. Where a process and its child have such an area, criu makes it writable first, and that counts: the kernel
refuses one of more than the machine has memory and swap ("Unable to map ANON_VMA"), as each Chromium has them. With
MAP_NORESERVE it is not counted, then as little as before.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

from . import rpc

_FROM_BYTES = 1 << 30  # smaller ones fit any machine that sandboxes run on
_START, _END, _PROT, _FLAGS = 1, 2, 5, 6  # of a vma_entry (criu/images/vma.proto)
_NO_ACCESS = bytes([_PROT << 3, 0, _FLAGS << 3])  # as it is encoded: fields are in order
_VMAS = 14  # of an mm_entry (criu/images/mm.proto)
_UNNAMED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_MAP_NORESERVE = 0x4000
_HEAD = struct.Struct("<8xI")  # two magic numbers, and the length of the one message


def uncount(folder: Path) -> None:
    """Of an image that criu has just written. Raises OSError, ValueError."""
    for path in folder.glob("mm-*.img"):
        block = path.read_bytes()
        (length,) = _HEAD.unpack_from(block)
        entry = block[_HEAD.size : _HEAD.size + length]
        reserved = [value for number, value in rpc.fields(entry) if number == _VMAS and _is_reserved(value)]
        for vma in reserved:  # each is there once: no two begin at one place
            uncounted = dict(rpc.fields(vma))
            uncounted[_FLAGS] |= _MAP_NORESERVE
            entry = entry.replace(rpc.message({_VMAS: vma}), rpc.message({_VMAS: rpc.message(uncounted)}))
        if reserved:
            path.write_bytes(block[:8] + struct.pack("<I", len(entry)) + entry)


def _is_reserved(vma: bytes) -> bool:
    if _NO_ACCESS not in vma:  # most are not, and a browser has thousands
        return False
    entry = dict(rpc.fields(vma))
    is_unnamed: bool = entry[_FLAGS] & _UNNAMED == _UNNAMED
    is_large: bool = entry[_END] - entry[_START] >= _FROM_BYTES
    return entry[_PROT] == 0 and is_unnamed and is_large
