"""The supervisor's event loop: handlers by descriptor, and work for when nobody waits."""

from __future__ import annotations

import select
import traceback
from collections.abc import Callable

_GRACE = 0.001  # seconds of quiet before idle work: a client that was just answered often has another request ready


class Loop:
    def __init__(self) -> None:
        self._poll = select.epoll()
        self._handlers: dict[int, Callable[[], object]] = {}

    def __len__(self) -> int:
        return len(self._handlers)

    def __contains__(self, fd: int) -> bool:
        return fd in self._handlers

    def watch(self, fd: int, handler: Callable[[], object]) -> None:
        """Calls `handler` whenever `fd` can be read or has been closed."""
        self._handlers[fd] = handler
        self._poll.register(fd, select.EPOLLIN)

    def unwatch(self, fd: int) -> None:
        if self._handlers.pop(fd, None) is not None:
            self._poll.unregister(fd)

    def turn(self, idle: Callable[[], bool] | None, *, now: bool, patience: Callable[[], float]) -> None:
        """Waits for events and handles them. Until there are any, `idle` is called while it finds something to do:
        after a moment of quiet, or at once where that is known to come (`now`). `patience`: seconds to wait then, -1
        for ever.
        """
        ready = self._poll.poll(0)
        if not ready and idle is not None:
            if not now:
                ready = self._poll.poll(_GRACE)
            while not ready and idle():
                ready = self._poll.poll(0)
        due = [(fd, self._handlers.get(fd)) for fd, _ in ready or self._poll.poll(patience())]
        for fd, handler in due:
            # An earlier one of this turn may have closed it, and opened another under its number.
            if handler is not None and self._handlers.get(fd) is handler:
                try:
                    handler()
                except Exception:  # a bug in one must not end every sandbox
                    traceback.print_exc()
                    self.unwatch(fd)
