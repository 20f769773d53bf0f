"""The process behind a sandbox whose memory comes when it is touched: it serves userfaultfd(2) from criu's image.

criu leaves the private pages of each task out and hands over a descriptor that tells of every access to a missing one,
and of what moves, drops or forks memory. Pages that nobody touches are never copied, now or later: to copies of one
image they are one page of its file. Nothing here comes from the guest: it is the kernel that speaks, and criu's images.

The kernel hands out faults before events that came first, and an event's thread goes on as soon as it is read. So all
that can be read is, events count before faults, and where another is on its way the kernel refuses (EAGAIN): then it is
read first. No range is ever unregistered: what moves there meanwhile would become zeros.
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import gc
import os
import select
import signal
import socket
import struct
import time
from pathlib import Path
from typing import NoReturn

from sandbox_gym.guest import syscalls

from .areas import Area, Areas
from .pages import MOST, PAGE, Pages, read_image
from .standstill import Standstill, is_forking

SOCKET = "lazy-pages.socket"  # in criu's work folder
# The supervisor's order, with the bytes that there is room for; the answer when more are missing, with how many; and
# the word that all pages have come.
FINISH, SHORT, DONE = b"finish", b"short", b"done"
ROOT = b"root"  # the supervisor's word, with the number of the sandbox's first process
_LEAST = 1 << 16  # bytes brought for a fault: such a block, more where they come in sequence
_RETRY = 0.001  # seconds
# Those that get all when they fork: a program's own processes, and a child that forks a pool. Each may cost the image's
# size once more than in the origin.
_GENERATIONS = 2
_STILL = 10.0  # seconds that a sandbox stands still for its memory at most
# Ranges kept for one process: each page that it drops amid others may make one more. Beyond, pages come unasked.
_RANGES = 1024

# linux/userfaultfd.h
_FAULT, _FORK, _REMAP = 0x12, 0x13, 0x14
_EVENT = struct.Struct("B7x3Q")
_RANGE, _ZERO, _COPY = struct.Struct("2Q"), struct.Struct("3Qq"), struct.Struct("4Qq")
_PROTECT = struct.Struct("3Q")
_UFFDIO_WAKE, _UFFDIO_COPY = 0x8010AA02, 0xC028AA03
_UFFDIO_ZEROPAGE, _UFFDIO_WRITEPROTECT = 0xC020AA04, 0xC018AA06
_CLONE_FILES = 0x400
_TASK = struct.Struct("i")
_RESTORED = 0x52535446  # criu/uffd.c
_PASSING = {errno.EAGAIN, errno.ENOMEM, errno.ENOENT, errno.EEXIST}
_LOWEST = 1 << 16  # an address that a program may use


class Memory:
    """One process's memory. A method raises ProcessLookupError once the process is gone."""

    def __init__(self, fd: int, pages: Pages, areas: Areas) -> None:
        self.fd = fd
        self.areas = areas
        self._pages = pages
        self._faults: dict[int, None] = {}  # pages that a thread waits for, in order
        self._next = -1  # the address behind what was brought last
        self._span = _LEAST
        self._swept = 0  # up to here `sweep` has been
        self._disturbed = False  # something changed while it went through
        self._roomy = max(_RANGES, 2 * len(areas))
        self.generation = 0  # of those that were restored; their children are the first
        self.forked = False

    def read(self) -> list[Memory]:
        """Hears all that the kernel has to say; the memories of children that were forked."""
        children: list[Memory] = []
        while True:
            try:
                block = os.read(self.fd, _EVENT.size * 64)
            except BlockingIOError:
                return children
            for kind, first, second, third in _EVENT.iter_unpack(block):
                if kind == _FAULT:
                    self._faults[second & -PAGE] = None
                    continue
                self._disturbed = True
                if kind == _FORK:
                    child = Memory(first & 0xFFFFFFFF, self._pages, self.areas.copy())
                    child.generation, self.forked = self.generation + 1, True
                    children.append(child)
                elif kind == _REMAP:
                    self.areas.move(first, second, third)
                else:  # removed or unmapped
                    self.areas.cut(first, second)

    def serve(self) -> bool:
        """Answers the faults; False when something must be read first."""
        while self._faults:
            page = next(iter(self._faults))
            area = self.areas.at(page)
            if not (self._fill(page) if area is None else self._bring(page, area)):
                return False
            del self._faults[page]
        return True

    def is_wanted(self) -> bool:
        """Whether all of it had better come unasked. What is missing at a fork is missing in both, and comes to each
        on its own; what has come is shared. So one that forks gets all of its memory, which its origin had too, and
        its later children share it.
        """
        return (self.forked and self.generation < _GENERATIONS) or len(self.areas) > self._roomy

    def sweep(self) -> bool:
        """Brings some more that nobody has asked for; False when it is to be tried again a little later."""
        area = self.areas.at(self._swept) or self.areas.after(self._swept)
        if area is None:
            if not self._disturbed and self._state() != errno.EAGAIN:
                self.areas = Areas()  # the process has nothing there (MADV_DONTFORK)
            self._swept, self._disturbed = 0, False
            return False
        start = max(area[0], self._swept)
        end = min(area[1], start + MOST)
        done, error = self._copy(start, end)
        while error == errno.ENOENT and end - start > PAGE:  # it must lie in one mapping
            end = start + (end - start) // 2 // PAGE * PAGE
            done, error = self._copy(start, end)
        self._swept = end if error == errno.ENOENT else done
        return error in {0, errno.ENOENT}

    def is_changing(self) -> bool:
        """Whether an event is on its way, whose thread waits until it is read."""
        return self._state() == errno.EAGAIN

    def exists(self) -> bool:
        """The kernel tells nobody when a process ends."""
        return self._state() != errno.ESRCH

    def _state(self) -> int:
        """ESRCH when the process is gone, EAGAIN when an event is on its way. Nothing is ever protected by it."""
        try:
            fcntl.ioctl(self.fd, _UFFDIO_WRITEPROTECT, bytearray(_PROTECT.pack(_LOWEST, PAGE, 0)))
        except OSError as error:
            return error.errno or 0
        return 0

    def _bring(self, page: int, area: Area) -> bool:
        start = max(area[0], page & -_LEAST)
        done, error = self._copy(start, min(area[1], max(start + self._ahead(page), page + PAGE)))
        if error == errno.ENOENT and done <= page:
            done, error = self._copy(page, page + PAGE)
            if error:  # no longer so mapped: the thread finds out when it tries again
                self._wake(page)
                return True
        self._next = done
        return done > page

    def _fill(self, page: int) -> bool:
        """Zeros, where the image has none of the pages."""
        following = self.areas.after(page)
        end = page + self._ahead(page)
        end = end if following is None else min(end, following[0])
        filled, error = self._order(_UFFDIO_ZEROPAGE, _ZERO.pack(page, end - page, 0, 0))
        if error == errno.ENOENT:  # beyond the mapping's end
            filled, error = self._order(_UFFDIO_ZEROPAGE, _ZERO.pack(page, PAGE, 0, 0))
        if error in {errno.ENOENT, errno.EEXIST}:
            self._wake(page)
            return True
        self._next = page + filled
        return not error

    def _ahead(self, page: int) -> int:
        """How many bytes to bring: the more, the longer they have been asked for one after another."""
        self._span = min(2 * self._span, MOST) if page == self._next else _LEAST
        return self._span

    def _copy(self, start: int, end: int) -> tuple[int, int]:
        """Brings pages of one area; up to where, and what stopped it."""
        area = self.areas.at(start)
        while start < end and area is not None:
            self._pages.load(area[2] + start - area[0], end - start)
            request = _COPY.pack(start, self._pages.address, end - start, 0, 0)
            copied, error = self._order(_UFFDIO_COPY, request)
            if error == errno.EEXIST:
                copied, error = PAGE, 0
                self._wake(start)
            self.areas.cut(start, start + copied)
            start += copied
            if error:
                return start, error
            area = self.areas.at(start)
        return start, 0

    def _order(self, request: int, argument: bytes) -> tuple[int, int]:
        """How many bytes it did, or an error that may pass. Raises OSError for any other."""
        block = bytearray(argument)
        try:
            fcntl.ioctl(self.fd, request, block)
        except OSError as failure:
            done = int.from_bytes(block[-8:], "little", signed=True)
            if done > 0:
                return done, 0
            if failure.errno in _PASSING:
                return 0, failure.errno or 0
            raise
        return int.from_bytes(block[-8:], "little", signed=True), 0

    def _wake(self, page: int) -> None:
        fcntl.ioctl(self.fd, _UFFDIO_WAKE, bytearray(_RANGE.pack(page, PAGE)))


