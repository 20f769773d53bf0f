"""The host's side of an environment that lives in a sandbox: requests to `guest.hosted`, and what its answers mean."""

from __future__ import annotations

import builtins
import math
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np

from sandbox_gym import _audit
from sandbox_gym.channel import GuestError
from sandbox_gym.errors import ProtocolError, SandboxError
from sandbox_gym.guest import wire
from sandbox_gym.guest.spaces import Codec, build
from sandbox_gym.guest.wire import STEP_RESULT, Op, WireError
from sandbox_gym.sandbox import Sandbox

# What an environment may raise and its user sees as what it is; everything else is a SandboxError.
_BUILTINS = (
    "AssertionError",
    "AttributeError",
    "ImportError",
    "IndexError",
    "KeyError",
    "ModuleNotFoundError",
    "NotImplementedError",
    "RuntimeError",
    "TypeError",
    "ValueError",
)

Step = tuple[Any, float, bool, bool, dict[str, Any]]


@dataclass(frozen=True)
class Hosting:
    """What MAKE told of a hosted environment. `name`: its str, wrappers included; `spec`: id, max_episode_steps,
    reward_threshold, nondeterministic.
    """

    observation_space: gymnasium.Space[Any]
    action_space: gymnasium.Space[Any]
    metadata: dict[str, Any]
    render_mode: str | None
    name: str
    spec: dict[str, Any]

    @property
    def kind(self) -> str:
        """Alike for environments whose snapshots one may exchange."""
        return f"{self.name} {self.observation_space} {self.action_space}"


@dataclass(frozen=True)
class Trajectory:
    """Steps made inside the guest, without the host. Arrays have one row a step; `observations[i]` follows
    `actions[i]`, and is None where observations weren't asked for.
    """

    observations: Any  # [T, *shape], or a list where a value is no single array
    actions: Any  # [T, *shape], or a list
    rewards: np.ndarray[Any, np.dtype[np.float64]]  # [T]
    terminated: bool
    truncated: bool
    value: float  # the sum of rewards, each discounted by the steps before it

    def __len__(self) -> int:
        return len(self.rewards)

    @property
    def length(self) -> int:
        return len(self.rewards)


_ELSEWHERE = (
    " (in the sandbox, which has what is installed here, and no folder of yours: give python_path=['/your/folder'], or "
    "set PYTHONPATH. What this process registered is not registered there: entry_point='module:Class' does without)"
)


def guest_error(error: GuestError, name: str) -> Exception:
    """What the hosted environment raised, as the same class where that is Gymnasium's or a plain builtin, else as a
    SandboxError. The guest's traceback is a note on it.
    """
    kind, message = error.info["type"], error.info["message"]
    known: Any = getattr(gymnasium.error, kind, None)
    if isinstance(known, type) and issubclass(known, gymnasium.error.Error):
        raised: Exception = known(message)
    elif kind in _BUILTINS:
        raised = getattr(builtins, kind)(message)
    else:
        raised = SandboxError(f"the environment in sandbox {name} raised {kind}: {message}")
    vars(raised)["__notes__"] = [
        f"Raised in sandbox {name}:\n{error.info['traceback']}"
    ]  # add_note, from 3.11
    return raised


def plain(value: Any, what: str) -> Any:
    """The value, once it is sure that it reaches the guest as it is. Raises TypeError."""
    _check_plain(wire.encode(value)[0], what)
    return value


def _check_plain(meta: bytes, what: str) -> None:
    if b'{"$":"o",' in meta:  # no text can hold this: JSON escapes its quotes
        raise TypeError(f"{what} hold something that can't go into a sandbox: only plain data and arrays can")


def call(box: Sandbox, op: Op, value: Any = None, *, timeout: float) -> Any:
    """`Sandbox._call` with what the environment raises raised here."""
    try:
        return box._call(op, value, timeout=timeout)
    except GuestError as error:
        raise guest_error(error, box.name) from None


def broken(box: Sandbox, error: Exception) -> Exception:
    """Kills a sandbox whose guest sent what no guest of ours sends; the error to raise."""
    return box._fatal(ProtocolError(f"sandbox {box.name}: {error}"))


def make(box: Sandbox, request: dict[str, Any], *, timeout: float) -> Hosting:
    """Makes the environment in the sandbox. `request`: the arguments of `Hosted`'s MAKE. Raises TypeError or ValueError
    for an `entry_point` that is none, and what making it raises there.
    """
    _check_entry_point(request["entry_point"])
    try:
        answer = call(box, Op.MAKE, plain(request, "env_kwargs"), timeout=timeout)
    except (ModuleNotFoundError, gymnasium.error.NameNotFound) as error:
        extended = type(error)(f"{error}{_ELSEWHERE}")
        vars(extended).update(vars(error))
        raise extended from None
    try:
        metadata, spec, mode = dict(answer["metadata"]), dict(answer["spec"]), answer["render_mode"]
        metadata["render_modes"] = [str(name) for name in metadata.get("render_modes") or ()]
        spaces = build(answer["observation_space"]), build(answer["action_space"])
        return Hosting(*spaces, metadata, None if mode is None else str(mode), str(answer["name"]), spec)
    except (WireError, KeyError, TypeError, ValueError) as error:
        raise broken(box, error) from None


