"""One worker as the driver knows it: what it was told to do, which snapshots it has, and how long it may take."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict, deque
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from sandbox_gym.errors import SandboxDied, SandboxError, SandboxTimeout
from sandbox_gym.ray.nodes import Needs
from sandbox_gym.ray.travel import LOAD_TIMEOUT, Parcel
from sandbox_gym.ray.worker import Reply, Share, Worker

START_TIMEOUT = LOAD_TIMEOUT  # seconds
_MOST_LOADED = 8  # snapshots of items that a worker keeps
_MOST_SAID = 1000  # characters of Ray's words on a death


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


class Gone(Exception):
    """A worker is of no use any more. `cause`: what the item it was at failed of, if it was at any; `complaint`: what
    it said of its start.
    """

    def __init__(self, cause: SandboxError | None = None, complaint: str | None = None) -> None:
        super().__init__(str(cause or complaint))
        self.cause = cause
        self.complaint = complaint


@dataclass(eq=False)
class _Call:
    """`item`: None for one that only brings snapshots."""

    ref: Any
    future: asyncio.Future[Any]
    item: Item | None


class Hand:
    """Made in an event loop, where all of it is called. `kill` ends it, whatever it does."""

    def __init__(self, node: str, share: Share, needs: Needs) -> None:
        self.node = node
        self.pid: int | None = None  # once it is open
        self._share = share
        self._calls: deque[_Call] = deque()
        self._loaded: OrderedDict[str, bool] = OrderedDict()  # snapshots that it has; False: perhaps not
        place = NodeAffinitySchedulingStrategy(node, soft=False)
        options = {**needs.options, "scheduling_strategy": place, "max_restarts": 0, "max_task_retries": 0}
        self._actor = ray.remote(Worker).options(**options).remote()

    async def open(self, function: Parcel, code: Any, gone: frozenset[int]) -> None:
        """`code`: the reference of the function's pickle; `gone`: see Worker.open. Raises Gone."""
        ref = self._actor.open.remote([code], function.outside, function.packed, share=self._share, gone=gone)
        try:
            self.pid = await asyncio.wait_for(_future(ref), START_TIMEOUT)
        except RayTaskError as error:
            raise Gone(complaint=f"{type(error.cause).__name__}: {error.cause}") from None
        except (RayError, asyncio.TimeoutError):
            raise Gone() from None

    @property
    def items(self) -> list[Item]:
        """What it has to do, and is at."""
        return [call.item for call in self._calls if call.item is not None]

    def send(self, item: Item) -> None:
        parcel = item.parcel
        needed = {packed.ticket.id: packed for packed in parcel.packed}
        missing = [packed for id, packed in needed.items() if not self._loaded.get(id)]
        for id in needed:
            self._loaded[id] = True
            self._loaded.move_to_end(id)
        if missing:
            most = max(_MOST_LOADED, len(needed))
            forget = [self._loaded.popitem(last=False)[0] for _ in range(len(self._loaded) - most)]
            self._call(self._actor.load.remote(missing, forget), None)
        self._call(self._actor.run.remote(parcel.data, parcel.outside), item)

    async def next_done(self, timeout: float | None) -> Item:
        """The next item that ends, with its answer. `timeout`: its seconds, which began when the one before ended; to
        bring its snapshots takes none of them. Raises Gone.
        """
        while True:
            call = self._calls[0]
            seconds = LOAD_TIMEOUT if call.item is None else timeout
            await asyncio.wait([call.future], timeout=seconds)
            if not call.future.done():
                told = f"it took more than {seconds:g} s; its worker was killed, and every sandbox there"
                raise Gone(SandboxTimeout(told))
            try:
                reply = call.future.result()
            except RayError as error:
                how = "failed" if isinstance(error, RayTaskError) else "died"
                said = " ".join(str(error).split())[:_MOST_SAID]
                raise Gone(SandboxDied(f"its worker {how}: {said}")) from None
            self._calls.popleft()
            if call.item is not None:
                call.item.answer = reply
                if not reply.ok:
                    # One that could not be loaded may be, the next time.
                    self._loaded |= {packed.ticket.id: False for packed in call.item.parcel.packed}
                return call.item

    def kill(self) -> None:
        if ray.is_initialized():  # else this would start another Ray
            with contextlib.suppress(Exception):  # it is gone
                ray.kill(self._actor)

    def _call(self, ref: Any, item: Item | None) -> None:
        self._calls.append(_Call(ref, _future(ref), item))


def _future(ref: Any) -> asyncio.Future[Any]:
    there: Future[Any] = ref.future()
    here = asyncio.wrap_future(there)
    here.add_done_callback(_heard)
    return here


def _heard(future: asyncio.Future[Any]) -> None:
    """An error that nobody waits for any more is no news."""
    if not future.cancelled():
        future.exception()
