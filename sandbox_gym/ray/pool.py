"""The workers of one map: who runs what, until when, and what happens when one dies. An event loop in a thread."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import threading
import time
from collections import Counter, OrderedDict, deque
from typing import Any

import ray

from sandbox_gym.errors import BackendUnavailable, SandboxDied, SandboxError
from sandbox_gym.ray import nodes
from sandbox_gym.ray.hand import START_TIMEOUT, Gone, Hand, Item
from sandbox_gym.ray.travel import Parcel
from sandbox_gym.ray.worker import Reply, Share

_TICK = 1.0  # seconds between looks at the cluster
_FIRST_TICK = 0.1  # while there is no worker yet
_IDLE = (
    30.0  # seconds without work after which a worker leaves its place to others: another map may wait for it
)
_MOST_BAD_STARTS = 10  # workers in a row that died while they started
_MOST_COMPLAINTS = 2  # of a node, where none comes up
_SHORT = 0.05  # seconds of an item, below which a worker has several, so that it never waits for us
_QUEUED = 3


class Pool:
    """Items go in by `submit`, come out by `wait`. `close` ends all workers, whatever they do. Not for several threads.

    `function`: the job's, with its snapshots; `retries`: how often an item is tried again; `timeout`: seconds of one.
    """

    def __init__(self, function: Parcel, needs: nodes.Needs, *, retries: int, timeout: float | None) -> None:
        self._function = function
        self._needs = needs
        self._retries = retries
        self._timeout = timeout
        self.submitted = self.completed = 0
        self._todo: deque[Item] = deque()
        self._done: OrderedDict[int, Item] = OrderedDict()
        self._failure: BaseException | None = None
        self._changed = threading.Condition()
        self._hands: set[Hand] = set()
        self._starting: Counter[str] = Counter()
        self._departed: dict[str, frozenset[int]] = {}  # processes that may have sandboxes yet, by node
        self._complaints: dict[str, list[str]] = {}  # why workers could not be, by node
        self._bad_starts = 0
        self._seconds: float | None = None  # that an item takes, lately
        self._loop = asyncio.new_event_loop()
        self._news = asyncio.Event()  # something to do, or a worker gone
        self._main: asyncio.Task[None] | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="sandbox-gym-job", daemon=True)

    # ---- the caller's side ------------------------------------------------------------------------------------------

    def submit(self, item: Item) -> None:
        if not self.submitted:
            # Before Ray's own end, after which whatever asks it for anything would start another Ray.
            atexit.register(self.close)
            self._code = ray.put(self._function.data)
            self._thread.start()
        with self._changed:
            self._todo.append(item)
            self.submitted += 1
        with contextlib.suppress(RuntimeError):  # the loop has ended, and `wait` tells why
            self._loop.call_soon_threadsafe(self._news.set)

    @property
    def workers(self) -> int:
        return len(self._hands)

    def ready(self, index: int | None) -> bool:
        """Whether `wait` would return at once."""
        return index in self._done if index is not None else bool(self._done)

    def wait(self, index: int | None, seconds: float) -> Item | None:
        """The item with that index, or any; None when it isn't done within `seconds`. Raises what keeps all from being
        done.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or self.ready(index), seconds)
            if self.ready(index):
                return self._done.pop(index) if index is not None else self._done.popitem(last=False)[1]
            if self._failure is not None:
                raise self._failure
            return None

    def close(self) -> None:
        """Idempotent. Workers are killed, and their sandboxes with them."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        if self._thread.ident is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended by itself, of a failure
                self._loop.call_soon_threadsafe(self._cancel)
            if threading.current_thread() is not self._thread:  # where a collector closes it
                self._thread.join(timeout=30.0)
        else:
            self._loop.close()

    # ---- the loop's side --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._main = self._loop.create_task(self._staff())
        try:
            with contextlib.suppress(asyncio.CancelledError):
                self._loop.run_until_complete(self._main)
        except BaseException as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()
        finally:
            drives = asyncio.all_tasks(self._loop)
            for drive in drives:
                drive.cancel()
            self._loop.run_until_complete(asyncio.gather(*drives, return_exceptions=True))
            self._loop.close()

    def _cancel(self) -> None:
        if self._main is not None:
            self._main.cancel()

    async def _staff(self) -> None:
        """Sees to it that there are workers, as many as there is work and room for."""
        drives: set[asyncio.Task[None]] = set()
        lonely_since = time.monotonic()
        while True:
            if not ray.is_initialized():
                raise SandboxError("Ray was shut down while a job's items were running")
            if self._hands or self.submitted == self.completed:
                lonely_since = time.monotonic()
            self._check_hope(time.monotonic() - lonely_since)
            for node, share in self._vacancies():
                self._starting[node] += 1
                drives.add(self._loop.create_task(self._drive(node, share)))
            done, drives = await self._tick(drives)
            for drive in done:
                drive.result()

    async def _tick(self, drives: set[asyncio.Task[None]]) -> tuple[set[Any], set[Any]]:
        """Until a worker has gone, or it is time to look at the cluster again."""
        seconds = _TICK if self._hands else _FIRST_TICK
        if not drives:
            await asyncio.sleep(seconds)
            return set(), set()
        return await asyncio.wait(drives, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)

    def _vacancies(self) -> list[tuple[str, Share]]:
        there = Counter(hand.node for hand in self._hands) + self._starting
        wanted = len(self._todo) - self._starting.total()
        # What a node has free is not told at once: one look after each start.
        avoid = {node for node, count in self._starting.items() if count} | self._unfit()
        return nodes.vacancies(self._needs, there, avoid, wanted) if wanted > 0 else []

    def _unfit(self) -> set[str]:
        return {node for node, said in self._complaints.items() if len(said) >= _MOST_COMPLAINTS}

    def _check_hope(self, lonely: float) -> None:
        """Raises BackendUnavailable when no worker will come."""
        if self._hands:
            return
        unfit = self._unfit()
        if unfit and not nodes.shares(self._needs).keys() - unfit:
            reasons = "; ".join(sorted({self._complaints[node][-1] for node in unfit}))
            raise BackendUnavailable(f"no worker of this job can start: {reasons}")
        if self._bad_starts >= _MOST_BAD_STARTS:
            raise BackendUnavailable(
                f"the last {self._bad_starts} workers of this job died while they started: see Ray's logs"
            )
        if lonely > START_TIMEOUT:
            raise BackendUnavailable(
                f"no worker of this job could start within {START_TIMEOUT:g} s: of this cluster, "
                f"{nodes.describe_use()} is free. End what holds the rest (another map that is not finished does)"
            )

    # ---- one worker -------------------------------------------------------------------------------------------------

    async def _drive(self, node: str, share: Share) -> None:
        """A worker's life."""
        hand = Hand(node, share, self._needs)
        try:
            try:
                await self._open(hand)
            finally:
                self._starting[node] -= 1
            self._hands.add(hand)
            while True:
                await self._fill(hand)
                self._judge(await hand.next_done(self._timeout))
        except Gone as gone:
            self._take_back(hand.items, gone.cause)
        finally:
            self._hands.discard(hand)
            if hand.pid is not None:
                self._departed[node] = self._departed.get(node, frozenset()) | {hand.pid}
            hand.kill()

    async def _open(self, hand: Hand) -> None:
        """Raises Gone."""
        gone = self._departed.get(hand.node, frozenset())
        try:
            await hand.open(self._function, self._code, gone)
        except Gone as failure:
            if failure.complaint is not None:
                self._complaints.setdefault(hand.node, []).append(failure.complaint)
            else:
                self._bad_starts += 1
            raise
        self._bad_starts = 0
        self._complaints.pop(hand.node, None)
        self._departed[hand.node] = self._departed.get(hand.node, frozenset()) - gone

    async def _fill(self, hand: Hand) -> None:
        """Returns when the worker has something to do. Raises Gone."""
        while True:
            while item := self._next(hand.items):
                hand.send(item)
            if hand.items:
                return
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), _IDLE)
            except asyncio.TimeoutError:
                raise Gone() from None

    def _next(self, before: list[Item]) -> Item | None:
        """For a worker that has these already: one more only where items are short, and there are more than workers."""
        with self._changed:
            if not self._todo or (before and not self._may_queue(before)):
                return None
            return self._todo.popleft()

    def _may_queue(self, before: list[Item]) -> bool:
        """An item that is never tried again must not be taken for another, whose last word was not heard."""
        if self._todo[0].alone or before[-1].alone or not self._retries:
            return False
        short = self._seconds is not None and self._seconds < _SHORT
        return short and len(before) < _QUEUED and len(self._todo) > len(self._hands)

    def _judge(self, item: Item) -> None:
        """What an answer means. Raises Gone when it is the last of its worker."""
        reply = item.answer
        assert isinstance(reply, Reply)
        self._seconds = reply.seconds if self._seconds is None else 0.9 * self._seconds + 0.1 * reply.seconds
        if reply.ok:
            self._finish(item)
        else:
            self._retry(item)
        if not reply.usable:
            raise Gone()

    def _take_back(self, items: list[Item], cause: SandboxError | None) -> None:
        """What a worker had when it went: the first has failed, if there is a cause; the others were never begun. Where
        it died with several, its last answer may not have been heard, so that nobody can tell whose fault it was.
        """
        blamed = items[:1] if cause is not None else []
        if isinstance(cause, SandboxDied) and len(items) > 1:
            blamed = []
        for item in items:
            item.alone = True
        with self._changed:
            self._todo.extendleft(reversed(items[len(blamed) :]))
        for item in blamed:
            item.answer = cause
            self._retry(item)
        self._news.set()

    def _retry(self, item: Item) -> None:
        item.attempts += 1
        if item.attempts > self._retries:
            self._finish(item)
            return
        with self._changed:
            self._todo.appendleft(item)
        self._news.set()

    def _finish(self, item: Item) -> None:
        with self._changed:
            self.completed += 1
            self._done[item.index] = item
            self._changed.notify_all()
