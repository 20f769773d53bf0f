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
        vmas = [value for number, value in rpc.fields(entry) if number == _VMAS]
        if any(map(_is_large, vmas)):
            entry = rpc.join((n, _uncounted(v) if n == _VMAS else v) for n, v in rpc.fields(entry))
            path.write_bytes(block[:8] + struct.pack("<I", len(entry)) + entry)


def _is_large(vma: bytes) -> bool:
    fields = rpc.fields(vma)
    (first, start), (second, end) = next(fields), next(fields)  # in order of their numbers
    return (first, second) == (_START, _END) and end - start >= _FROM_BYTES


def _uncounted(vma: bytes) -> bytes:
    if not _is_large(vma):
        return vma
    entry = dict(rpc.fields(vma))
    if entry[_PROT] == 0 and entry[_FLAGS] & _UNNAMED == _UNNAMED:
        entry[_FLAGS] |= _MAP_NORESERVE
    return rpc.message(entry)
