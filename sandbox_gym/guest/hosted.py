"""A Gymnasium environment that lives in the guest, driven by messages.

Every value is plain data through `wire`, but STEP, the hot path:

    request   `Codec.encode(action)`: the action's raw bytes, or meta where it is not of the space's form
    reply     data = STEP_RESULT(terminated, truncated, reward), then what `Codec.reply` says: the observation's
              raw bytes first where its size is fixed, then the buffers of info; meta = info, empty where info is

A STEP without any action begins the next episode in place, by the environment's reset without seed or options, and is
answered like a step whose reward is 0.

RESET answers `[Codec.dump(observation), info]`, so there too a fixed-size observation's bytes come first in data.
With `what="again"` it answers the last observation and info once more, with `what="chance"` the state of
np_random, which a later copy's RESET takes as `carry`.

No thread, child, pipe or socket is made here: the fork engine would refuse the guest.
"""

from __future__ import annotations

import copy
import importlib
import math
import struct
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec

from . import chance
from .codec import LARGE, Codec
from .spaces import describe
from .wire import HEADER, STEP_RESULT, Frame, Op, Quick, Status, failure

# Packages whose import registers their ids: Gymnasium loads no plugins since 1.0.
_HOMES = {
    "ALE/": "ale_py",
    "MiniGrid-": "minigrid",
    "BabyAI-": "minigrid",
    "NetHack": "nle",
    "MiniHack": "minihack",
}
_STEP = int(Op.STEP)
_ALL_BUT_SEQ = 0xFFFF_FFFF_0000_FFFF  # of a header's first eight bytes
_MAX_ROLLOUT_BYTES = 256 << 20  # of observations that one rollout may bring back


