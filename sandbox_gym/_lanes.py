"""The sandboxes of a vector environment: how each is put in place, begins an episode, fails, and is copied."""

from __future__ import annotations

import copy
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gymnasium.utils import seeding

from sandbox_gym._exchange import Exchange, Failure, RawExchange
from sandbox_gym._exchange_values import ValueExchange
from sandbox_gym._snapshot import Snapshot
from sandbox_gym._spares import Spares, warm
from sandbox_gym.channel import GuestError
from sandbox_gym.errors import ProtocolError, SandboxDied, SandboxError, SnapshotError
from sandbox_gym.guest import wire
from sandbox_gym.guest.wire import Op, WireError
from sandbox_gym.hosting import guest_error
from sandbox_gym.sandbox import Sandbox

_ATTEMPTS = 2  # copies on which a reset is tried


@dataclass(frozen=True)
class Statistics:
    """What a vector environment's sandboxes have done since it was made.

    `restores`: copies that lanes were given; `restore_seconds`: how long lanes waited for them, in all (a copy made
    ahead costs next to nothing), and `recent_restores` for each of the last 1000; `failures`: of lanes, whatever the
    reason; `sandboxes`: alive now, copies made ahead included.
    """

    restores: int
    restore_seconds: float
    recent_restores: tuple[float, ...]
    failures: int
    sandboxes: int


@dataclass
class _Lane:
    """What the host knows of a lane beside its last results. `chance` seeds the episodes that the user did not."""

    box: Sandbox | None = None  # None: it failed, and was not reset
    fresh: bool = True  # nothing has happened in it since it was copied
    chance: np.random.Generator = field(default_factory=lambda: seeding.np_random()[0])


@dataclass(frozen=True)
class _Moment:
    """What a lane's snapshot does not hold, because the host does."""

    ended: bool
    chance: np.random.Generator


