"""The workers of one map: who runs what, until when, and what happens when one dies. An event loop in a thread."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import threading
import time
from collections import Counter, OrderedDict, deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from sandbox_gym.errors import BackendUnavailable, SandboxDied, SandboxError, SandboxTimeout
from sandbox_gym.ray import nodes
from sandbox_gym.ray.travel import LOAD_TIMEOUT, Parcel
from sandbox_gym.ray.worker import Reply, Share, Worker

_TICK = 1.0  # seconds between looks at the cluster
_FIRST_TICK = 0.1  # while there is no worker yet
_PATIENCE = LOAD_TIMEOUT  # seconds without any worker after which a map gives up
_IDLE = (
    30.0  # seconds without work after which a worker leaves its place to others: another map may wait for it
)
_MOST_BAD_STARTS = 10  # workers in a row that died while they started
_MOST_LOADED = 8  # snapshots of items that a worker keeps
_SHORT, _QUEUED = (
    0.05,
    3,
)  # where items take fewer seconds than that, a worker has so many, to never wait for us


@dataclass(eq=False)
class Item:
    """What a worker is to do. `attempts`: those that failed; `answer`: to the last one, an error when its worker gave
    none; `alone`: it was with a worker that went, and gets one for itself, to be blamed for no other.
    """

    index: int
    value: Any
    parcel: Parcel
    attempts: int = 0
    answer: Reply | SandboxError | None = None
    alone: bool = False


@dataclass(eq=False)
class _Call:
    """`item`: None for one that only brings snapshots."""

    ref: Any
    future: asyncio.Future[Any]
    item: Item | None


@dataclass(eq=False)
class _Hand:
    """A worker as we know it."""

    node: str
    share: Share
    actor: Any
    pid: int | None = None
    calls: deque[_Call] = field(default_factory=deque)
    loaded: OrderedDict[str, bool] = field(default_factory=OrderedDict)  # snapshots; False: perhaps not


class _Gone(Exception):
    """A worker is of no use any more; `cause`: what the item it was at failed of, if it was at any."""

    def __init__(self, cause: SandboxError | None) -> None:
        super().__init__(str(cause))
        self.cause = cause


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
        self._hands: set[_Hand] = set()
        self._starting: Counter[str] = Counter()
        self._departed: dict[str, frozenset[int]] = {}  # processes that may have sandboxes yet, by node
        self._unfit: dict[str, str] = {}  # nodes where no worker can be, and why
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
            code = ray.put(self._function.data)
            self._opening = [code], self._function.outside, self._function.packed
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
        if self.submitted:
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
        avoid = {node for node, count in self._starting.items() if count} | self._unfit.keys()
        return nodes.vacancies(self._needs, there, avoid, wanted) if wanted > 0 else []

    def _check_hope(self, lonely: float) -> None:
        """Raises BackendUnavailable when no worker will come."""
        if self._hands:
            return
        if self._unfit and not nodes.shares(self._needs).keys() - self._unfit.keys():
            reasons = "; ".join(sorted(set(self._unfit.values())))
            raise BackendUnavailable(f"no worker of this job can start: {reasons}")
        if self._bad_starts >= _MOST_BAD_STARTS:
            raise BackendUnavailable(
                f"the last {self._bad_starts} workers of this job died while they started: see Ray's logs"
            )
        if lonely > _PATIENCE:
            raise BackendUnavailable(
                f"no worker of this job could start within {_PATIENCE:g} s: of this cluster, {nodes.describe_use()} is "
                "free. End what holds the rest (another map that is not finished does)"
            )

    # ---- one worker -------------------------------------------------------------------------------------------------

    async def _drive(self, node: str, share: Share) -> None:
        """A worker's life."""
        place = NodeAffinitySchedulingStrategy(node, soft=False)
        options = {
            **self._needs.options,
            "scheduling_strategy": place,
            "max_restarts": 0,
            "max_task_retries": 0,
        }
        hand = _Hand(node, share, ray.remote(Worker).options(**options).remote())
        try:
            try:
                await self._open(hand)
            finally:
                self._starting[node] -= 1
            self._hands.add(hand)
            while True:
                await self._fill(hand)
                await self._settle(hand)
        except _Gone as gone:
            self._give_back(hand, gone.cause)
        finally:
            self._hands.discard(hand)
            if hand.pid is not None:
                self._departed[node] = self._departed.get(node, frozenset()) | {hand.pid}
            with contextlib.suppress(Exception):  # Ray is gone, and the worker too
                ray.kill(hand.actor)

    async def _open(self, hand: _Hand) -> None:
        """Raises _Gone."""
        gone = self._departed.get(hand.node, frozenset())
        call = self._call(hand.actor.open.remote(*self._opening, share=hand.share, gone=gone))
        try:
            hand.pid = await asyncio.wait_for(call.future, _PATIENCE)
            self._departed[hand.node] = self._departed.get(hand.node, frozenset()) - gone
            self._bad_starts = 0
        except RayTaskError as error:  # it lives, and says what is wrong
            self._unfit[hand.node] = f"{type(error.cause).__name__}: {error.cause}"
            raise _Gone(None) from None
        except (RayError, asyncio.TimeoutError):
            self._bad_starts += 1
            raise _Gone(None) from None

    async def _fill(self, hand: _Hand) -> None:
        """Returns when the worker has something to do."""
        while True:
            while len(hand.calls) < self._most_queued() and (item := self._next(hand)):
                self._send(hand, item)
            if hand.calls:
                return
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), _IDLE)
            except asyncio.TimeoutError:
                raise _Gone(None) from None

    def _most_queued(self) -> int:
        """Who is never tried again must not be taken for another that died before its answer was heard."""
        short = self._seconds is not None and self._seconds < _SHORT
        return _QUEUED if short and self._retries else 1

    def _next(self, hand: _Hand) -> Item | None:
        """An item behind others only while there is more to do than there are workers."""
        with self._changed:
            if not self._todo:
                return None
            if hand.calls:
                before = hand.calls[-1].item
                if (
                    len(self._todo) <= len(self._hands)
                    or self._todo[0].alone
                    or before is None
                    or before.alone
                ):
                    return None
            return self._todo.popleft()

    def _send(self, hand: _Hand, item: Item) -> None:
        parcel = item.parcel
        needed = {packed.ticket.id: packed for packed in parcel.packed}
        missing = [packed for id, packed in needed.items() if not hand.loaded.get(id)]
        for id in needed:
            hand.loaded[id] = True
            hand.loaded.move_to_end(id)
        if missing:
            most = max(_MOST_LOADED, len(needed))
            forget = [hand.loaded.popitem(last=False)[0] for _ in range(len(hand.loaded) - most)]
            hand.calls.append(self._call(hand.actor.load.remote(missing, forget)))
        hand.calls.append(self._call(hand.actor.run.remote(parcel.data, parcel.outside), item))

    def _call(self, ref: Any, item: Item | None = None) -> _Call:
        future: Future[Any] = ref.future()
        call = _Call(ref, asyncio.wrap_future(future, loop=self._loop), item)
        call.future.add_done_callback(_heard)
        return call

    async def _settle(self, hand: _Hand) -> None:
        """The worker's first call ends, or its time does, which began when the one before it ended. Raises _Gone."""
        call = hand.calls[0]
        seconds = LOAD_TIMEOUT if call.item is None else self._timeout
        await asyncio.wait([call.future], timeout=seconds)
        if not call.future.done():
            raise _Gone(
                SandboxTimeout(
                    f"it took more than {seconds:g} s; its worker was killed, and every sandbox there"
                )
            )
        try:
            reply = call.future.result()
        except RayError as error:
            said = " ".join(str(error).split())[:1000]
            raise _Gone(SandboxDied(f"its worker died: {said}")) from None
        hand.calls.popleft()
        if call.item is None:
            return
        self._judge(hand, call.item, reply)
        if not reply.usable:
            raise _Gone(None)

    def _judge(self, hand: _Hand, item: Item, reply: Reply) -> None:
        self._seconds = reply.seconds if self._seconds is None else 0.9 * self._seconds + 0.1 * reply.seconds
        item.answer = reply
        if reply.ok:
            self._finish(item)
        else:
            for packed in item.parcel.packed:  # one that could not be loaded may be, the next time
                hand.loaded[packed.ticket.id] = False
            self._retry(item)

    def _give_back(self, hand: _Hand, cause: SandboxError | None) -> None:
        """What a worker had when it went: the first has failed, if there is a cause; the others were never begun. Where
        it died with several, its last answer may not have been heard, so that nobody can tell whose fault it was.
        """
        items = [call.item for call in hand.calls if call.item is not None]
        hand.calls.clear()
        if isinstance(cause, SandboxDied) and len(items) > 1:
            cause = None
        for item in items:
            item.alone = True
        first = items[:1] if cause is not None else []
        with self._changed:
            self._todo.extendleft(reversed(items[len(first) :]))
        for item in first:
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


def _heard(future: asyncio.Future[Any]) -> None:
    """Whose error nobody waits for any more is no news."""
    if not future.cancelled():
        future.exception()