class Hosted:
    def __init__(self) -> None:
        self._made: gymnasium.Env[Any, Any] | None = None
        self.quick: Quick | None = None  # answers STEP frames with no detour, where the spaces allow it
        # The last observation and info, as `Codec.reply` wrote them, and how the episode stands; or all of that in
        # the last reply of `quick`, until somebody asks.
        self._last: tuple[Any, ...] | None = None
        self._ended = False, False
        self._reply: bytes | None = None
        # For the next rollout that brings none; put off till then, since seeding takes as long as a step.
        self._sampler_seed: int | None = 0
        self._handlers: dict[tuple[Op, str | None], Callable[..., Any]] = {
            (Op.MAKE, None): self._make,
            (Op.RESET, None): self._reset,
            (Op.RESET, "again"): self._again,
            (Op.RESET, "chance"): self._chance,
            (Op.RENDER, None): self._render,
            (Op.ROLLOUT, None): self._rollout,
            (Op.CLOSE, None): self._close,
        }

    def handle(self, op: Op, value: Any) -> Any:
        """The answer to a request; what the environment raises goes through as it is."""
        if self._reply is not None:
            self._ended = STEP_RESULT.unpack_from(self._reply, HEADER.size)[:2]
            self._last, self._reply = (b"", self._reply[HEADER.size + STEP_RESULT.size :]), None
        value = dict(value or {})
        what = value.pop("what", None)
        handler = self._handlers.get((op, what))
        if handler is None:
            raise ValueError(f"a hosted environment knows no {op.name} {what or ''}")
        return handler(**value)

    def _make_quick(self, env: gymnasium.Env[Any, Any]) -> Quick | None:
        """`step` in one function, for frames and replies of one small size: waking on a cold cache, a guest pays for
        each line of Python that it runs here.
        """
        actions, observations = self._actions.leaf, self._observations.leaf
        if not actions or not actions.nbytes or not observations:
            return None
        if max(actions.nbytes, observations.nbytes) >= LARGE:
            return None
        unpack, exact, isfinite = actions.unpack, observations.exact, math.isfinite
        step, reset = env.step, env.reset
        action_bytes, usual = actions.nbytes, STEP_RESULT.size + observations.nbytes
        # A header as two numbers: op, status, sequence number and meta's length; data's length.
        request = struct.Struct(f"<QQ{action_bytes}s").unpack_from
        reply = struct.Struct(f"<QQ{STEP_RESULT.format[1:]}{observations.nbytes}s").pack

        def quick(buffer: bytearray, count: int) -> bytes | None:
            first, length, action = request(buffer)
            if first & _ALL_BUT_SEQ != _STEP or HEADER.size + length != count:
                return None
            try:
                if length == action_bytes:
                    observation, reward, terminated, truncated, info = step(unpack(action))
                    reward = float(reward)
                elif length == 0:
                    observation, info = reset()
                    reward, terminated, truncated = 0.0, False, False
                    self._sampler_seed = None
                else:
                    return None
                if type(info) is dict and not info and isfinite(reward):
                    data = exact(observation)
                    if data is not None:
                        self._reply = answer = reply(first, usual, terminated, truncated, reward, data)
                        return answer
                terminated, truncated = bool(terminated), bool(truncated)
                self._keep(observation, reward, terminated, truncated, info)
                meta, *blocks = self._last  # type: ignore[misc]  # a step always leaves one
            except (Exception, SystemExit, KeyboardInterrupt) as error:
                meta = failure(error)
                return HEADER.pack(_STEP, Status.ERROR, first >> 16, len(meta), 0) + meta
            data = b"".join(blocks)
            start = HEADER.pack(_STEP, Status.OK, first >> 16, len(meta), STEP_RESULT.size + len(data))
            return b"".join((start, STEP_RESULT.pack(terminated, truncated, reward), data, meta))

        return quick

    def step(self, frame: Frame) -> tuple[Any, ...]:
        """A STEP frame's reply, `(meta, *data)`."""
        if frame.meta or frame.data or self._actions.nbytes == 0:
            reward, terminated, truncated = self._step(self._actions.decode(frame.meta, frame.data))
        else:
            self._begin()
            reward, terminated, truncated = 0.0, False, False
        assert self._last is not None
        return self._last[0], STEP_RESULT.pack(terminated, truncated, reward), *self._last[1:]

    def reseed(self, seed: int) -> None:
        """New chance from here on, for the environment and for the random policy."""
        if self._made is not None:
            chance.reseed(self._made, seed)
            self._sampler_seed = seed

    # ---- handlers ---------------------------------------------------------------------------------------------

    def _make(
        self,
        env_id: str | None = None,
        entry_point: str | None = None,
        env_kwargs: dict[str, Any] | None = None,
        render_mode: str | None = None,
        max_episode_steps: int | None = None,
    ) -> dict[str, Any]:
        kwargs = dict(env_kwargs or {})
        if render_mode is not None:
            kwargs["render_mode"] = render_mode
        if max_episode_steps is not None:
            kwargs["max_episode_steps"] = max_episode_steps
        if entry_point is not None:
            what: Any = EnvSpec("sandbox_gym/Hosted-v0", entry_point=entry_point)
        elif env_id is not None:
            import_home(env_id)
            what = env_id
        else:
            raise ValueError("MAKE takes an env_id or an entry_point")
        env: gymnasium.Env[Any, Any] = gymnasium.make(what, disable_env_checker=True, **kwargs)
        self._made = env
        self._actions = Codec(env.action_space)
        self._observations = Codec(env.observation_space)
        self._sampler = copy.deepcopy(env.action_space)
        self.quick = self._make_quick(env)
        spec = env.spec
        return {
            "observation_space": describe(env.observation_space),
            "action_space": describe(env.action_space),
            "metadata": {str(key): value for key, value in env.metadata.items()},
            "render_mode": env.render_mode,
            "name": str(env),
            "spec": {
                "id": spec.id if spec and entry_point is None else entry_point,
                "max_episode_steps": spec.max_episode_steps if spec else None,
                "reward_threshold": spec.reward_threshold if spec else None,
                "nondeterministic": bool(spec and spec.nondeterministic),
            },
        }

    @property
    def _env(self) -> gymnasium.Env[Any, Any]:
        if self._made is None:
            raise gymnasium.error.ClosedEnvironmentError("the hosted environment is closed")
        return self._made

    def _reset(
        self,
        seed: int | None = None,
        options: dict[str, Any] | None = None,
        carry: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Starts an episode. With `carry`, the "chance" of the copy before, its random numbers go on from there; what
        can't be carried is seeded with `seed`.
        """
        observation, info = self._begin(seed, options, carry)
        return [self._observations.dump(observation), info]

    def _begin(self, seed: int | None = None, options: Any = None, carry: Any = None) -> tuple[Any, Any]:
        observation, info = chance.reset(self._env, seed, options, carry)
        self._sampler_seed = seed
        self._remember(observation, info)
        self._ended = False, False
        return observation, info

    def _again(self) -> list[Any]:
        """The last observation and info once more: for the owner of a copy."""
        if self._last is None:
            raise gymnasium.error.ResetNeeded("no episode had begun at this snapshot: call env.reset()")
        meta, *blocks = self._last
        observation, info = self._observations.read(meta, memoryview(b"".join(blocks)))
        return [self._observations.dump(observation), info]

    def _chance(self) -> dict[str, Any] | None:
        """What `_reset` takes as `carry`, in the copy that comes after this one."""
        return chance.save(self._env)

    def _step(self, action: Any) -> tuple[float, bool, bool]:
        observation, reward, terminated, truncated, info = self._env.step(action)
        result = float(reward), bool(terminated), bool(truncated)
        self._keep(observation, *result, info)
        return result

    def _keep(self, observation: Any, reward: float, terminated: bool, truncated: bool, info: Any) -> None:
        if not math.isfinite(reward):
            raise ValueError(f"the environment's reward is {reward}, which is no finite number")
        self._remember(observation, info)
        self._ended = terminated, truncated

    def _remember(self, observation: Any, info: Any) -> None:
        if not isinstance(info, dict):
            raise TypeError(f"the environment's info is a {type(info).__name__}, not a dict")
        try:
            self._last, self._reply = self._observations.reply(observation, info), None
        except (TypeError, ValueError) as error:
            space = self._observations.space
            raise ValueError(
                f"the environment's observation does not fit its space {space}: {error}"
            ) from error

    def _render(self) -> Any:
        frame = self._env.render()
        return frame if isinstance(frame, (np.ndarray, list, str, type(None))) else _text(frame)

    def _rollout(
        self,
        actions: list[Any] | None = None,
        policy: str | None = None,
        first: list[Any] | None = None,
        max_steps: int = 1000,
        seed: int | None = None,
        discount: float = 1.0,
        observations: bool = False,
    ) -> dict[str, Any]:
        """Steps until the episode ends, or the actions or max_steps do. `first`, a list of one action, goes ahead of
        them all and is not counted. An episode that is over already makes no step.
        """
        queue = list(first or ()) + list(actions or ())
        if policy not in (None, "random"):
            raise ValueError(f"no policy {policy!r}: there is 'random'")
        if seed is None and policy is not None:
            seed, self._sampler_seed = self._sampler_seed, None
        if seed is not None:
            self._sampler.seed(chance.word(seed))
        limit = len(queue) if policy is None else len(queue) + max_steps
        taken: list[Any] = []
        seen: list[tuple[bytes, bytes]] = []
        rewards: list[float] = []
        value, weight, held = 0.0, 1.0, 0
        while len(rewards) < limit and not any(self._ended):
            action = (
                self._sampler.sample()
                if len(rewards) >= len(queue)
                else self._actions.refine(queue[len(rewards)])
            )
            reward, _, _ = self._step(action)
            taken.append(action)
            rewards.append(reward)
            value += weight * reward
            weight *= discount
            if observations:
                seen.append(self._current())
                held += sum(map(len, seen[-1]))
                if held > _MAX_ROLLOUT_BYTES:
                    raise ValueError(
                        f"the rollout's observations take over {_MAX_ROLLOUT_BYTES} bytes: make it shorter"
                    )
        return {
            "actions": self._pile(self._actions, taken) if policy else None,
            "observations": self._gather(seen) if observations else None,
            "rewards": np.array(rewards, np.float64),
            "terminated": self._ended[0],
            "truncated": self._ended[1],
            "value": value,
            "length": len(rewards),
        }

    def _current(self) -> tuple[bytes, bytes]:
        """The last observation, in bytes that no later step changes."""
        assert self._last is not None
        if self._observations.nbytes is not None:
            return b"", bytes(self._last[1])
        return self._last[0], b"".join(self._last[1:])

    def _gather(self, seen: list[tuple[bytes, bytes]]) -> Any:
        if self._observations.nbytes is not None:
            return b"".join(data for _, data in seen)
        return [self._observations.read(meta, memoryview(data))[0] for meta, data in seen]

    @staticmethod
    def _pile(codec: Codec, values: list[Any]) -> Any:
        return values if codec.nbytes is None else b"".join(map(codec.pack, values))

    def _close(self) -> None:
        made, self._made, self.quick = self._made, None, None
        if made is not None:
            made.close()


def _text(frame: Any) -> Any:
    getvalue = getattr(frame, "getvalue", None)  # some text renderers hand out a StringIO
    return getvalue() if callable(getvalue) else frame


def import_home(env_id: str) -> None:
    """Imports the package that registers an id. `"module:Id-v0"` is Gymnasium's own rule."""
    if ":" in env_id or env_id in gymnasium.registry:
        return
    for prefix, module in _HOMES.items():
        if env_id.startswith(prefix):
            try:
                importlib.import_module(module)
            except ModuleNotFoundError as error:
                raise gymnasium.error.DependencyNotInstalled(
                    f"{env_id} needs the package {module}, which is not installed in the sandbox"
                ) from error
