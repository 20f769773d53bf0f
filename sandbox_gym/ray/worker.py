"""A job's worker: a process of Ray's that runs items one after the other, with a supervisor that stays warm."""

from __future__ import annotations

import gc
import os
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray import cloudpickle

from sandbox_gym._snapshot import Snapshot
from sandbox_gym.backends import lookup
from sandbox_gym.backends.shared import registry
from sandbox_gym.errors import LimitExceeded
from sandbox_gym.ray.travel import LOAD_TIMEOUT, Arrivals, Packed
from sandbox_gym.sandbox import Sandbox

_CAP = "SANDBOX_GYM_MAX_SANDBOXES"
_PATIENCE = 30.0  # seconds in which the sandboxes of a worker that was killed must be gone


@dataclass(frozen=True)
class Share:
    """What a node's hard cap on live sandboxes leaves for each of its `workers`."""

    sandboxes_per_node: int
    workers: int

    @property
    def cap(self) -> int:
        return self.sandboxes_per_node // self.workers


@dataclass(frozen=True)
class Reply:
    """Of one item. `data`: what was returned, pickled, or what was raised (b"" when it can't be) with its `traceback`.
    `usable`: False when this worker's sandboxes can't go on, since its supervisor was killed.
    """

    ok: bool
    data: bytes
    traceback: str
    seconds: float
    usable: bool


class Worker:
    """The actor. Nothing that an item does or raises makes a call fail, but what ends this process."""

    def __init__(self) -> None:
        self._arrivals = Arrivals()
        self._function: Callable[..., Any] | None = None
        self._snapshots = 0

    def open(
        self,
        function: Sequence[Any],
        outside: tuple[Any, ...],
        packed: Sequence[Packed],
        *,
        share: Share,
        gone: frozenset[int],
    ) -> int:
        """Makes ready, and returns this process's id. `function`: the reference of its pickle; `gone`: processes that
        were this node's workers before, whose sandboxes count until they have ended.

        Raises what stands in the way of sandboxes, or of the function, here.
        """
        os.environ[_CAP] = str(share.cap)
        lookup.shut_down()  # Ray may have used this process before, and then there is a supervisor with another cap
        _wait_for_the_end_of(gone)
        self._share = share
        self._backend = lookup.get("native")
        Sandbox.create().terminate()  # what the first one warms up is no item's time
        self._arrivals.load(packed)
        self._function = self._arrivals.unpack(ray.get(function[0], timeout=LOAD_TIMEOUT), outside)
        return os.getpid()

    def load(self, packed: Sequence[Packed], forget: Sequence[str]) -> None:
        """Snapshots that the next items need, and those that none will."""
        self._arrivals.forget(forget)
        self._arrivals.load(packed)

    def run(self, data: bytes, outside: tuple[Any, ...]) -> Reply:
        """The function's answer to arguments, after which no sandbox is left."""
        start = time.monotonic()
        ok, answer, text = self._answer(data, outside)
        for box in Sandbox.list():
            box.terminate()
        self._collect()
        return Reply(ok, answer, text, time.monotonic() - start, self._backend.alive())

    def _answer(self, data: bytes, outside: tuple[Any, ...]) -> tuple[bool, bytes, str]:
        assert self._function is not None
        try:
            return True, cloudpickle.dumps(self._function(*self._arrivals.unpack(data, outside))), ""
        except BaseException as error:  # also what would end this process: it is the item's
            shown = self._explained(error)
            text = "".join(traceback.format_exception(shown))
            traceback.clear_frames(error.__traceback__)  # they hold the item's environments
            try:
                return False, cloudpickle.dumps(shown.with_traceback(None)), text
            except Exception:
                return False, b"", text

    def _explained(self, error: BaseException) -> BaseException:
        """A cap that was reached, in the words of who set it."""
        if not isinstance(error, LimitExceeded) or _CAP not in str(error):
            return error
        share = self._share
        told = LimitExceeded(
            f"{str(error).partition(':')[0]}: sandboxes_per_node={share.sandboxes_per_node} is shared by up to "
            f"{share.workers} workers of a node. Terminate some, or give the job more of them, or more cpus, so that "
            "fewer workers share them"
        )
        return told.with_traceback(error.__traceback__)

    def _collect(self) -> None:
        """Snapshots in cycles of garbage are processes, of whose size Python's collector knows nothing."""
        if len(Snapshot.list()) > self._snapshots:
            gc.collect()
            self._snapshots = len(Snapshot.list())


def _wait_for_the_end_of(owners: frozenset[int]) -> None:
    """Of all sandboxes of these processes. Raises TimeoutError."""
    deadline = time.monotonic() + _PATIENCE
    while owners and (left := [row for row in registry.list_all() if row["owner_pid"] in owners]):
        if time.monotonic() > deadline:
            raise TimeoutError(f"sandboxes of workers that were killed still live: {left[:3]}")
        time.sleep(0.05)