class Server:
    """`listener`: where criu connects and hands the descriptors over. `orders`: to the supervisor and back."""

    def __init__(self, listener: socket.socket, orders: socket.socket, folder: int) -> None:
        self._listener = listener
        self._orders = orders
        self._folder = folder  # of the images
        self._criu: socket.socket | None = None
        self._memories: dict[int, Memory] = {}
        self._restored = self._finishing = False
        self._root = 0  # the sandbox's first process, once it is known
        self._room: int | None = None  # of an order that is to be decided on
        self._poll = select.epoll()
        for sock in (listener, orders):
            self._poll.register(sock, select.EPOLLIN)

    def run(self) -> None:
        """Returns when every page has come, or nobody is there to want the rest."""
        patience: float | None = None
        while self._memories or not self._restored:
            for fd, _ in self._poll.poll(patience):
                if fd == self._orders.fileno():
                    self._obey()
                elif fd == self._listener.fileno():
                    self._criu, _ = self._listener.accept()
                    self._poll.register(self._criu, select.EPOLLIN)
                elif self._criu is not None and fd == self._criu.fileno():
                    self._meet(self._criu)
            waits = [self._tend(memory) for memory in list(self._memories.values())]
            patience = min((wait for wait in waits if wait is not None), default=None)
            if self._room is not None:
                patience = 0.0
                self._decide(self._room)

    def _tend(self, memory: Memory) -> float | None:
        """Does what there is to do for one; in how many seconds there is more, None: when the kernel says so."""
        if self._memories.get(memory.fd) is not memory:  # another's turn has shown that it is gone
            return None
        may_fork = self._root and memory.generation < _GENERATIONS and not memory.forked
        children: list[Memory] = []
        try:
            held = may_fork and memory.is_changing() and is_forking(self._root)
            if not held:
                children = memory.read()
                held = may_fork and memory.forked
            if held:
                children += self._bring_all(memory)
            for child in children:
                self._add(child)
            served = memory.serve()
            wanted = self._finishing or memory.is_wanted()
            sweeping = served and wanted and len(memory.areas) > 0
            if sweeping:
                served = memory.sweep()
        except ProcessLookupError:
            self._drop(memory)
            return None
        if children:
            for other in list(self._memories.values()):
                if not other.exists():
                    self._drop(other)
        if not served:
            return _RETRY
        # Not before: until then criu's own descriptor keeps accesses waiting for somebody to hear of them.
        if self._restored and not len(memory.areas):
            self._drop(memory)
            return None
        return 0.0 if sweeping else None

    def _bring_all(self, memory: Memory) -> list[Memory]:
        """What a process lacks, before it can fork once more; the children that it has forked. It may have a whole pool
        of them in the time that it takes.
        """
        until = time.monotonic() + _STILL
        with Standstill(self._root):
            children = memory.read()
            while not memory.forked and memory.is_changing() and time.monotonic() < until:
                children += memory.read()  # it comes when the kernel has copied all
            with contextlib.suppress(ProcessLookupError):  # its children may live on
                while memory.forked and len(memory.areas) and time.monotonic() < until:
                    memory.sweep()
                    children += memory.read()
        return children

    def _obey(self) -> None:
        word, _, number = self._orders.recv(64).partition(b" ")
        if word == ROOT:
            self._root = int(number)
        elif word == FINISH:
            self._room = int(number)
        else:
            raise EOFError("the supervisor has hung up")

    def _decide(self, room: int) -> None:
        """Bringing more than there is room for would have the kernel kill the sandbox."""
        self._room = None
        missing = sum(memory.areas.size() for memory in self._memories.values() if memory.exists())
        if self._finishing or missing <= room:
            self._finishing = True
        else:
            self._orders.send(b"%s %d" % (SHORT, missing))

    def _meet(self, criu: socket.socket) -> None:
        """A task's number, and its descriptor; or the word that there are no more (criu/uffd.c)."""
        block = criu.recv(_TASK.size, socket.MSG_WAITALL)
        pid = _TASK.unpack(block)[0] if len(block) == _TASK.size else 0
        if not block or pid == _RESTORED:
            self._restored = self._restored or pid == _RESTORED
            self._poll.unregister(criu)
            self._criu = None
            criu.close()
            if not self._restored:
                raise EOFError("criu has hung up")
        elif pid > 0:  # else a zombie's
            _, ancillary, _, _ = criu.recvmsg(1, socket.CMSG_SPACE(4))
            (fd,) = array.array("i", ancillary[0][2])
            self._add(Memory(fd, *read_image(self._folder, pid)))

    def _add(self, memory: Memory) -> None:
        self._memories[memory.fd] = memory
        self._poll.register(memory.fd, select.EPOLLIN)

    def _drop(self, memory: Memory) -> None:
        """What is in no area is the kernel's to answer from now on."""
        if self._memories.pop(memory.fd, None) is not None:
            os.close(memory.fd)