def _check_entry_point(value: Any) -> None:
    if value is not None and not isinstance(value, str):
        raise TypeError(f"entry_point is text, 'module:Class', which the sandbox imports, not {value!r}")
    if value is not None and value.count(":") != 1:
        raise ValueError(f"entry_point is 'module:Class', not {value!r}")


class Remote:
    """A hosted environment's calls over its sandbox, with the codecs of its spaces.

    Copies of a sandbox share one of these: the sandbox is an argument.
    """

    def __init__(self, hosting: Hosting) -> None:
        self.hosting = hosting
        self.observations = Codec(hosting.observation_space)
        self.actions = Codec(hosting.action_space)

    def reset(self, box: Sandbox, *, timeout: float, **request: Any) -> tuple[Any, dict[str, Any]]:
        """`request`: seed, options, carry; or what="again"."""
        answer = call(box, Op.RESET, request, timeout=timeout)
        try:
            dumped, info = answer
            if not isinstance(info, dict):
                raise WireError(f"an info that is no dict but {type(info).__name__}")
            return self.observations.load(dumped), info
        except (WireError, TypeError, ValueError) as error:
            raise broken(box, error) from None

    def step(self, box: Sandbox, action: Any, *, timeout: float) -> Step:
        meta, *data = self.actions.encode(action)
        if meta:
            _check_plain(meta, "actions")
        try:
            frame = box._request(Op.STEP, meta, *data, timeout=timeout)
        except GuestError as error:
            raise guest_error(error, box.name) from None
        finally:
            _audit.stepped((box,))
        try:
            return self.read_step(frame.meta, frame.data)
        except WireError as error:
            raise broken(box, error) from None

    def read_step(self, meta: bytes, data: memoryview) -> Step:
        """A STEP reply's value. Raises WireError."""
        if len(data) < STEP_RESULT.size:
            raise WireError("a step's reply without its result")
        terminated, truncated, reward = STEP_RESULT.unpack_from(data)
        if not math.isfinite(reward):
            raise WireError(f"a reward of {reward}")
        observation, info = self.observations.read(meta, data[STEP_RESULT.size :])
        return observation, reward, bool(terminated), bool(truncated), info

    def rollout(self, box: Sandbox, request: dict[str, Any], *, timeout: float) -> Trajectory:
        """`request`: the arguments of `Hosted`'s ROLLOUT."""
        answer = call(box, Op.ROLLOUT, plain(request, "actions"), timeout=timeout)
        try:
            rewards, value, seen = answer["rewards"], float(answer["value"]), answer["observations"]
            if not (isinstance(rewards, np.ndarray) and rewards.dtype == np.float64 and rewards.ndim == 1):
                raise WireError("rewards that are no numbers")
            if not (np.isfinite(rewards).all() and math.isfinite(value)):
                raise WireError("rewards that are not finite")
            actions = answer["actions"]
            if actions is not None:
                actions = _unpile(self.actions, actions, len(rewards))
            observations = None if seen is None else _unpile(self.observations, seen, len(rewards))
            ended = bool(answer["terminated"]), bool(answer["truncated"])
        except (WireError, KeyError, TypeError, ValueError) as error:
            raise broken(box, error) from None
        _audit.stepped((box,), len(rewards))
        if actions is None:
            actions = self._rows([*(request.get("first") or ()), *request["actions"]][: len(rewards)])
        return Trajectory(observations, actions, rewards, *ended, value)

    def _rows(self, actions: list[Any]) -> Any:
        if self.actions.array is None:
            return actions
        dtype, shape = self.actions.array
        return (
            np.stack([np.asarray(action) for action in actions]) if actions else np.empty((0, *shape), dtype)
        )


def _unpile(codec: Codec, piled: Any, length: int) -> Any:
    """`length` values out of what came as one block of bytes, or as a list."""
    if codec.nbytes is None:
        if not isinstance(piled, list) or len(piled) != length:
            raise WireError("a list that is not as long as its rollout")
        return [codec.refine(value) for value in piled]
    if not isinstance(piled, bytes) or len(piled) != length * codec.nbytes:
        raise WireError("bytes that are not as many as the rollout's values have")
    if codec.array is not None:
        dtype, shape = codec.array
        return np.ndarray((length, *shape), dtype, bytearray(piled))
    view, size = memoryview(piled), codec.nbytes
    return [codec.unpack(view[i * size : (i + 1) * size]) for i in range(length)]
