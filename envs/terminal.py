"""The sandbox itself as an environment: an action is a cell of code or a shell command, an observation what it said."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from typing import Any, Literal

from gymnasium import spaces

from sandbox_gym._snapshot import Snapshot
from sandbox_gym._text import show
from sandbox_gym.acting import ActingEnv
from sandbox_gym.api import CodeResult, ExecResult
from sandbox_gym.errors import SandboxError, SandboxTimeout
from sandbox_gym.hosting import Step
from sandbox_gym.sandbox import Sandbox

_PRINTABLE = "\t\n" + "".join(map(chr, range(32, 127)))
_MAX_ACTION = 1 << 20  # characters


class AnyText(spaces.Text):
    """Text of any characters, up to a length: what programs print keeps to no alphabet. Samples are printable ASCII."""

    def __init__(self, max_length: int, *, sample_length: int = 80) -> None:
        super().__init__(max_length, min_length=0, charset=_PRINTABLE)
        self._sample_length = min(sample_length, max_length)

    def contains(self, x: Any) -> bool:
        return isinstance(x, str) and len(x) <= self.max_length

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        if mask is None and probability is None:
            mask = int(self.np_random.integers(self._sample_length + 1)), None
        return super().sample(mask, probability)

    def __repr__(self) -> str:
        return f"AnyText({self.max_length})"


@dataclass(frozen=True)
class _Moment:
    """All of an episode's state that is not in the sandbox."""

    observation: str = ""
    info: dict[str, Any] = field(default_factory=dict)
    steps: int = 0
    begun: bool = False


class TerminalEnv(ActingEnv):
    """A sandbox to act in: `language="python"` runs an action as a cell of an interpreter whose names live on,
    "shell" as a command line.

    The observation is what was printed, then the last expression's value or the traceback (python), or the exit code
    where it isn't zero (shell); past `max_output` characters its middle is cut out. `step_timeout` seconds end an
    action and whatever it started; the observation says so.

    The reward is 0.0, or the number that `score` prints last: code or a command in the same language, run in the
    sandbox after each action. It runs where the action ran, so an action can tamper with what it reads. `setup` runs
    once, before the first episode. An episode has no end of its own; after `max_episode_steps` it is truncated.

    Raises:
        SandboxError: `setup` failed, or `score` did, or printed no finite number: its output is in the message.
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi"], "render_fps": 1}  # noqa: RUF012
    _moment: _Moment

    def __init__(
        self,
        *,
        language: Literal["python", "shell"] = "python",
        score: str | None = None,
        setup: str | None = None,
        max_output: int = 16_384,
        max_episode_steps: int | None = None,
        backend: str = "native",
        image: Any = None,
        step_timeout: float = 30.0,
        reset_timeout: float = 60.0,
        render_mode: str | None = None,
        **limits: Any,
    ) -> None:
        if language not in ("python", "shell"):
            raise ValueError(f"language is 'python' or 'shell', not {language!r}")
        if render_mode not in (None, "ansi"):
            raise ValueError(f"render_mode is 'ansi' or None, not {render_mode!r}")
        if max_output < 256:
            raise ValueError(f"max_output is 256 characters or more, not {max_output}")
        self.action_space = AnyText(_MAX_ACTION)
        self.observation_space = AnyText(max_output)
        self.render_mode = render_mode
        self._language = language
        self._score = score
        self._max_output = max_output
        self._max_steps = max_episode_steps
        self._step_timeout = step_timeout
        self._moment = _Moment()
        box = Sandbox.create(backend=backend, image=image, **limits)
        try:
            if setup is not None:
                result = self._run(box, setup, reset_timeout)
                if not result.ok:
                    raise SandboxError(f"sandbox {box.name}: setup failed:\n{self._show(result)}")
            self._open(box)
        except BaseException:
            box.terminate()
            raise

    def step(self, action: str) -> Step:
        """Runs an action. `info`: "ok", "timed_out", and "exit_code" (shell) or "error", a class name or None (python).

        Raises:
            SandboxError: `score` failed; there is no reward.
            SandboxDied, LimitExceeded, SandboxTimeout: the action ended the sandbox; reset starts anew.
        """
        if not self.action_space.contains(action):
            raise ValueError(f"an action is text of at most {_MAX_ACTION} characters, not {action!r:.100}")
        box = self.sandbox
        self._fresh = False
        result = self._run(box, action, self._step_timeout)
        if box.status == "dead":
            raise SandboxTimeout(
                f"sandbox {box.name}: {getattr(result, 'error', None) or 'the action ended it'}"
            )
        reward = self._reward(box)
        moment = _Moment(self._show(result), _info(result), self._moment.steps + 1, True)
        self._moment = moment
        truncated = self._max_steps is not None and moment.steps >= self._max_steps
        return moment.observation, reward, False, truncated, dict(moment.info)

    def rollout(self, actions: list[str], *, discount: float = 1.0, observations: bool = False) -> Any:
        """Takes actions until one truncates the episode: a `Trajectory`. There is no random policy for text."""
        import numpy as np

        from sandbox_gym.hosting import Trajectory

        seen: list[str] = []
        rewards: list[float] = []
        truncated = False
        for action in actions:
            if truncated:
                break
            observation, reward, _, truncated, _ = self.step(action)
            seen.append(observation)
            rewards.append(reward)
        value = sum(reward * discount**i for i, reward in enumerate(rewards))
        kept = seen if observations else None
        return Trajectory(kept, actions[: len(rewards)], np.array(rewards), False, truncated, value)

    def render(self) -> str | None:
        """The last observation, where render_mode is "ansi"."""
        return self._moment.observation if self.render_mode == "ansi" else None

    def _begin(self, seed: int | None, options: dict[str, Any] | None) -> tuple[str, dict[str, Any]]:
        if options:
            raise ValueError(f"the options known are 'snapshot' and 'rng', not {sorted(options)}")
        self._rewind_to_start()._reseed(self._seed_of(seed))
        self._moment = _Moment(begun=True)
        return "", {}

    def observation(self) -> str:
        return self._moment.observation

    @property
    def _kind(self) -> str:
        return f"{self._language} terminal"

    def _recall(self, snapshot: Snapshot) -> tuple[str, dict[str, Any]]:
        self._moment = self._remembered(snapshot) or _Moment(begun=True)
        return self._moment.observation, dict(self._moment.info)

    def _run(self, box: Sandbox, text: str, timeout: float) -> CodeResult | ExecResult:
        if self._language == "python":
            return box.run_code(text, timeout=timeout)
        os.fsencode(text)  # UnicodeEncodeError, a ValueError, for what no command line can hold
        return box.shell(text, timeout=timeout)

    def _reward(self, box: Sandbox) -> float:
        if self._score is None:
            return 0.0
        result = self._run(box, self._score, self._step_timeout)
        text = result.stdout.strip().rpartition("\n")[2] or getattr(result, "value", None) or ""
        try:
            reward = float(text)
        except ValueError:
            reward = math.nan
        if not (result.ok and math.isfinite(reward)):
            raise SandboxError(
                f"sandbox {box.name}: score gave no number, so this step has no reward:\n{self._show(result)}"
            )
        return reward

    def _show(self, result: CodeResult | ExecResult) -> str:
        return show(result, timeout=self._step_timeout, most=self._max_output)


def _info(result: CodeResult | ExecResult) -> dict[str, Any]:
    info: dict[str, Any] = {"ok": result.ok, "timed_out": result.timed_out}
    if isinstance(result, ExecResult):
        info["exit_code"] = result.exit_code
    else:
        info["error"] = result.error.type if result.error else None
    return info