def serve(listener: socket.socket, orders: socket.socket, folder: int) -> NoReturn:
    """A forked process's whole life."""
    try:
        os.setsid()
        gc.freeze()  # the supervisor's garbage closes descriptors, whose numbers are others' here
        ours = {2, listener.fileno(), orders.fileno(), folder}
        for name in os.listdir("/proc/self/fd"):  # guests notice their end by sockets that must close with it
            if int(name) not in ours:
                with contextlib.suppress(OSError):
                    os.close(int(name))
        with contextlib.suppress(PermissionError):  # its end would be the sandbox's too
            Path("/proc/self/oom_score_adj").write_text("-1000")
        keeper = _start_keeper()
        Server(listener, orders, folder).run()
        os.kill(keeper, signal.SIGKILL)
        orders.send(DONE)
        os._exit(0)
    except BaseException as error:
        with contextlib.suppress(OSError):
            orders.send(f"{type(error).__name__}: {error}".encode()[:1000])
    finally:
        os._exit(1)


def _start_keeper() -> int:
    """A process that shares the descriptors, and does nothing. Should this one be killed, the kernel would else answer
    with zeros where a page is still missing; so it waits until the sandbox is killed too.
    """
    pid = syscalls.clone(_CLONE_FILES)
    while pid == 0:
        signal.pause()
    return pid