class Lanes:
    """`n` copies of one warmed guest. `exchange` steps them; everything that is not a step goes through here.

    `request`: the arguments of MAKE; `how`: those of `Sandbox.create`; `reuse`: episodes begin in the lane's own
    sandbox instead of a new copy; `ahead`: how many copies are made ahead.
    """

    exchange: Exchange

    def __init__(
        self,
        n: int,
        request: dict[str, Any],
        how: dict[str, Any],
        *,
        reuse: bool,
        ahead: int,
        step_timeout: float,
        reset_timeout: float,
    ) -> None:
        self._n = n
        self._request = request
        self._how = how
        self._reuse = reuse
        self._ahead = ahead
        self.step_timeout = step_timeout
        self.reset_timeout = reset_timeout
        self._lanes = [_Lane() for _ in range(n)]
        self._moments: weakref.WeakKeyDictionary[Snapshot, _Moment] = weakref.WeakKeyDictionary()
        self._restores, self._restore_seconds, self._failures = 0, 0.0, 0
        self._recent: deque[float] = deque(maxlen=1000)  # seconds that each of the last restores took
        self._warm = warm(request, how, timeout=reset_timeout)
        self._open()
        self.hosting = self._warm.remote.hosting

    def _open(self) -> None:
        """All lanes as copies of the warmed guest. Starts another when that one turns out to be gone."""
        began = time.perf_counter()
        try:
            boxes = Sandbox.restore_many(self._warm.snapshot, self._n)
        except (SnapshotError, SandboxDied):
            self._warm = warm(self._request, self._how, timeout=self.reset_timeout, anew=True)
            began = time.perf_counter()
            boxes = Sandbox.restore_many(self._warm.snapshot, self._n)
        self._count_restores(self._n, began)
        self._spares = Spares(self._warm.snapshot, self._ahead)
        remote = self._warm.remote
        kind = ValueExchange if remote.observations.array is None else RawExchange
        self.exchange = kind(self._n, remote, self.step_timeout)
        for lane, box in enumerate(boxes):
            self._put(lane, box)

    def boxes(self, lanes: Iterable[int]) -> Iterator[Sandbox]:
        """The sandboxes of those that have one; none of a lane that has failed."""
        return (box for lane in lanes if (box := self._lanes[lane].box) is not None)

    def statistics(self) -> Statistics:
        """Counted up to now."""
        alive = sum(lane.box is not None for lane in self._lanes) + len(self._spares._ready)
        return Statistics(self._restores, self._restore_seconds, tuple(self._recent), self._failures, alive)

    def close(self) -> None:
        """Ends every lane and spare; returns when they are gone. Idempotent."""
        self._spares.retire([lane.box for lane in self._lanes if lane.box is not None])
        for lane, state in enumerate(self._lanes):
            self.exchange.disconnect(lane)
            state.box = None
        self._spares.close()

    def revive(self) -> None:
        """After the supervisor's end: another warmed guest, and all lanes anew. Does nothing while it lives."""
        if not self._warm.alive:
            self.close()
            self._warm = warm(self._request, self._how, timeout=self.reset_timeout)
            self._open()

    def raise_if_gone(self) -> None:
        if not self._warm.alive:
            raise SandboxDied("the supervisor of all lanes is gone: reset() starts another")

    def in_place(self, lanes: Iterable[int]) -> list[int]:
        """Those of `lanes` whose next episode begins in the sandbox of the last."""
        if not self._reuse or self._warm.remote.actions.nbytes == 0:  # an empty action would look the same
            return []
        return [lane for lane in lanes if self._lanes[lane].box is not None]

    # ---- episodes -----------------------------------------------------------------------------------------------

    def begin(self, seeds: Mapping[int, int | None], options: Any) -> dict[int, dict[str, Any]]:
        """Starts an episode in each lane of `seeds`: on a new copy, unless nothing has happened in the old one. The
        requests, whose answers `finish` takes.

        Without a seed, np_random goes on from the lane's last episode; the rest is seeded from the lane's `chance`.
        """
        requests: dict[int, dict[str, Any]] = {}
        carried = self._carried([lane for lane, seed in seeds.items() if seed is None])
        for lane, given in seeds.items():
            state, seed = self._lanes[lane], given
            if given is not None:
                state.chance = seeding.np_random(given)[0]
            elif state.fresh or state.box is None or not self._reuse:
                seed = int(state.chance.integers(2**31))
            requests[lane] = {"seed": seed, "options": options, "carry": carried.get(lane)}
        self._renew([lane for lane in seeds if self._is_stale(self._lanes[lane])])
        for lane, request in requests.items():
            self._post(lane, Op.RESET, request, self.reset_timeout)
        return requests

    def finish(self, requests: Mapping[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
        """The infos of episodes that `begin` started; the observations are in place. One that fails is tried once more,
        on another copy, seeded anew; then this raises what the environment did, or what befell the sandbox.
        """
        infos: dict[int, dict[str, Any]] = {}
        failed: dict[int, Exception] = {}
        for attempt in range(1, _ATTEMPTS + 1):
            failed = {}
            for lane in [lane for lane in requests if lane not in infos]:
                try:
                    infos[lane] = self._see(lane, self._wait(lane, Op.RESET, self.reset_timeout))
                except Failure as error:
                    failed[lane] = self._translated(lane, error)
                    self.fail(lane, error)
            if not failed:
                return infos
            self.raise_if_gone()
            if attempt < _ATTEMPTS:
                self._renew(list(failed))
                for lane in failed:
                    # It came out of a guest, and may be what made the reset fail.
                    requests[lane]["carry"] = None
                    self._post(lane, Op.RESET, requests[lane], self.reset_timeout)
        raise next(iter(failed.values()))

    def _is_stale(self, state: _Lane) -> bool:
        return state.box is None or not (state.fresh or self._reuse)

    def _carried(self, lanes: list[int]) -> dict[int, Any]:
        """np_random of the lanes' last episodes, where there was one and its sandbox still answers."""
        lanes = [lane for lane in lanes if not self._lanes[lane].fresh and self._lanes[lane].box is not None]
        if self._reuse or not lanes:
            return {}
        for lane in lanes:
            self._post(lane, Op.RESET, {"what": "chance"}, self.step_timeout)
        found: dict[int, Any] = {}
        for lane in lanes:
            try:
                found[lane] = self._wait(lane, Op.RESET, self.step_timeout)
            except Failure as error:
                self.fail(lane, error)
        return found

    # ---- copies -------------------------------------------------------------------------------------------------

    def capture(self, lane: int, *, ended: bool) -> Snapshot:
        """A snapshot of a lane, which runs on. `ended` is kept with it. Raises SnapshotError."""
        state = self._lanes[lane]
        if state.box is None:
            raise SnapshotError(f"lane {lane} has failed: reset it first")
        snapshot = state.box.snapshot()
        snapshot.kind = self.hosting.kind
        self.exchange.connect(lane, state.box._live.channel)
        self._moments[snapshot] = _Moment(ended, copy.deepcopy(state.chance))
        return snapshot

    def adopt(self, chosen: Mapping[int, Snapshot], seeds: Mapping[int, int | None]) -> dict[int, bool]:
        """Lanes become copies of snapshots, all or none, reseeded where there is a seed; which had `ended`."""
        groups: dict[Snapshot, list[int]] = {}
        for lane, snapshot in chosen.items():
            snapshot.check_kind(self.hosting.kind)
            groups.setdefault(snapshot, []).append(lane)
        copies: dict[int, Sandbox] = {}
        began = time.perf_counter()
        try:
            for snapshot, group in groups.items():
                copies.update(zip(group, Sandbox.restore_many(snapshot, len(group))))
            for lane, box in copies.items():
                box._reseed(seeds[lane])
        except BaseException:
            self._spares.retire(list(copies.values()))
            raise
        self._count_restores(len(copies), began)
        ended: dict[int, bool] = {}
        for lane, box in copies.items():
            self._put(lane, box)
            state, seed, moment = self._lanes[lane], seeds[lane], self._moments.get(chosen[lane])
            state.fresh = False
            ended[lane] = moment is not None and moment.ended
            if seed is not None:
                state.chance = seeding.np_random(seed)[0]
            elif moment is not None:
                state.chance = copy.deepcopy(moment.chance)
        return ended

    def recall(self, lanes: Sequence[int]) -> dict[int, dict[str, Any]]:
        """The last infos of lanes that are copies; their last observations are in place."""
        answers = self.call(lanes, Op.RESET, {"what": "again"}, self.step_timeout)
        return {lane: self._see(lane, answer) for lane, answer in zip(lanes, answers)}

    def _put(self, lane: int, box: Sandbox) -> None:
        """The lane goes on in another sandbox; what it had ends in the background."""
        state = self._lanes[lane]
        if state.box is not None:
            self._spares.retire([state.box])
        state.box, state.fresh = box, True
        self.exchange.connect(lane, box._live.channel)

    def _renew(self, lanes: list[int]) -> None:
        """Puts lanes on copies that nobody has used."""
        if not lanes:
            return
        began = time.perf_counter()
        try:
            boxes = self._spares.take(len(lanes))
        except SandboxError:
            self.raise_if_gone()
            raise
        self._count_restores(len(boxes), began)
        for lane, box in zip(lanes, boxes):
            self._put(lane, box)

    def _count_restores(self, n: int, began: float) -> None:
        taken = time.perf_counter() - began
        self._restores += n
        self._restore_seconds += taken
        self._recent.extend([taken / n] * n if n else ())

    # ---- requests -----------------------------------------------------------------------------------------------

    def fail(self, lane: int, error: Exception) -> str:
        """Ends a lane's sandbox over an error; the reason, in words."""
        state = self._lanes[lane]
        self.exchange.disconnect(lane)
        box, state.box = state.box, None
        if box is None:
            return str(error)
        self._failures += 1
        if isinstance(error, GuestError):
            self._spares.retire([box])
            return str(error)
        return f"{type(error).__name__}: {box._fatal(error)}"

    def call(self, lanes: Iterable[int], op: Op, value: Any, timeout: float) -> list[Any]:
        """The same request to each of `lanes`, all at once. Raises the first failure, once all have answered."""
        lanes = list(lanes)
        for lane in lanes:
            self._post(lane, op, value, timeout)
        answers: list[Any] = []
        failures: list[Exception] = []
        for lane in lanes:
            try:
                answers.append(self._wait(lane, op, timeout))
            except Failure as error:
                failures.append(self._translated(lane, error))
                if not isinstance(error, GuestError):
                    self.fail(lane, error)
        if failures:
            raise failures[0]
        return answers

    def _translated(self, lane: int, error: Exception) -> Exception:
        box = self._lanes[lane].box
        return guest_error(error, box.name) if box is not None and isinstance(error, GuestError) else error

    def _post(self, lane: int, op: Op, value: Any, timeout: float) -> None:
        """Sends a request; a guest that can't be reached is noticed by `_wait`."""
        box = self._lanes[lane].box
        if box is not None:
            meta, buffers = wire.encode(value)
            try:
                box._live.channel.post(op, meta, *buffers, timeout=timeout)
            except Failure:
                return

    def _wait(self, lane: int, op: Op, timeout: float) -> Any:
        """The answer to `_post`. Raises one of `Failure`."""
        box = self._lanes[lane].box
        if box is None:
            raise SandboxDied(f"lane {lane} has failed: reset it first")
        channel = box._live.channel
        try:
            frame = channel.wait(op, timeout=timeout)
            return wire.decode(frame.meta, frame.data)
        except WireError as error:
            raise ProtocolError(f"sandbox {box.name}: {error}") from None
        finally:
            self.exchange.connect(lane, channel)

    def _see(self, lane: int, answer: Any) -> dict[str, Any]:
        """Takes in what RESET answered: the observation becomes the lane's last, the info is returned."""
        try:
            dumped, info = answer
            if not isinstance(info, dict):
                raise WireError(f"an info that is no dict but {type(info).__name__}")
            self.exchange.set(lane, self._warm.remote.observations.load(dumped))
        except (WireError, TypeError, ValueError) as error:
            raise ProtocolError(f"lane {lane}: {error}") from None
        self._lanes[lane].fresh = False
        return info
