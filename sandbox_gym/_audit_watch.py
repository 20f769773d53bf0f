"""What the audit log is told once a second, and not at each call: what sandboxes have tried to reach, how many steps
their environments have made, and the last picture that each has drawn.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from sandbox_gym._audit_rows import Entry

if TYPE_CHECKING:
    from sandbox_gym.sandbox import Sandbox

_LOOK = 1.0  # seconds
_MOST_FRAMES = 64  # that wait for the next look, of different sandboxes
_WIDEST = 640  # pixels of a frame's longer side, as it is kept


class Watch:
    """Tells `put` of entries, from a thread that lives while there is something to tell. `_turn` is held to change what
    is looked at; a count is raised without it.
    """

    def __init__(self, put: Callable[[Entry], None], look: Callable[[Sandbox], None]) -> None:
        self._put, self._look = put, look
        self._turn = threading.Condition()
        self._closing = self._running = False
        self._networked: weakref.WeakSet[Any] = weakref.WeakSet()
        self._steps: dict[str, int] = {}  # by sandbox, all since the log began
        self._noted: dict[str, int] = {}  # of these, what was told
        self._frames: dict[str, tuple[float, Any]] = {}

    def network(self, box: Sandbox) -> None:
        """Looks at what it has tried to reach, for as long as it lives."""
        self._networked.add(box)
        self._run()

    def count(self, ids: Iterable[str], steps: int) -> None:
        """Only one thread at a time steps a sandbox, so that no count is lost."""
        counted = self._steps
        for id in ids:
            counted[id] = counted.get(id, 0) + steps
        if not self._running:
            self._run()

    def draw(self, id: str, frame: Any) -> None:
        """Keeps a copy of an array [height, width, 3] of uint8, made smaller; what is no such array is left out."""
        shape: tuple[int, ...] = getattr(frame, "shape", ())
        if len(shape) != 3 or shape[2] != 3 or 0 in shape or frame.dtype.name != "uint8":
            return
        every = -(-max(shape[:2]) // _WIDEST)
        with self._turn:
            if id in self._frames or len(self._frames) < _MOST_FRAMES:
                self._frames[id] = time.time(), frame[::every, ::every].copy()
        if not self._running:
            self._run()

    def end(self, id: str) -> None:
        """The last that there is to tell of a sandbox."""
        if id in self._steps or id in self._frames:
            self._tell([id])
            with self._turn:
                self._steps.pop(id, None)
                self._noted.pop(id, None)

    def tell_all(self) -> bool:
        """Of steps and frames; False when there was nothing."""
        return self._tell([*list(self._steps), *list(self._frames)])

    def close(self) -> None:
        with self._turn:
            self._closing = True
            self._turn.notify_all()

    def _tell(self, ids: Iterable[str]) -> bool:
        entries = []
        with self._turn:  # or two threads would tell of the same steps
            for id in dict.fromkeys(ids):
                steps = self._steps.get(id, 0)
                new = steps - self._noted.get(id, 0)
                if new:
                    self._noted[id] = steps
                    entries.append(Entry("steps", id, new, {}, ended=True))
                if id in self._frames:
                    entries.append(Entry("frame", id, self._frames.pop(id), {}, ended=True))
        for entry in entries:
            self._put(entry)
        return bool(entries)

    def _run(self) -> None:
        with self._turn:
            if not self._running and not self._closing:
                self._running = True
                threading.Thread(target=self._work, name="audit-watch", daemon=True).start()

    def _work(self) -> None:
        while self._look_at_all():
            with self._turn:
                self._turn.wait_for(lambda: self._closing, _LOOK)

    def _look_at_all(self) -> bool:
        """False when there is nothing left to look at, and this thread ends."""
        told = self.tell_all()
        boxes = [box for box in list(self._networked) if box.status in ("running", "stopped")]
        for box in boxes:
            if box.status == "running" and not self._closing:
                self._look(box)
        with self._turn:
            self._running = False  # from here on, what is counted starts another
            self._running = not self._closing and bool(boxes or told or self._frames or self._is_behind())
            return self._running

    def _is_behind(self) -> bool:
        return any(self._noted.get(id) != steps for id, steps in list(self._steps.items()))
