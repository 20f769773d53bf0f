"""`@job`: a function that runs over a cluster, each of its calls with sandboxes of its own."""

from __future__ import annotations

import functools
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any, overload

import ray

from sandbox_gym._records import check_seconds
from sandbox_gym.api import parse_bytes
from sandbox_gym.errors import ItemFailed, SandboxError
from sandbox_gym.ray import nodes
from sandbox_gym.ray.hand import Item
from sandbox_gym.ray.pool import Pool
from sandbox_gym.ray.travel import Packing

_AHEAD = 8  # items that are drawn for each worker before a result is taken
_LOOK = 0.5  # seconds between turns of the progress bar
_MOST_SHOWN = 200  # characters of an item in an error


class _ThereTraceback(Exception):
    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


class Job:
    """What `job` makes of a function. A call runs it here; `map`, `map_unordered` and `starmap` run it on workers."""

    __name__: str

    def __init__(
        self, function: Callable[..., Any], needs: nodes.Needs, *, retries: int, timeout: float | None
    ) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._needs = needs
        self._retries = retries
        self._timeout = timeout

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def map(
        self,
        items: Iterable[Any],
        *,
        return_exceptions: bool = False,
        window: int | None = None,
        progress: bool | None = None,
    ) -> Iterator[Any]:
        """The function of each item, in the items' order, as they come.

        Nothing runs before the first result is asked for, and all workers and their sandboxes end with the last one, or
        when the iterator is closed or garbage. Items are drawn here, in your thread; `window`: how many may be drawn
        whose results you have not taken yet (8 for each worker), so that `items` may be endless. Workers go on with
        those meanwhile. `progress`: a bar on stderr; by default where that is a terminal.

        Snapshots in items, or that the function uses, arrive as snapshots of the worker's own, which its items share:
        none should delete them. Sandboxes that the function leaves open are ended. Ray is started if it isn't
        (`ray.init()`, which heeds RAY_ADDRESS).

        Raises:
            ItemFailed: an item failed, also when it was tried again; with `return_exceptions` it is yielded in the
                result's place.
            BackendUnavailable: no node can ever run such a worker; or none could start, and why.
            SnapshotError: a snapshot in an item can't be an archive.
        """
        return self._map(items, lambda item: (item,), True, return_exceptions, window, progress)

    def map_unordered(
        self,
        items: Iterable[Any],
        *,
        return_exceptions: bool = False,
        window: int | None = None,
        progress: bool | None = None,
    ) -> Iterator[Any]:
        """`map` in the order in which results are there."""
        return self._map(items, lambda item: (item,), False, return_exceptions, window, progress)

    def starmap(
        self,
        items: Iterable[Iterable[Any]],
        *,
        return_exceptions: bool = False,
        window: int | None = None,
        progress: bool | None = None,
    ) -> Iterator[Any]:
        """`map` of a function with several arguments: each item holds them all."""
        return self._map(items, tuple, True, return_exceptions, window, progress)

    def _map(
        self,
        items: Iterable[Any],
        arguments: Callable[[Any], tuple[Any, ...]],
        ordered: bool,
        return_exceptions: bool,
        window: int | None,
        progress: bool | None,
    ) -> Iterator[Any]:
        if window is not None and (type(window) is not int or window < 1):
            raise ValueError(f"window is an int above 0, not {window!r}")
        if not ray.is_initialized():
            ray.init()
        capacity = nodes.capacity(self._needs)
        total = len(items) if isinstance(items, Sized) else None
        bar = _bar(getattr(self, "__name__", "job"), total, progress)
        ahead = _Ahead(window, capacity)
        return self._results(iter(items), arguments, ordered, return_exceptions, ahead, bar)

    def _results(
        self,
        items: Iterator[Any],
        arguments: Callable[[Any], tuple[Any, ...]],
        ordered: bool,
        return_exceptions: bool,
        ahead: _Ahead,
        make_bar: Callable[[], Any],
    ) -> Iterator[Any]:
        packing = Packing()
        function = packing.pack(self._function)
        pool = Pool(function, self._needs, retries=self._retries, timeout=self._timeout)
        bar = make_bar()
        taken, more = 0, True
        try:
            while True:
                wanted = taken if ordered else None
                drawn = False
                # A result that is there does not wait for more than one item that is slow to come.
                while more and ahead.more(pool, taken) and not (drawn and pool.ready(wanted)):
                    try:
                        value = next(items)
                    except StopIteration:
                        more = False
                    else:
                        pool.submit(Item(pool.submitted, value, packing.pack(arguments(value))))
                        drawn = True
                if not more and taken == pool.submitted:
                    return
                while (item := pool.wait(wanted, _LOOK)) is None:
                    _advance(bar, pool)
                _advance(bar, pool)
                taken += 1
                result, failed = _outcome(item)
                if failed is not None and not return_exceptions:
                    raise failed
                del item  # whose arguments and answer would stay until the next
                yield result if failed is None else failed
                del result, failed
        finally:
            pool.close()
            if bar is not None:
                bar.close()


