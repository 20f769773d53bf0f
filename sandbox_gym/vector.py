"""`gym.make_vec("Sandbox-v0", num_envs=n, env_id=...)`: lanes that are sandboxes, all copies of one warmed guest."""

from __future__ import annotations

import copy as copying
import operator
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

import gymnasium
import numpy as np
from gymnasium.utils import seeding
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space, iterate

from sandbox_gym._exchange import Exchange, Failure, RawExchange, ValueExchange
from sandbox_gym._snapshot import Snapshot
from sandbox_gym._spares import Spares, warm
from sandbox_gym.api import Rng
from sandbox_gym.channel import GuestError
from sandbox_gym.errors import ProtocolError, SandboxDied, SandboxError, SnapshotError
from sandbox_gym.guest import wire
from sandbox_gym.guest.wire import Op, WireError
from sandbox_gym.hosting import guest_error, plain
from sandbox_gym.sandbox import Sandbox
from sandbox_gym.seeds import copy_seeds

_STRIKES = 3  # failures of a lane, with no step between them that succeeded, after which it is no accident
_ATTEMPTS = 2  # copies on which a reset is tried


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


class SandboxVectorEnv(VectorEnv[Any, Any, Any]):
    """`num_envs` sandboxes that step together, each with a Gymnasium environment; equal to SyncVectorEnv in all it gives.

    `env_id`, `entry_point`, `env_kwargs`, `image`, `step_timeout`, `reset_timeout` and the limits: as in `SandboxEnv`.
    All lanes are copies of one guest in which the environment was made once; it is kept for the next vector environment
    of the same kind. `copy=False` hands out observations that change with the step after the next.

    Resets. `fresh="snapshot"`: each episode starts in an untouched copy of that guest, with nothing that an earlier
    one left in memory or on disk; `spares` of them are made ahead in the background. `fresh="reuse"`: it starts where
    the last one ended, by the environment's own reset. That is faster where episodes are short (a copy costs what
    some fifty steps of CartPole do), and trusts the environment to clean up after itself.

    Seeds: as in SyncVectorEnv, `reset(seed=s)` seeds lane i with s + i. An episode begun without a seed goes on with
    its lane's np_random, which is carried into the new copy; what else the environment draws from (`random`, NumPy's
    global state) is seeded anew, reproducibly after a seeded reset. So lanes never replay an episode, and never each
    other's.

    Failures: a lane whose guest dies, hangs, raises, or breaks the protocol ends its episode: truncated, with
    reward 0.0, its last observation, and the reason in `infos["sandbox_error"]` (an object array, with its mask
    `_sandbox_error`). At its reset it comes back as a fresh copy. Other lanes are not touched, and wait at most
    `step_timeout` seconds. One that fails three times without a step that succeeds makes `step` raise.

    Not supported: `call`, `get_attr`, `set_attr`, which would hand live objects over.
    """

    metadata: dict[str, Any] = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012

    def __init__(
        self,
        num_envs: int = 1,
        env_id: str | None = None,
        *,
        entry_point: str | None = None,
        env_kwargs: dict[str, Any] | None = None,
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        fresh: Literal["snapshot", "reuse"] = "snapshot",
        copy: bool = True,
        spares: int | None = None,
        backend: str = "native",
        image: Any = None,
        step_timeout: float = 30.0,
        reset_timeout: float = 60.0,
        render_mode: str | None = None,
        max_episode_steps: int | None = None,
        **limits: Any,
    ) -> None:
        if (env_id is None) == (entry_point is None):
            raise ValueError("give an env_id, or an entry_point='module:Class'")
        if fresh not in ("snapshot", "reuse"):
            raise ValueError(f"fresh is 'snapshot' or 'reuse', not {fresh!r}")
        if num_envs < 1:
            raise ValueError(f"num_envs is at least 1, not {num_envs}")
        if limits.get("idle_timeout") is not None:
            raise ValueError("lanes are not stopped when idle: leave idle_timeout out, and close() when done")
        self.num_envs = num_envs
        self.autoreset_mode = AutoresetMode(autoreset_mode)
        self.copy = copy
        self._reuse = fresh == "reuse"
        self._step_timeout = step_timeout
        self._reset_timeout = reset_timeout
        self._request = {
            "env_id": env_id,
            "entry_point": entry_point,
            "env_kwargs": env_kwargs,
            "render_mode": render_mode,
            "max_episode_steps": max_episode_steps,
        }
        self._how = {"backend": backend, "image": image, **limits}
        ahead = (1 if self._reuse else max(2, num_envs // 4)) if spares is None else spares
        self._ahead = ahead
        self._moments: weakref.WeakKeyDictionary[Snapshot, _Moment] = weakref.WeakKeyDictionary()
        self._lanes = [_Lane() for _ in range(num_envs)]
        self._all = list(range(num_envs))
        self._struck: dict[int, int] = {}  # failures of lanes that have made no step since
        self._ended = np.zeros(num_envs, np.bool_)  # lanes whose episode is over and not reset yet
        self._warm = warm(self._request, self._how, timeout=reset_timeout)
        self._open()
        hosting = self._remote.hosting
        self.render_mode = hosting.render_mode
        self.metadata = {**hosting.metadata, "autoreset_mode": self.autoreset_mode}
        self.single_action_space = hosting.action_space
        self.single_observation_space = hosting.observation_space
        self.action_space = batch_space(hosting.action_space, num_envs)
        self.observation_space = batch_space(hosting.observation_space, num_envs)

    def _open(self) -> None:
        """All lanes as copies of the warmed guest. Starts another when that one turns out to be gone."""
        try:
            boxes = Sandbox.restore_many(self._warm.snapshot, self.num_envs)
        except (SnapshotError, SandboxDied):
            self._warm = warm(self._request, self._how, timeout=self._reset_timeout, anew=True)
            boxes = Sandbox.restore_many(self._warm.snapshot, self.num_envs)
        self._remote = self._warm.remote
        self._spares = Spares(self._warm.snapshot, self._ahead)
        kind = ValueExchange if self._remote.observations.array is None else RawExchange
        self._exchange: Exchange = kind(self.num_envs, self._remote, self._step_timeout)
        for lane, box in enumerate(boxes):
            self._put(lane, box)

    # ---- Gymnasium --------------------------------------------------------------------------------------------

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Starts episodes: of all lanes, or of those in `options["reset_mask"]` (bool [num_envs]).

        Raises:
            ValueError, TypeError: a seed list or a mask of another form.
            SandboxDied: there is no supervisor, and none can be started.
            Whatever the environment's own reset raises.
        """
        self._check_open()
        seeds = self._seeds(seed)
        mask = np.ones(self.num_envs, np.bool_)
        if options is not None and "reset_mask" in options:
            mask = self._check_mask(options["reset_mask"])
            options = {key: value for key, value in options.items() if key != "reset_mask"}
        plain(options, "options")
        if not self._warm.alive:
            self._start_over()
        lanes = np.flatnonzero(mask).tolist()
        infos = self._restart(lanes, {lane: seeds[lane] for lane in lanes}, options)
        return self._exchange.batch(copy=self.copy), self._merge(infos)

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """One step of every lane. Raises SandboxDied when the supervisor is gone: `reset` starts another."""
        ended, lanes, over = self._ended, self._all, []
        if ended.any():
            if self.autoreset_mode is AutoresetMode.DISABLED:
                raise AssertionError(f"lanes {np.flatnonzero(ended).tolist()} have ended: reset them first")
            over = np.flatnonzero(ended).tolist()
            lanes = np.flatnonzero(~ended).tolist()
        self._exchange.post(actions, lambda: list(iterate(self.action_space, actions)), lanes)
        # Guests step while this process looks after the episodes that begin.
        begun = self._begin(over, dict.fromkeys(over), None) if over else None
        rewards, terminations, truncations, infos, failures = self._exchange.collect(lanes)
        if begun is not None:
            infos.update(self._finish(begun))
        if failures:
            for lane, error in failures.items():
                infos[lane] = {"sandbox_error": self._fail(lane, error)}
            truncations[list(failures)] = True
        if failures or self._struck:
            self._count_strikes(lanes, failures)
        self._ended = ended = terminations | truncations
        merged: dict[str, Any] = {}
        if self.autoreset_mode is AutoresetMode.SAME_STEP and ended.any():
            merged = self._reset_now(np.flatnonzero(ended).tolist(), infos, failures)
            self._ended = np.zeros(self.num_envs, np.bool_)
        elif infos:
            merged = self._merge(infos)
        return self._exchange.batch(copy=self.copy), rewards, terminations, truncations, merged

    def render(self) -> tuple[Any, ...]:
        """A frame of each lane."""
        return tuple(self._call(self._all, Op.RENDER, dict.fromkeys(self._all), self._step_timeout))

    def call(self, name: str, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises NotImplementedError: a sandbox hands out no live objects."""
        raise NotImplementedError(
            f"{name!r} lives inside the sandboxes: give env_kwargs when making them, or use render(), "
            "reset(options=...) and snapshot()"
        )

    def get_attr(self, name: str) -> NoReturn:
        """Raises NotImplementedError, as `call`."""
        self.call(name)

    def set_attr(self, name: str, values: Any) -> NoReturn:
        """Raises NotImplementedError, as `call`."""
        self.call(name)

    def close_extras(self, **kwargs: Any) -> None:
        """Ends every lane and spare. Snapshots that you took live on."""
        boxes = [lane.box for lane in self._lanes if lane.box is not None]
        for lane in self._all:
            self._exchange.disconnect(lane)
            self._lanes[lane].box = None
        self._spares.retire(boxes)
        self._spares.close()

    # ---- snapshots --------------------------------------------------------------------------------------------

    def snapshot(self, mask: Any = None) -> list[Snapshot | None]:
        """Of each lane, or of those in `mask` (bool [num_envs]) with None for the others; all lanes run on.

        Raises SnapshotError: a lane can't be captured, or has failed and was not reset.
        """
        self._check_open()
        chosen = np.ones(self.num_envs, np.bool_) if mask is None else self._check_mask(mask)
        return [self._capture(lane) if chosen[lane] else None for lane in self._all]

    def restore(
        self, snapshots: Sequence[Snapshot | None], *, rng: Rng = "same"
    ) -> tuple[Any, dict[str, Any]]:
        """Lanes become copies of snapshots (of any lane, or of a SandboxEnv of the same kind), None leaves one alone.

        The observations and infos of that moment. An episode that was over there is over again. `rng` as in
        `Sandbox.restore`; copies that diverge differ from each other too. Raises SnapshotError.
        """
        self._check_open()
        if len(snapshots) != self.num_envs:
            raise ValueError(f"restore takes {self.num_envs} snapshots or Nones, not {len(snapshots)}")
        places: dict[Snapshot, list[int]] = {}
        for lane, snapshot in enumerate(snapshots):
            if snapshot is not None:
                places.setdefault(snapshot, []).append(lane)
        lanes = sorted(lane for group in places.values() for lane in group)
        seeds = dict(zip(lanes, copy_seeds(rng, len(lanes))))
        copies: dict[int, Sandbox] = {}
        try:
            for snapshot, group in places.items():
                copies.update(zip(group, Sandbox.restore_many(snapshot, len(group))))
        except BaseException:
            self._spares.retire(list(copies.values()))
            raise
        for lane in lanes:
            moment = self._moments.get(snapshots[lane])  # type: ignore[arg-type]
            self._adopt(lane, copies[lane], seeds[lane], moment)
        again = self._call(lanes, Op.RESET, {lane: {"what": "again"} for lane in lanes}, self._reset_timeout)
        infos = {lane: self._see(lane, answer) for lane, answer in zip(lanes, again)}
        return self._exchange.batch(copy=self.copy), self._merge(infos)

    def branch(self, source: int, targets: Sequence[int], *, rng: Rng = "same") -> tuple[Any, dict[str, Any]]:
        """Lanes `targets` become copies of lane `source`: elapsed steps, an end that awaits its reset, and all.

        Returns and raises what `restore` does.
        """
        targets = [operator.index(target) for target in targets if target != source]
        snapshot = self._capture(source)
        try:
            return self.restore([snapshot if lane in targets else None for lane in self._all], rng=rng)
        finally:
            snapshot.delete()

    def _capture(self, lane: int) -> Snapshot:
        box = self._lanes[lane].box
        if box is None:
            raise SnapshotError(f"lane {lane} has failed: reset it first")
        snapshot = box.snapshot()
        self._exchange.connect(lane, box._live.channel)
        self._moments[snapshot] = _Moment(bool(self._ended[lane]), copying.deepcopy(self._lanes[lane].chance))
        return snapshot

    def _adopt(self, lane: int, box: Sandbox, seed: int | None, moment: _Moment | None) -> None:
        """A copy of a snapshot takes a lane's place."""
        box._reseed(seed)
        self._put(lane, box)
        state = self._lanes[lane]
        state.fresh = False
        self._ended[lane] = moment is not None and moment.ended
        if seed is not None:
            state.chance = seeding.np_random(seed)[0]
        elif moment is not None:
            state.chance = copying.deepcopy(moment.chance)

    # ---- episodes -----------------------------------------------------------------------------------------------

    def _restart(
        self, lanes: list[int], seeds: dict[int, int | None], options: Any
    ) -> dict[int, dict[str, Any]]:
        """Resets lanes; their infos."""
        return self._finish(self._begin(lanes, seeds, options))

    def _begin(
        self, lanes: list[int], seeds: dict[int, int | None], options: Any
    ) -> dict[int, dict[str, Any]]:
        """Puts lanes on fresh copies and sends each its RESET; the requests, for `_finish`."""
        requests: dict[int, dict[str, Any]] = {}
        carried = self._carried([lane for lane in lanes if seeds[lane] is None])
        for lane in lanes:
            state, seed = self._lanes[lane], seeds[lane]
            if seed is not None:
                state.chance = seeding.np_random(seed)[0]
            elif not (self._reuse and not state.fresh and state.box is not None):
                seed = int(state.chance.integers(2**31))
            requests[lane] = {"seed": seed, "options": options, "carry": carried.get(lane)}
        self._renew([lane for lane in lanes if self._stale(lane)])
        for lane in lanes:
            self._post(lane, Op.RESET, requests[lane], self._reset_timeout)
        return requests

    def _stale(self, lane: int) -> bool:
        state = self._lanes[lane]
        return state.box is None or not (state.fresh or self._reuse)

    def _carried(self, lanes: list[int]) -> dict[int, Any]:
        """np_random of episodes that are followed by one without a seed; of lanes that can still tell."""
        lanes = [lane for lane in lanes if not self._lanes[lane].fresh and self._lanes[lane].box is not None]
        if self._reuse or not lanes:
            return {}
        for lane in lanes:
            self._post(lane, Op.RESET, {"what": "chance"}, self._step_timeout)
        found: dict[int, Any] = {}
        for lane in lanes:
            try:
                found[lane] = self._wait(lane, Op.RESET, self._step_timeout)
            except Failure as error:
                self._fail(lane, error)
        return found

    def _finish(self, requests: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
        """The infos of RESETs sent by `_begin`. One that fails is tried once more, on another copy."""
        infos: dict[int, dict[str, Any]] = {}
        failed: dict[int, Exception] = {}
        for attempt in range(1, _ATTEMPTS + 1):
            failed = {}
            for lane in [lane for lane in requests if lane not in infos]:
                try:
                    infos[lane] = self._see(lane, self._wait(lane, Op.RESET, self._reset_timeout))
                except Failure as error:
                    box = self._lanes[lane].box
                    failed[lane] = (
                        guest_error(error, box.name) if box and isinstance(error, GuestError) else error
                    )
                    self._fail(lane, error)
            if not failed:
                break
            if attempt < _ATTEMPTS:
                self._renew(list(failed))
                for lane in failed:
                    self._post(lane, Op.RESET, requests[lane], self._reset_timeout)
        self._ended[list(requests)] = False
        if failed:
            self._ended[list(failed)] = True
            self._raise_if_supervisor_gone()
            raise next(iter(failed.values()))
        return infos

    def _reset_now(
        self, lanes: list[int], infos: dict[int, Any], failures: dict[int, Exception]
    ) -> dict[str, Any]:
        """SAME_STEP: ends and begins episodes within one step; all lanes' infos, merged."""
        finals = {
            lane: {"final_obs": self._exchange.get(lane), "final_info": infos.get(lane, {})} for lane in lanes
        }
        begun = self._restart(lanes, dict.fromkeys(lanes), None)
        for lane in lanes:
            reason = {"sandbox_error": infos[lane]["sandbox_error"]} if lane in failures else {}
            infos[lane] = {**begun[lane], **reason}
        merged: dict[str, Any] = {}
        for lane in self._all:
            if lane in finals:
                merged = self._add_info(merged, finals[lane], lane)
            merged = self._add_info(merged, infos.get(lane, {}), lane)
        return merged

    def _merge(self, infos: dict[int, dict[str, Any]]) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        for lane in sorted(infos):
            merged = self._add_info(merged, infos[lane], lane)
        return merged

    # ---- lanes --------------------------------------------------------------------------------------------------

    def _put(self, lane: int, box: Sandbox) -> None:
        """The lane goes on in another sandbox; what it had ends in the background."""
        state = self._lanes[lane]
        if state.box is not None:
            self._spares.retire([state.box])
        state.box, state.fresh = box, True
        self._exchange.connect(lane, box._live.channel)

    def _renew(self, lanes: list[int]) -> None:
        """Puts lanes on copies that nobody has used."""
        if lanes:
            try:
                boxes = self._spares.take(len(lanes))
            except SandboxError:
                self._raise_if_supervisor_gone()
                raise
            for lane, box in zip(lanes, boxes):
                self._put(lane, box)

    def _fail(self, lane: int, error: Exception) -> str:
        """Ends a lane's sandbox over an error; the reason, for infos."""
        state = self._lanes[lane]
        self._exchange.disconnect(lane)
        box, state.box = state.box, None
        if box is None:
            return str(error)
        if isinstance(error, GuestError):
            self._spares.retire([box])
            return str(error)
        return f"{type(error).__name__}: {box._fatal(error)}"

    def _count_strikes(self, lanes: Sequence[int], failures: dict[int, Exception]) -> None:
        """Raises when lanes fail again and again, or when all are gone with their supervisor."""
        if failures:
            self._raise_if_supervisor_gone()
        for lane in lanes:
            self._struck[lane] = self._struck.get(lane, 0) + 1 if lane in failures else 0
        hopeless = [lane for lane, strikes in self._struck.items() if strikes >= _STRIKES]
        self._struck = {lane: strikes for lane, strikes in self._struck.items() if 0 < strikes < _STRIKES}
        if hopeless:
            error = failures[hopeless[0]]
            raise SandboxError(f"lane {hopeless[0]} failed at {_STRIKES} steps in a row: {error}") from error

    def _raise_if_supervisor_gone(self) -> None:
        if not self._warm.alive:
            raise SandboxDied("the supervisor of all lanes is gone: reset() starts another")

    def _start_over(self) -> None:
        """After the supervisor's end: another warmed guest, and all lanes anew."""
        for lane in self._lanes:
            lane.box = None
        self._spares.close()
        self._warm = warm(self._request, self._how, timeout=self._reset_timeout)
        self._open()

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
            self._exchange.connect(lane, channel)

    def _call(self, lanes: list[int], op: Op, values: dict[int, Any], timeout: float) -> list[Any]:
        """A request to each of `lanes`, all at once. Raises the first failure, once all have answered."""
        for lane in lanes:
            self._post(lane, op, values[lane], timeout)
        answers: list[Any] = []
        failed: Exception | None = None
        for lane in lanes:
            box = self._lanes[lane].box
            try:
                answers.append(self._wait(lane, op, timeout))
            except GuestError as error:
                failed = failed or guest_error(error, box.name if box else f"of lane {lane}")
            except Failure as error:
                self._fail(lane, error)
                self._ended[lane] = True
                failed = failed or error
        if failed is not None:
            raise failed
        return answers

    def _see(self, lane: int, answer: Any) -> dict[str, Any]:
        """Takes in what RESET answered: the observation becomes the lane's last, the info is returned."""
        try:
            dumped, info = answer
            if not isinstance(info, dict):
                raise WireError(f"an info that is no dict but {type(info).__name__}")
            self._exchange.set(lane, self._remote.observations.load(dumped))
        except (WireError, TypeError, ValueError) as error:
            raise ProtocolError(f"lane {lane}: {error}") from None
        self._lanes[lane].fresh = False
        return info

    # ---- checks -------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self.closed:
            raise gymnasium.error.ClosedEnvironmentError("this vector environment is closed")

    def _seeds(self, seed: int | Sequence[int | None] | None) -> list[int | None]:
        if seed is None:
            return [None] * self.num_envs
        if isinstance(seed, (int, np.integer)):
            return [int(seed) + lane for lane in self._all]
        if len(seed) != self.num_envs:
            raise ValueError(f"seeds for {self.num_envs} lanes are an int or as many ints, not {len(seed)}")
        return [None if one is None else int(one) for one in seed]

    def _check_mask(self, mask: Any) -> Any:
        if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_:
            raise TypeError(f"a mask is a numpy array of bools, not {getattr(mask, 'dtype', type(mask))}")
        if mask.shape != (self.num_envs,):
            raise ValueError(f"a mask has shape ({self.num_envs},), not {mask.shape}")
        if not mask.any():
            raise ValueError("a mask with no True in it chooses no lane")
        return mask.copy()
