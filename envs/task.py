"""`SandboxTask-v0`: a task as an environment. Actions are tool calls or commands, the reward is its grader's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces

from sandbox_gym._snapshot import Snapshot
from sandbox_gym.acting import ActingEnv
from sandbox_gym.branching import Pristine
from sandbox_gym.envs.terminal import AnyText
from sandbox_gym.errors import TaskError
from sandbox_gym.guest.encoded import TEXT_SIZE, write_text
from sandbox_gym.hosting import Step
from sandbox_gym.tasks import Prepared, Task, actions, datasets
from sandbox_gym.tasks.verdict import Verdict, shorten

_MAX_ACTION = 1 << 20  # characters


@dataclass(frozen=True)
class _Moment:
    """All of an episode's state that is not in the sandbox."""

    observation: str = ""
    info: dict[str, Any] = field(default_factory=dict)
    steps: int = 0
    over: bool = True


class TaskEnv(ActingEnv):
    """A `Task` to solve: a record, a mapping of one's fields, or a path that `tasks.datasets.load` finds one task at.

    An action is text: `{"tool": "edit", "path": "a.py", "old": "1", "new": "2"}` (see `tasks.actions.TOOLS`), "submit",
    or a command line for bash. With `menu`, a list of such texts, it is the number of one. The observation is the
    prompt, then what each action gave: text, its middle cut out past `max_output` characters; with `encode="flat"` it
    is a row of 64 numbers instead, hashed words (see `sandbox_gym.guest.encoded`), and the text is in `info["text"]`.

    The reward is 0 until the episode ends: at "submit" (terminated) or after the task's `max_steps` (truncated). Then
    it is the score of the task's check, run in a fresh sandbox, and `info["verdict"]` is the record of it.

    Raises TaskError, GraderError: the set-up failed; the check can't judge. SandboxError as `Sandbox.create` does.
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi"], "render_fps": 1}  # noqa: RUF012
    _moment: _Moment

    def __init__(
        self,
        task: Task | Mapping[str, Any] | str | PathLike[str] | None = None,
        *,
        menu: Sequence[str] | None = None,
        encode: Literal["none", "flat"] = "none",
        max_output: int = 16_384,
        backend: str = "native",
        step_timeout: float = 60.0,
        render_mode: str | None = None,
    ) -> None:
        if render_mode not in (None, "ansi"):
            raise ValueError(f"render_mode is 'ansi' or None, not {render_mode!r}")
        if encode not in ("none", "flat"):
            raise ValueError(f"encode is 'none' or 'flat', not {encode!r}")
        if max_output < 256:
            raise ValueError(f"max_output is 256 characters or more, not {max_output}")
        self.task = _one(task)
        self.action_space = AnyText(_MAX_ACTION) if menu is None else spaces.Discrete(len(menu))
        self.observation_space = AnyText(max_output)
        if encode == "flat":
            self.observation_space = spaces.Box(-1.0, 1.0, (TEXT_SIZE,), np.float32)
        self.render_mode = render_mode
        self._menu = None if menu is None else list(menu)
        self._flat = encode == "flat"
        self._max_output = max_output
        self._step_timeout = step_timeout
        self._moment = _Moment()
        self._prepared = Prepared(self.task, backend=backend)
        self._pristine = Pristine(self._prepared.snapshot)
        try:
            self._box = self._prepared.start()
        except BaseException:
            self.close()
            raise

    def step(self, action: Any) -> Step:
        """One tool call. `info`: "tool", "ok", "timed_out", and "exit_code" or "error" where there is one; at the end
        "verdict".

        Raises:
            GraderError: the check could not run; there is no reward.
            SandboxDied, LimitExceeded, SandboxTimeout: the action ended the sandbox; reset starts anew.
        """
        text = self._text(action)
        if self._moment.over:
            raise gymnasium.error.ResetNeeded("the episode is over, or has not begun: env.reset()")
        box = self.sandbox
        self._fresh = False
        submitted = False
        try:
            call = actions.parse(text)
        except actions.BadCall as error:
            did, tool = actions.Did(f"[{error}]", {"ok": False, "timed_out": False}), ""
        else:
            tool, submitted = call.tool, call.tool == actions.SUBMIT
            did = actions.Did("", {"ok": True, "timed_out": False})
            if not submitted:
                did = actions.act(box, call, cwd=self.task.workdir, timeout=self._step_timeout)
        steps = self._moment.steps + 1
        over = submitted or steps >= self.task.max_steps
        info = {"tool": tool, **did.facts}
        reward = 0.0
        if over:
            verdict = self._prepared.grade(box)
            reward, info["verdict"] = verdict.score, verdict.to_json()
        self._moment = _Moment(shorten(did.output, self._max_output), info, steps, over)
        observation, info = self._seen()
        return observation, reward, submitted, over and not submitted, info

    def grade(self) -> Verdict:
        """What the check says of the sandbox as it is now; the episode goes on. Not for the agent to know."""
        return self._prepared.grade(self.sandbox)

    def render(self) -> str | None:
        """The last observation, where render_mode is "ansi"."""
        return self._moment.observation if self.render_mode == "ansi" else None

    def _begin(self, seed: int | None, options: dict[str, Any] | None) -> tuple[Any, dict[str, Any]]:
        if options:
            raise ValueError(f"the options known are 'snapshot' and 'rng', not {sorted(options)}")
        self._rewind_to_start()._reseed(self._seed_of(seed))
        self._moment = _Moment(shorten(self.task.prompt, self._max_output), {"task": self.task.id}, 0, False)
        return self._seen()

    def observation(self) -> Any:
        return self._seen()[0]

    @property
    def _over(self) -> bool:
        return self._moment.over

    @property
    def _kind(self) -> str:
        return f"task {self.task.digest}"

    def _recall(self, snapshot: Snapshot) -> tuple[Any, dict[str, Any]]:
        self._moment = self._remembered(snapshot) or _Moment(over=False)
        return self._seen()

    def _seen(self) -> tuple[Any, dict[str, Any]]:
        info = dict(self._moment.info)
        if not self._flat:
            return self._moment.observation, info
        row = np.zeros(TEXT_SIZE, np.float32)
        write_text(self._moment.observation, row)
        return row, {**info, "text": self._moment.observation}

    def _text(self, action: Any) -> str:
        if not self.action_space.contains(action):
            raise ValueError(f"an action is one of {self.action_space}, not {action!r:.100}")
        return str(action) if self._menu is None else self._menu[int(action)]


def _one(task: Any) -> Task:
    if task is None:  # gym.make without one: Python's own word for it would name no form that a task can have
        raise TypeError(
            'gym.make("SandboxTask-v0", task=...) takes a Task, a record of one, or a path to one'
        )
    if isinstance(task, Task):
        return task
    found = datasets.load(task)
    if len(found) != 1:
        raise TaskError(
            f"an environment has one task, and there are {len(found)}: give it one of datasets.load(...)"
        )
    return found[0]
