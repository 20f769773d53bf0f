"""Maps the files that lie in this process's memory again, from its own root: see `rebind`.

Pages that were written are carried over. A file that is another one in this root by now, or gone, becomes anonymous
memory of the same content.

The moves are made by machine code (remap.c) while every other thread stands still in a signal handler: a write in
between would be lost, and no lock may be needed that one of them holds, malloc's for one. What they wait for in the
kernel may end with EINTR, as with any signal.
"""

from __future__ import annotations

import binascii
import ctypes
import errno
import mmap
import os
import platform
import re
import signal
import stat
import struct
from typing import Any, NamedTuple

from . import syscalls
from .batch import Batch

# start-end rights offset device inode path
_MAPPED = re.compile(rb"^(\w+)-(\w+) (....) (\w+) (\S+) ([1-9]\d*)(?: +(.*))?\n", re.MULTILINE)
# Files of the kernel's own mounts, which CRIU knows to have no path; the rest of what has none doesn't start with "/".
_PATHLESS = re.compile(rb"(?!/)|/(memfd:.*|SYSV\w+|dev/zero|anon_hugepage) \(deleted\)$")
_GONE = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES}
_PAGE = 4096
_CHUNK = 1 << 20  # of files that are compared
_ATTEMPTS = 8
_DASH = ord("-")
_AREA = struct.Struct("6q")  # start, length, protection, flags, fd (-1: becomes anonymous), offset
_PLAN = struct.Struct("14q")
_MM_MAP = struct.Struct("12Q2I")  # struct prctl_mm_map

_function: Any = None


def remap(started: float) -> None:
    """`started`: a time (of the clock) when none of the files had been mapped yet.

    Raises:
        OSError: ENOSYS on a machine other than x86-64; ETIMEDOUT when a thread doesn't stand still within a second: it
            blocks every signal; EBUSY when others don't stop mapping files; ESTALE when a file that memory is shared
            with, or the interpreter's, no longer is the same. Else what the kernel answers: then, if the text says "in
            the middle", some areas are mapped again and the rest is as before.
    """
    function = _machine_code()
    for _ in range(_ATTEMPTS):
        with _Plan(started) as plan:
            result = function(plan.address)
            if result == 0:
                return
            where, error = divmod(-result, 1 << 12)
            if where or error != errno.EAGAIN:
                raise OSError(error, plan.explain(where, error))
    raise OSError(errno.EBUSY, "rebind: other threads never stopped mapping and unmapping files")


class _File(NamedTuple):
    fd: int
    inode: int
    old: bool  # unchanged since before any was mapped