@overload
def job(function: Callable[..., Any], /) -> Job: ...
@overload
def job(
    *,
    cpus: float = ...,
    memory: int | str | None = ...,
    gpus: float = ...,
    resources: Mapping[str, float] | None = ...,
    retries: int = ...,
    timeout: float | None = ...,
    sandboxes_per_node: int = ...,
) -> Callable[[Callable[..., Any]], Job]: ...
def job(
    function: Callable[..., Any] | None = None,
    /,
    *,
    cpus: float = 1,
    memory: int | str | None = "1Gi",
    gpus: float = 0,
    resources: Mapping[str, float] | None = None,
    retries: int = 2,
    timeout: float | None = None,
    sandboxes_per_node: int = 1024,
) -> Job | Callable[[Callable[..., Any]], Job]:
    """A decorator: the function's `map` runs it over the cluster that Ray is connected to, or on this machine.

    `cpus`, `memory`, `gpus`, `resources` (Ray's own, by name) are what one worker is given of a node; there are as many
    workers as the nodes have free room for, and as there are items. `retries`: how often an item is tried again that
    raised, took longer than `timeout` seconds (its worker is killed then, with every sandbox there), or whose worker
    died. (One that waited at a worker that died, behind others, begins anew beside those tries.) `sandboxes_per_node`:
    how many sandboxes the workers of a node may have alive together, in equal shares; more are LimitExceeded.

        @job(cpus=1, memory="1Gi")
        def rollout(action):
            with Sandbox.restore(snapshot) as copy:
                return copy.run_code(f"play({action!r})").value

        best = max(rollout.map(["a", "b", "c"]))
    """
    for name, value in (("cpus", cpus), ("gpus", gpus), *(resources or {}).items()):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
            raise ValueError(f"{name} is a number from 0, not {value!r}")
    if not cpus:
        raise ValueError("cpus is above 0: it is what bounds how many workers a node gets")
    for name, count, least in (("retries", retries, 0), ("sandboxes_per_node", sandboxes_per_node, 1)):
        if type(count) is not int or count < least:
            raise ValueError(f"{name} is an int from {least}, not {count!r}")
    check_seconds("timeout", timeout, optional=True)
    memory_bytes = None if memory is None else parse_bytes(memory)
    needs = nodes.Needs(cpus, memory_bytes, gpus, dict(resources or {}), sandboxes_per_node)

    def decorate(function: Callable[..., Any]) -> Job:
        return Job(function, needs, retries=retries, timeout=timeout)

    return decorate if function is None else decorate(function)


@dataclass(frozen=True)
class _Ahead:
    """How many items may be drawn whose results are not taken."""

    window: int | None
    capacity: int

    def more(self, pool: Pool, taken: int) -> bool:
        most = self.window or _AHEAD * max(self.capacity, pool.workers)
        return pool.submitted - taken < most


def _outcome(item: Item) -> tuple[Any, ItemFailed | None]:
    """What the function returned, or how it failed."""
    answer = item.answer
    assert answer is not None
    if isinstance(answer, SandboxError):
        return None, _failed(item, answer, "")
    given: Any = None
    try:
        given = pickle.loads(answer.data) if answer.data else None
    except Exception as error:  # of a class that is not importable here
        if answer.ok:
            return None, _failed(item, error, "")
    if answer.ok:
        return given, None
    last_line = answer.traceback.strip().rpartition("\n")[2]
    cause = given if isinstance(given, BaseException) else SandboxError(last_line)
    return None, _failed(item, cause, answer.traceback)


def _failed(item: Item, cause: BaseException, traceback: str) -> ItemFailed:
    try:
        shown = repr(item.value)
    except Exception as error:
        shown = f"a {type(item.value).__name__} whose repr raises {error!r}"
    if len(shown) > _MOST_SHOWN:
        shown = f"{shown[:_MOST_SHOWN]}..."
    times = "once" if item.attempts <= 1 else f"{item.attempts} times, at last"
    failed = ItemFailed(f"item {item.index}, {shown}, failed {times} with {type(cause).__name__}: {cause}")
    failed.index, failed.item, failed.attempts, failed.cause = item.index, item.value, item.attempts, cause
    failed.__cause__ = cause
    if traceback:
        cause.__cause__ = _ThereTraceback(traceback)
    return failed


# ---- progress -----------------------------------------------------------------------------------------------------


def _bar(name: str, total: int | None, wanted: bool | None) -> Callable[[], Any]:
    """What makes a bar, or None where there is to be none. Raises ImportError when one is asked for without tqdm."""
    if wanted is None:
        try:
            import tqdm
        except ImportError:
            wanted = False
        else:
            wanted = sys.stderr.isatty()
    if not wanted:
        return lambda: None
    import tqdm

    return lambda: tqdm.tqdm(total=total, desc=name, unit="item", file=sys.stderr)


def _advance(bar: Any, pool: Pool) -> None:
    if bar is not None:
        bar.update(pool.completed - bar.n)
