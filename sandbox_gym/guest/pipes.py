"""Pipes and terminals that are read for as long as something may write to them, whatever else this process does.

A process that outlives the call which started it must neither block on a full pipe nor die of SIGPIPE. Between calls
and while commands run its pipes are emptied by waiting on them; while a cell runs, which may itself wait for that
process, by a signal (O_ASYNC: the guest's own process has no second thread).
"""

from __future__ import annotations

import errno
import fcntl
import math
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from . import syscalls

CHUNK = 1 << 16
_READS = 32  # of one pipe in a row, 2 MiB: a pipe as large as the kernel allows is empty after them
# What a signal interrupted runs on for so much longer than the draining took of what writes without end.
_PAUSE = 4.0
# Seconds between signals of a timer, for those of a pipe that came just before a system call which waits: Python looks
# at them when the call is over, or interrupted.
_HEARTBEAT = 0.1
NO_PIDFD = -1  # gVisor's kernel has none: whoever waits for a process's end looks every few milliseconds
_LOOK = 0.004  # seconds


class Pipe:
    """An end that is read for ever: each block goes to `take`. `fd` is -1 once every writer has closed the other."""

    def __init__(self, fd: int, take: Callable[[bytes], None]) -> None:
        self.fd = fd
        self.take = take

    def read(self) -> bool:
        """Takes what is there. False when it was too much to end."""
        for _ in range(_READS):
            try:
                block = os.read(self.fd, CHUNK)
            except BlockingIOError:
                return True
            except OSError:  # EIO: a terminal that no process has open any more
                block = b""
            if not block:
                self.close()
                return True
            self.take(block)
        return False

    def leave(self) -> None:
        """What comes from here on is nobody's."""
        self.take = _discard

    def close(self) -> None:
        del _watched[self.fd]
        os.close(self.fd)
        self.fd = -1


_watched: dict[int, Pipe] = {}
_draining = False
_missed = False
_waiting = False
_timer: int | None = None  # one of the kernel's, which calls `drain`


def watch(fd: int, take: Callable[[bytes], None]) -> Pipe:
    """Reads `fd` from now on, and closes it at its end."""
    signal.signal(signal.SIGIO, _on_signal)
    fcntl.fcntl(fd, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_NONBLOCK | os.O_ASYNC)
    pipe = _watched[fd] = Pipe(fd, take)  # last: from here on a signal reads it, to its end perhaps
    drain()  # what came before
    return pipe


def _discard(block: bytes) -> None:
    pass


def any_watched() -> bool:
    return bool(_watched)


def _on_signal(signum: int, frame: object) -> None:
    global _missed
    if _waiting:  # though it is blocked: by the main thread alone
        _missed = True
    else:
        drain()


def drain() -> None:
    """Takes what is in the pipes."""
    global _draining, _missed
    if _draining:  # a signal in the middle of the same
        _missed = True
        return
    while True:
        _draining, _missed = True, False
        started = time.monotonic()
        try:
            # An interrupt between reading a block and keeping it would lose the block.
            with _blocked(signal.SIGINT, signal.SIGIO):
                empty = [pipe.read() for pipe in list(_watched.values())].count(False) == 0
            if not _watched:
                _end_heartbeat()
            # A pipe that is not empty signals nothing more when it is written to.
            elif not _waiting and (_missed or not empty):
                _missed = False  # until the timer goes off, which may be at once
                _begin_heartbeat(_PAUSE * (time.monotonic() - started))
        finally:
            _draining = False
        if not _missed:
            return


def _begin_heartbeat(first: float) -> None:
    global _timer
    if _timer is None:
        _timer = syscalls.timer_create(signal.SIGIO)
    syscalls.timer_settime(_timer, first, _HEARTBEAT)


def _end_heartbeat() -> None:
    """A timer is nothing that a fork captures."""
    global _timer
    if _timer is not None:
        syscalls.timer_delete(_timer)
        _timer = None


@contextmanager
def _blocked(*signals: signal.Signals) -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # may raise what an earlier signal's handler does
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


Turn = Callable[[float, Mapping[int, int]], dict[int, int]]


@contextmanager
def waiting() -> Iterator[Turn]:
    """Hands out `turn(deadline, others)`, which waits for something to happen, drains, and returns the events of those
    `others` (descriptor: events, as for poll) that are ready. In between nothing is drained: what a caller has seen of
    a pipe's output is still so when it begins to wait.
    """
    global _waiting
    with _blocked(signal.SIGIO):
        outer, _waiting = _waiting, True
        try:
            yield _turn
        finally:
            _waiting = outer
    if _missed and not _waiting:
        drain()


@contextmanager
def end_of(pid: int) -> Iterator[int]:
    """What a `turn` finds ready once that child may have ended."""
    try:
        watch = os.pidfd_open(pid)
    except OSError as error:
        if error.errno != errno.ENOSYS:
            raise
        watch = NO_PIDFD
    try:
        yield watch
    finally:
        if watch != NO_PIDFD:
            os.close(watch)


def _turn(deadline: float, others: Mapping[int, int]) -> dict[int, int]:
    poller = select.poll()
    blind = NO_PIDFD in others
    if blind:
        deadline = min(deadline, time.monotonic() + _LOOK)
    for fd in _watched:
        poller.register(fd, select.POLLIN)
    for fd, events in others.items():
        if fd != NO_PIDFD:
            poller.register(fd, events)
    left = deadline - time.monotonic()
    ready = dict(poller.poll(None if left == math.inf else max(0, math.ceil(left * 1e3))))
    if ready.keys() - others.keys():
        drain()
    if blind:
        ready[NO_PIDFD] = others[NO_PIDFD]
    return {fd: events for fd, events in ready.items() if fd in others}


def wait_for(control: socket.socket) -> None:
    """Waits for the next request while draining. Returns at once when nothing is watched."""
    if not _watched and _timer is None:
        return
    with waiting() as turn:
        _end_heartbeat()
        while _watched and not turn(math.inf, {control.fileno(): select.POLLIN}):
            pass
        if _watched:
            _begin_heartbeat(_HEARTBEAT)
