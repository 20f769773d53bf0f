"""A list of system calls made in one go, without a step of Python between them.

A copy pays a page fault (2.5 us on a virtual machine) for each page it touches first, and a Python call touches about
20 of them: moving in step by step cost a copy more than its clone. So the calls are laid out before the clone, and the
copy runs through them in 99 bytes of machine code:

    struct call { long nr, a, b, c, d, e; };
    long run(const struct call *calls, long n, long clone_nr) {
      for (long i = 0; i < n; i++) {
        long r = syscall(calls[i]);
        if (calls[i].nr == clone_nr) { if (r) return r < 0 ? -((i << 12) | -r) : r; }
        else if (r < 0) return -((i << 12) | -r);
      }
      return 0;
    }

Where there is no machine code for the processor, or none may be mapped, Python makes the same calls one by one.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import struct
from typing import Any

from . import syscalls

# gcc -Os -fomit-frame-pointer -fPIC of the above
_CODE = {
    "x86_64": bytes.fromhex(
        "41544531c94989d4554889f5534889fb4939e97d474c8b53204c8b4328488b03488b7b08488b7310488b53180f054c39237509"
        "4885c0741b7924eb054885c0791248f7d849c1e10c4909c14c89c848f7d8eb0b49ffc14883c330ebb431c05b5d415cc3"
    )
}
_CALL = struct.Struct("6q")


class BatchError(OSError):
    """`index`: the place in the list of the call that failed."""

    def __init__(self, error: int, message: str, index: int) -> None:
        super().__init__(error, message)
        self.index = index


class Batch:
    """Calls to make, in order. Keeps what they point to alive."""

    def __init__(self) -> None:
        self._calls: list[tuple[int, ...]] = []
        self._kept: list[Any] = []
        self._block = b""

    def add(self, number: int, *arguments: int | bytes | None) -> None:
        """Up to five arguments: numbers, or bytes that the call reads (NUL-terminated for it)."""
        values = [number]
        for argument in arguments:
            if isinstance(argument, bytes):
                buffer = ctypes.create_string_buffer(argument)
                self._kept.append(buffer)
                values.append(ctypes.addressof(buffer))
            else:
                values.append(argument or 0)
        self._calls.append((*values, *(0,) * (6 - len(values))))

    def run(self) -> int:
        """0 when all were made; a clone's result in the parent, at once. Raises OSError naming the call that failed."""
        if _function is None:
            result = self._run_in_python()
        else:
            self._block = self._block or b"".join([_CALL.pack(*call) for call in self._calls])
            result = _function(self._block, len(self._calls), syscalls.NR_CLONE)
        if result < 0:
            index, errno = divmod(-result, 1 << 12)
            raise BatchError(errno, f"system call {self._calls[index][0]}: {os.strerror(errno)}", index)
        return int(result)

    def _run_in_python(self) -> int:
        for index, call in enumerate(self._calls):
            result = int(syscalls.libc.syscall(*(ctypes.c_long(value) for value in call)))
            if result < 0:
                return -(index << 12 | ctypes.get_errno())
            if call[0] == syscalls.NR_CLONE and result:
                return result
        return 0


def _map_code() -> Any:
    code = _CODE.get(platform.machine())
    if code is None:
        return None
    try:
        page = mmap.mmap(
            -1,
            mmap.PAGESIZE,
            mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,
            mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC,
        )
    except PermissionError:  # a security module that allows no writable code
        return None
    page.write(code)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    function = ctypes.PYFUNCTYPE(ctypes.c_long, ctypes.c_char_p, ctypes.c_long, ctypes.c_long)(address)
    function._page = page  # type: ignore[attr-defined]
    return function


_function = _map_code()
