"""`gym.make_vec("Sandbox-v0", num_envs=n, env_id=...)`: lanes that are sandboxes, all copies of one warmed guest."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Literal, NoReturn

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space, iterate

from sandbox_gym import _audit
from sandbox_gym._lanes import Lanes, Statistics
from sandbox_gym._snapshot import Snapshot
from sandbox_gym.api import Rng
from sandbox_gym.errors import SandboxDied, SandboxError
from sandbox_gym.guest.wire import Op
from sandbox_gym.hosting import plain
from sandbox_gym.seeds import copy_seeds

_STRIKES = 3  # failures of a lane, with no step between them that succeeded, after which it is no accident


class SandboxVectorEnv(VectorEnv[Any, Any, Any]):
    """`num_envs` sandboxes that step together, each with an environment; equal to SyncVectorEnv, step by step.

    `env_id`, `entry_point`, `env_kwargs`, `image`, `step_timeout`, `reset_timeout` and the limits: as in `SandboxEnv`.
    All lanes are copies of one guest in which the environment was made once; it is kept for the next vector environment
    of the same kind. `copy=False` hands out observations that change with the step after the next, and with the next
    `reset`, `restore` or `branch`.

    Resets. `fresh="snapshot"`: each episode starts in an untouched copy of that guest, with nothing that an earlier
    one left in memory or on disk; `spares` of them are made ahead in the background. `fresh="reuse"`: it starts where
    the last one ended, by the environment's own reset. That is faster where episodes are short (a copy costs what
    over a hundred steps of CartPole do), and trusts the environment to clean up after itself.

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
    closed = True  # as long as there are no lanes, which Gymnasium's __del__ would close

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
        request = {
            "env_id": env_id,
            "entry_point": entry_point,
            "env_kwargs": env_kwargs,
            "render_mode": render_mode,
            "max_episode_steps": max_episode_steps,
        }
        reuse = fresh == "reuse"
        self._lanes = Lanes(
            num_envs,
            request,
            {"backend": backend, "image": image, **limits},
            reuse=reuse,
            ahead=(1 if reuse else max(2, num_envs // 4)) if spares is None else spares,
            step_timeout=step_timeout,
            reset_timeout=reset_timeout,
        )
        self.closed = False
        self._all = list(range(num_envs))
        self._ended: set[int] = set()  # lanes whose episode is over and not reset yet
        self._struck: dict[int, int] = {}  # failures of lanes that have made no step since
        hosting = self._lanes.hosting
        self.render_mode = hosting.render_mode
        self.metadata = {**hosting.metadata, "autoreset_mode": self.autoreset_mode}
        self.single_action_space = hosting.action_space
        self.single_observation_space = hosting.observation_space
        self.action_space = batch_space(hosting.action_space, num_envs)
        self.observation_space = batch_space(hosting.observation_space, num_envs)

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
        self._lanes.revive()
        chosen = {lane: seeds[lane] for lane in self._all if mask[lane]}
        self._ended.update(chosen)  # until they are reset, should that fail
        infos = self._lanes.finish(self._lanes.begin(chosen, options))
        self._ended.difference_update(chosen)
        return self._batch(), self._merge(infos)

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """One step of every lane. Raises SandboxDied when the supervisor is gone: `reset` starts another."""
        self._check_open()
        lanes, over, again = self._all, [], []
        if self._ended:
            if self.autoreset_mode is AutoresetMode.DISABLED:
                raise AssertionError(f"lanes {sorted(self._ended)} have ended: reset them first")
            again = self._lanes.in_place(self._ended)
            over = sorted(self._ended.difference(again))
            lanes = [lane for lane in lanes if lane not in self._ended]
        exchange = self._lanes.exchange
        try:
            exchange.post(actions, self._each, lanes, again)
        except KeyboardInterrupt:
            self._abandon()
            raise
        try:
            # While the guests step, this process looks after what else there is to do.
            if _audit.is_on():
                _audit.stepped(self._lanes.boxes(lanes))
            begun = self._lanes.begin(dict.fromkeys(over), None) if over else None
            if again:
                lanes = sorted((*lanes, *again)) if over else self._all
            rewards, terminations, truncations, ended, infos, failures = exchange.collect(lanes)
        except BaseException:
            self._abandon()
            raise
        if begun is not None:
            infos.update(self._lanes.finish(begun))
        for lane, error in failures.items():
            infos[lane] = {"sandbox_error": self._lanes.fail(lane, error)}
            truncations[lane] = True
            ended.add(lane)
        if failures or self._struck:
            self._count_strikes(lanes, failures)
        self._ended = ended
        if ended and self.autoreset_mode is AutoresetMode.SAME_STEP:
            merged = self._reset_now(sorted(ended), infos, failures)
        else:
            merged = self._merge(infos) if infos else {}
        return exchange.batch(copy=self.copy), rewards, terminations, truncations, merged

    def render(self) -> tuple[Any, ...]:
        """A frame of each lane."""
        frames = self._lanes.call(self._all, Op.RENDER, None, self._lanes.step_timeout)
        for lane, frame in enumerate(frames):
            for box in self._lanes.boxes([lane]):  # a lane that has failed has none
                _audit.drawn(box, frame)
        return tuple(frames)

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
        self._lanes.close()

    @property
    def statistics(self) -> Statistics:
        """Restores and what they took, failures of lanes, live sandboxes."""
        return self._lanes.statistics()

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
        chosen = {lane: snapshot for lane, snapshot in enumerate(snapshots) if snapshot is not None}
        seeds = dict(zip(chosen, copy_seeds(rng, len(chosen))))
        adopted = self._lanes.adopt(chosen, seeds)
        self._ended.difference_update(adopted)
        self._ended.update(lane for lane, ended in adopted.items() if ended)
        infos = self._lanes.recall(list(chosen))
        return self._batch(), self._merge(infos)

    def branch(self, source: int, targets: Sequence[int], *, rng: Rng = "same") -> tuple[Any, dict[str, Any]]:
        """Lanes `targets` become copies of lane `source`: elapsed steps, an end that awaits its reset, and all.

        Returns and raises what `restore` does.
        """
        self._check_open()
        places = {operator.index(target) for target in targets} - {source}
        if not places <= set(self._all):
            raise IndexError(f"lanes are 0 to {self.num_envs - 1}, not {sorted(places)}")
        snapshot = self._capture(source)
        try:
            return self.restore([snapshot if lane in places else None for lane in self._all], rng=rng)
        finally:
            snapshot.delete()

    def _capture(self, lane: int) -> Snapshot:
        return self._lanes.capture(lane, ended=lane in self._ended)

    # ---- results ------------------------------------------------------------------------------------------------

    def _batch(self) -> Any:
        return self._lanes.exchange.batch(copy=self.copy)

    def _merge(self, infos: dict[int, dict[str, Any]]) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        for lane in sorted(infos):
            merged = self._add_info(merged, infos[lane], lane)
        return merged

    def _reset_now(
        self, lanes: list[int], infos: dict[int, dict[str, Any]], failures: dict[int, Exception]
    ) -> dict[str, Any]:
        """SAME_STEP: the episodes that ended are followed by the next within the step; all lanes' infos, merged."""
        get = self._lanes.exchange.get
        finals = {lane: {"final_obs": get(lane), "final_info": infos.get(lane, {})} for lane in lanes}
        begun = self._lanes.finish(self._lanes.begin(dict.fromkeys(lanes), None))
        self._ended = set()  # before infos are merged, which raises where they don't go together
        merged: dict[str, Any] = {}
        for lane in self._all:
            info = infos.get(lane, {})
            if lane in finals:
                merged = self._add_info(merged, finals[lane], lane)
                info = {**begun[lane], **(info if lane in failures else {})}
            merged = self._add_info(merged, info, lane)
        return merged

    def _abandon(self) -> None:
        """After an interrupt or an error while guests step: what they answer would be taken for the next step's."""
        for lane in self._all:
            self._lanes.fail(lane, SandboxDied("a step was interrupted"))
        self._ended.update(self._all)

    def _count_strikes(self, lanes: Sequence[int], failures: dict[int, Exception]) -> None:
        """Raises when a lane fails again and again, or when all are gone with their supervisor."""
        if failures:
            self._lanes.raise_if_gone()
        for lane in lanes:
            self._struck[lane] = self._struck.get(lane, 0) + 1 if lane in failures else 0
        hopeless = [lane for lane, strikes in self._struck.items() if strikes >= _STRIKES]
        self._struck = {lane: strikes for lane, strikes in self._struck.items() if 0 < strikes < _STRIKES}
        if hopeless:
            self._ended.update(hopeless)
            error = failures[hopeless[0]]
            raise SandboxError(f"lane {hopeless[0]} failed at {_STRIKES} steps in a row: {error}") from error

    # ---- checks -------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self.closed:
            raise gymnasium.error.ClosedEnvironmentError("this vector environment is closed")

    def _each(self, actions: Any) -> list[Any]:
        singles = list(iterate(self.action_space, actions))
        if len(singles) != self.num_envs:
            raise ValueError(f"actions for {self.num_envs} lanes are as many, not {len(singles)}")
        return singles

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