class _Plan:
    """One attempt: the areas, in the order of addresses, and every descriptor that the machine code needs."""

    def __init__(self, started: float) -> None:
        # What was changed later may differ from what was mapped. A second: ctime is that of the last clock tick.
        self._started = started - 1.0
        self._fds: list[int] = []
        self._files: dict[bytes, _File | None] = {}
        self._paths: list[bytes] = []  # of the areas
        self._kept: list[Any] = []
        try:
            self._memory = self._open("/proc/self/mem")
            self._pagemap = self._open("/proc/self/pagemap")
            self.address = self._lay_out()
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> _Plan:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for fd in self._fds:
            os.close(fd)

    def explain(self, where: int, error: int) -> str:
        if where == 0 and error == errno.ETIMEDOUT:
            return "rebind: a thread did not stand still within a second (it may block every signal)"
        text = f"rebind: {os.strerror(error)}"
        if where == 0:
            return text
        path = (*self._paths, b"/proc/self/exe")[where - 1].decode(errors="replace")
        return f"{text}, in the middle, at {path}"

    def _open(self, path: str | bytes) -> int:
        fd = os.open(
            path, os.O_RDONLY | os.O_NONBLOCK
        )  # a pipe that has taken a file's place holds nobody up
        self._fds.append(fd)
        return fd

    def _lay_out(self) -> int:
        """The address of a struct plan."""
        exe_fd, mm_map = self._exe()
        maps, tasks = self._open("/proc/self/maps"), self._open("/proc/self/task")
        text = _read_all(maps)
        lines = list(_MAPPED.finditer(text))
        areas = self._areas(lines)
        expected = b"".join([line[0] for line in lines])
        size = max(1 << 16, 2 * len(text))
        threads = 2 * os.fstat(tasks).st_nlink + 64  # room for those that start meanwhile
        plan = _PLAN.pack(
            self._keep(b"".join(areas)),
            len(areas),
            self._keep(expected),
            len(expected),
            self._keep(size),
            size,
            self._keep(4 * threads),
            threads,
            maps,
            self._pagemap,
            self._memory,
            tasks,
            _unused_signal(),
            exe_fd,
        )
        return self._keep(plan + mm_map)

    def _keep(self, content: bytes | int) -> int:
        buffer = ctypes.create_string_buffer(content)
        self._kept.append(buffer)
        return ctypes.addressof(buffer)

    def _areas(self, lines: list[re.Match[bytes]]) -> list[bytes]:
        own = _root_device()
        areas = []
        for line in lines:
            first, last, rights, where, device, inode, path = line.groups(b"")
            # The planner copies no process with memory that is shared and written: any here is the copy's own.
            if device == own or rights[1:] in (b"w-s", b"wxs") or _PATHLESS.match(path):
                continue
            start, end, offset = int(first, 16), int(last, 16), int(where, 16)
            protection = (rights[0] != _DASH) | (rights[1] != _DASH) << 1 | (rights[2] != _DASH) << 2
            flags = mmap.MAP_SHARED if rights[3:] == b"s" else mmap.MAP_PRIVATE
            fd = self._same_file(start, end - start, offset, int(inode), path)
            if fd < 0 and flags == mmap.MAP_SHARED:
                raise _stale_file(path)
            areas.append(_AREA.pack(start, end - start, protection, flags, fd, offset))
            self._paths.append(path)
        return areas

    def _same_file(self, start: int, length: int, offset: int, inode: int, path: bytes) -> int:
        """The file at this path where it has the content of this area, written pages aside; else -1."""
        if path not in self._files:
            self._files[path] = self._file(path)
        file = self._files[path]
        if file is None:
            return -1
        if file.old and file.inode == inode:
            return file.fd
        return file.fd if self._same_content(start, length, offset, file.fd) else -1

    def _file(self, path: bytes) -> _File | None:
        try:
            fd = self._open(path.replace(b"\\012", b"\n"))
        except OSError as error:
            if error.errno in _GONE:
                return None
            raise
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) and path != b"/dev/zero":
            return None
        return _File(fd, status.st_ino, status.st_ctime < self._started)

    def _same_content(self, start: int, length: int, offset: int, fd: int) -> bool:
        for done in range(0, length, _CHUNK):
            size = min(_CHUNK, length - done)
            ours, theirs = self._read_memory(size, start + done), os.pread(fd, size, offset + done)
            theirs += bytes(-len(theirs) % _PAGE)
            if ours == theirs:
                continue
            if len(ours) != len(theirs):
                return False
            written = self._written(size, start + done)
            for page in range(0, len(ours), _PAGE):
                if ours[page : page + _PAGE] != theirs[page : page + _PAGE] and not written[page // _PAGE]:
                    return False
        return True

    def _read_memory(self, size: int, address: int) -> bytes:
        """Up to the end of the file that is mapped there."""
        try:
            return os.pread(self._memory, size, address)
        except OSError as error:
            if error.errno == errno.EIO:
                return b""
            raise

    def _written(self, size: int, address: int) -> list[bool]:
        """For each page whether it is the process's own by now: present or swapped, and not the file's."""
        entries = os.pread(self._pagemap, size // _PAGE * 8, address // _PAGE * 8)
        return [top >> 5 in (0b100, 0b010, 0b110) for top in entries[7::8]]

    def _exe(self) -> tuple[int, bytes]:
        """The interpreter's file, -1 where the link is right already, and what the kernel wants to know beside it."""
        path = os.fsencode(os.readlink("/proc/self/exe"))
        present = self._open("/proc/self/exe")
        try:
            fd = self._open(path)
        except OSError as error:
            raise _stale_file(path) from error
        if _mount_id(present) == _mount_id(fd):
            return -1, bytes(_MM_MAP.size)
        status = os.fstat(fd)
        same = status.st_ctime < self._started and status.st_ino == os.fstat(present).st_ino
        if not same and _read_all(fd) != _read_all(present):
            raise _stale_file(path)
        with open("/proc/self/stat", "rb") as file:
            fields = [
                b"",
                b"",
                b"",
                *file.read().rpartition(b")")[2].split(),
            ]  # numbered as in proc_pid_stat(5)
        code_start, code_end, stack = (int(fields[i]) for i in (26, 27, 28))
        data_start, data_end, heap, *arguments = (int(field) for field in fields[45:52])
        return fd, _MM_MAP.pack(
            code_start, code_end, data_start, data_end, heap, 0, stack, *arguments, 0, 0, fd
        )


def _stale_file(path: bytes) -> OSError:
    return OSError(
        errno.ESTALE, f"rebind: no longer the file that is mapped: {path.decode(errors='replace')}"
    )


def _read_all(fd: int) -> bytes:
    blocks = []
    at = 0
    while block := os.pread(fd, _CHUNK, at):
        blocks.append(block)
        at += len(block)
    return b"".join(blocks)


def _mount_id(fd: int) -> bytes:
    with open(f"/proc/self/fdinfo/{fd}", "rb") as info:
        return next(line for line in info if line.startswith(b"mnt_id:"))


def _root_device() -> bytes:
    """Of this root's overlay, as /proc/self/maps writes it. No other sandbox has it: its files are mapped right."""
    root = b""
    with open("/proc/self/mountinfo", "rb") as mounts:
        for mount in mounts:
            fields = mount.split()
            if fields[4] == b"/":
                root = fields[2]
    major, _, minor = root.partition(b":")
    return b"%02x:%02x" % (int(major), int(minor))


def _unused_signal() -> int:
    """A real-time signal that has its default action: one that something in this process waits for is not disturbed."""
    action = ctypes.create_string_buffer(32)
    for number in range(signal.SIGRTMAX - 1, signal.SIGRTMIN, -1):
        batch = Batch()
        batch.add(syscalls.NR_RT_SIGACTION, number, 0, ctypes.addressof(action), 8)
        batch.run()
        if not any(action.raw[:8]):
            return number
    raise OSError(errno.EBUSY, "rebind: every real-time signal has a handler")


def _machine_code() -> Any:
    """Mapped once, and for ever: a thread may still be on its way out of the handler."""
    global _function
    if _function is None:
        if platform.machine() != "x86_64":
            raise OSError(
                errno.ENOSYS, f"rebind has no machine code for {platform.machine()}, only for x86_64"
            )
        rights = mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC
        page = mmap.mmap(-1, _PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, rights)
        page.write(_CODE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(page))
        function = ctypes.PYFUNCTYPE(ctypes.c_long, ctypes.c_void_p)(address)
        function._page = page  # type: ignore[attr-defined]
        _function = function
    return _function


# remap.c, by gcc 12.2
_CODE = binascii.a2b_base64(
    """
QVVBuggAAAC4DgAAAEFUSYn8vwIAAABVU0iD7FhIjWwkCEjHBCT/////SInmSInqDwVMiefo6AAAAEj/yA+EhQAAAEjHRCQ4AAAAHEiNBVEC
AABIiUQkMEiNBVgGAABIiUQkQEiLBCRIiUQkSDHAiQVPBgAA8P8FRAYAAEG6CAAAALgNAAAASYt8JGBMjWwkEEiNdCQwTInqDwVMiefoowAA
AEiJw0iFwHU6TInn6KsCAABIicNIhcB1KkyJ5+hlBQAASInD6x1MiefojgIAAEiJw0iFwHUYTInn6EgFAABIicPrC0yJ7kyJ5+gEAgAAQboI
AAAAuA4AAAAx0kiJ7r8CAAAADwVIg8RYSInYW11BXEFdwzHASIH/APD//w+XwMNIg+wYuAUAAABIi39YMdJIjXQkiA8FSItEJJhIg8QYSIPo
AsNBVzHSSYn4uLoAAABBVkiJ10iJ1kFVQVRVU0iD7BgPBUmJxbgnAAAADwVIiQQkMcBFMeRFMclIiUQkCEjHRCQQgIQeAEyJx0hjHTAFAADo
if///0j/yEg52A+E5QAAADH2SYt4WLgIAAAASInyDwVBvuoAAABJi3hYSYtwILjZAAAASYtQKA8FSInFSIXAfn1Ni1AgSYtAIEgB6Ek5wnPV
SY1SEzH2SA++Ajwufg5Ia/YKSP/CSI10BtDr6jHASTnBfwxIhfZ0O0w57nUU6zRJi1AwSGMUgkg58nQnSP/A691NOUg4dGFJi0AwTY15AUmL
UGBIizwkQok0iEyJ8A8FTYn5QQ+3QhBJAcLrh0yNVCQIuMoAAAC+gAAAAEiJ2kiNPVgEAAAPBUiD+JIPhRL///9J/8RJgfz0AQAAD4UC////
6wsxwOsHSMfA9f///0iDxBhbXUFcQV1BXkFfw0SLBRUEAABB9sABdELw/wUMBAAAuMoAAAC+gQAAAEiNPfsDAAC6AQAAAA8FvoAAAABIg+8E
SWPQQbnKAAAAiwdEOcB1CkUx0kyJyA8F6+/DUzHASYn5SInzSMdEJOABAAAASIlEJOhIiUQk8EiJRCT48P8FpAMAALjKAAAAvoEAAABIjT2T
AwAAuv///38PBUG4DQAAAEmLeWBIjXQk4DHSQboIAAAATInADwVJi3lgTInASIneDwVbw1VJifhFMdK9EQAAAFNMi08QSItfGEmLUChJi3Ag
SInoSYt4QEwp0kwB1g8FSInCSIXAfgVJAcLr3HV1SMfC9f///005UCh0aEmLUCBJjQwZSQHSTDnSc0FIidYx/0UxwIA+IEEPlMBI/8ZEAceD
/wR160CKNkCA/jB0E0k5yXQpihpJjXkBQTgZdR5JiflI/8KAev8Kdd7rukk5yUjHwvX///9ID0TQ6wdIx8L1////SInQW13DSYn4uAoAAABI
ifdJi1AQSYtwCA8FSD0A8P//dxpJi1AIRTHJTYsAuBkAAABBugMAAABIidYPBcNJiflJifL2RxABdRNIiz9Ji3EIuAoAAAC6AQAAAA8FSYtx
CE2LQSC4CQAAADH/TYtJKLoDAAAADwXDQVRVSIn9U0iJ874iAAAASInf6K////9JicBIPQDw//93PEUxyUG8EQAAAEiLUwhMixNLjTQBTIng
SIt9UEwpyk0Byg8FSIXAfgVJAcHr3EiJ30yJxltdQVzpMP///1tdQVzDQVdBVkFVQVRVU0iDfhgCSInzD4X6AAAASYn/RTH2RTHASItDCEw5
8A+OygAAAEwp8EmLVyi5ABAAAEmLdyBIwfgMSYt/SEjB4ANIOdBID07QSIsDTAHwSYnRSJlI9/lMicpMjRTFAAAAALgRAAAADwVIg/gHfxNI
hcBIx8L7////SA9JwumqAAAASMH4A0Ux5EG9AAIAAEiJxUyJwEmLTyBKiwzhSMHpPXQ2gOEBdTFIhcB1Fb4CAAAASInf6KH+//9IPQDw//93
akyJ5kyJ6UjB5gxMAfZIjTwGSAMz80ilSf/ETDnldbRIweUMSYnASQHu6Sn///9NhcB0FUiJ30yJxltdQVxBXUFeQV/pGf7//0yLUxhIi1MQ
uAkAAABIi3MISIs7SYPKEEyLQyBMi0soDwVbXUFcQV1BXkFfw1VIif1TMdtIOV0IfitIa/MwSAN1AEiJ70iDfiAAeQfoOv7//+sF6Jb+//9I
/8NIPQDw//920etNSIN9aAB5BDHA60kx0rgMAAAASInXSInWDwVFMcBIjVVwQbpoAAAARTHJSImFmAAAAL8jAAAAuJ0AAAC+DgAAAA8FSD0A
8P//dr1I/8NIweMMSCnYW13DuA8AAAAPBWaQAAAAAAAAAAA=
"""
)
