"""`ShellQuest-v0`: small tasks in a terminal, each made from a seed, each with an end that can be verified."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces

from sandbox_gym._snapshot import Snapshot
from sandbox_gym._text import show
from sandbox_gym.acting import ActingEnv
from sandbox_gym.envs import shell_quest_kinds, shell_quest_texts
from sandbox_gym.envs.shell_quest_files import Files, fingerprint, look, put
from sandbox_gym.envs.shell_quest_making import MENU_SIZE, Quest, with_menu
from sandbox_gym.envs.terminal import AnyText
from sandbox_gym.errors import SandboxError, SandboxTimeout
from sandbox_gym.guest.encoded import TEXT_SIZE, write_text
from sandbox_gym.sandbox import Sandbox

FOLDER = "/workspace/quest"
KINDS: dict[str, Callable[[random.Random], Quest]] = {
    make.__name__: make for make in (*shell_quest_kinds.KINDS, *shell_quest_texts.KINDS)
}
_ENTRY_SIZE = 32  # numbers for a command of the menu
_STATE_SIZE = 16  # numbers that tell one state of the files from all others
_STATE_AT, _MENU_AT = 3 * TEXT_SIZE, 3 * TEXT_SIZE + _STATE_SIZE
SIZE = _MENU_AT + MENU_SIZE * _ENTRY_SIZE + 1
_MAX_ACTION = 1 << 16  # characters
_Step = tuple[Any, float, bool, bool, dict[str, Any]]


def make_quest(seed: int, kind: str | None = None) -> Quest:
    """The quest of a seed, of one kind of KINDS or of any. Raises ValueError for another kind."""
    if kind is not None and kind not in KINDS:
        raise ValueError(f"kind is one of {', '.join(KINDS)}, not {kind!r}")
    rng = random.Random(seed)
    chosen = rng.choice(list(KINDS))
    return with_menu(KINDS[kind or chosen](rng), rng)


def files_key(observation: Any) -> bytes:
    """What an observation of menu mode says of the files alone: equal where they are. For `MCTS(key=...)`."""
    return bytes(np.asarray(observation, np.float32)[_STATE_AT:_MENU_AT].tobytes())


@dataclass(frozen=True)
class _Episode:
    """All of an episode's state that is not in the sandbox."""

    quest: Quest
    command: str = ""  # the last
    output: str = ""
    listing: str = ""  # names and modes of the files
    state: str = ""  # their fingerprint
    steps: int = 0
    progress: float = 0.0
    over: bool = False


class ShellQuestEnv(ActingEnv):
    """A folder of files, and something to be done there with a shell: found, counted, repaired, renamed, restored.

    `actions="text"`: an action is a command line, the observation what it said (after a reset, what is to be done).
    "menu": an action is the number of one of MENU_SIZE command lines, of which some in the right order solve the quest
    and others lead astray; the observation is a Box [SIZE] of hashed words: what is to be done, what was said, how the
    files look, the menu, and the share of steps taken.

    A quest has some goals; the reward is the change in the share of them that is met, so that an episode's return is
    1.0 when all are, which ends it. After `max_steps` it is truncated. The host looks at the files after each step and
    judges by itself: neither the goals nor what they look for is ever in the sandbox.

    `info`: "kind", "prompt", "solved", in menu mode "menu"; of the last command "ok", "exit_code" and "timed_out".
    `reset(options={"kind": k})` chooses among KINDS; the seed chooses the rest. Further keywords are those of
    `Sandbox.create`; an image needs coreutils, grep, sed, awk, tar, gzip and git.

    Raises SandboxError where a quest can't be set up: what is missing is in the message.
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi", "rgb_array"], "render_fps": 1}  # noqa: RUF012

    def __init__(
        self,
        *,
        actions: Literal["menu", "text"] = "menu",
        kind: str | None = None,
        max_steps: int = 8,
        max_output: int = 16_384,
        step_timeout: float = 10.0,
        render_mode: str | None = None,
        **limits: Any,
    ) -> None:
        if actions not in ("menu", "text"):
            raise ValueError(f"actions is 'menu' or 'text', not {actions!r}")
        if render_mode not in (None, *self.metadata["render_modes"]):
            raise ValueError(f"render_mode is 'ansi', 'rgb_array' or None, not {render_mode!r}")
        if max_steps < 1 or max_output < 256:
            raise ValueError("max_steps is 1 or more, max_output 256 or more")
        make_quest(0, kind)
        self._menu = actions == "menu"
        self.action_space = spaces.Discrete(MENU_SIZE) if self._menu else AnyText(_MAX_ACTION)
        self.observation_space = (
            spaces.Box(-1.0, 1.0, (SIZE,), np.float32) if self._menu else AnyText(max_output)
        )
        self.render_mode = render_mode
        self._kind_wanted = kind
        self._max_steps = max_steps
        self._max_output = max_output
        self._step_timeout = step_timeout
        self._moment: _Episode | None = None
        box = Sandbox.create(**limits)
        try:
            self._open(box)
        except BaseException:
            box.terminate()
            raise

    @property
    def quest(self) -> Quest:
        """The present one, its solution included. Raises ResetNeeded before the first."""
        return self._now().quest

    def step(self, action: Any) -> _Step:
        """Runs a command. Raises ResetNeeded when the episode is over; SandboxDied, LimitExceeded, SandboxTimeout when
        the command ended the sandbox, and reset starts anew.
        """
        if not self.action_space.contains(action):
            raise ValueError(f"{action!r:.100} is no action of {self.action_space}")
        episode = self._now()
        if episode.over:
            raise gymnasium.error.ResetNeeded("the episode is over: env.reset()")
        command = episode.quest.menu[int(action)] if self._menu else action
        os.fsencode(command)  # UnicodeEncodeError, a ValueError, for what no command line can hold
        self._fresh = False
        box = self.sandbox
        # The folder may be gone: the shell says so.
        result = box.shell(f"cd {FOLDER} || exit\n{command}", self._step_timeout)
        files = look(box, FOLDER)
        if box.status == "dead":
            raise SandboxTimeout(f"sandbox {box.name}: the command ended it")
        progress = episode.quest.progress(files)
        solved = progress == 1.0
        steps = episode.steps + 1
        truncated = steps >= self._max_steps and not solved
        output = show(result, timeout=self._step_timeout, most=self._max_output)
        seen: dict[str, Any] = {
            "command": command,
            "output": output,
            "listing": _listing(files),
            "state": fingerprint(files),
        }
        self._moment = replace(episode, steps=steps, progress=progress, over=solved or truncated, **seen)
        info = {"ok": result.ok, "exit_code": result.exit_code, "timed_out": result.timed_out}
        return (
            self.observation(),
            progress - episode.progress,
            solved,
            truncated,
            {**self._info(), **info},
        )

    def observation(self) -> Any:
        episode = self._now()
        if not self._menu:
            return episode.output
        row = np.zeros(SIZE, np.float32)
        for i, text in enumerate((episode.quest.prompt, episode.output, episode.listing)):
            write_text(text, row[i * TEXT_SIZE : (i + 1) * TEXT_SIZE])
        row[_STATE_AT:_MENU_AT] = [int(digit, 16) / 7.5 - 1 for digit in episode.state[:_STATE_SIZE]]
        for i, command in enumerate(episode.quest.menu):
            start = _MENU_AT + i * _ENTRY_SIZE
            write_text(command, row[start : start + _ENTRY_SIZE])
        row[-1] = episode.steps / self._max_steps
        return row

    def render(self) -> Any:
        """What is to be done, the last command, and what it said: as text, or as uint8 [height, width, 3]."""
        episode = self._now()
        said = episode.output if episode.steps else ""
        if self.render_mode == "ansi":
            shown = f"$ {episode.command}\n{said}" if episode.steps else ""
            return f"{episode.quest.prompt}\n\n{shown}".rstrip()
        if self.render_mode == "rgb_array":
            from sandbox_gym.envs.shell_quest_picture import draw_quest

            return draw_quest(episode.quest, episode.command, said, episode.progress)
        return None

    def _begin(self, seed: int | None, options: dict[str, Any] | None) -> tuple[Any, dict[str, Any]]:
        unknown = set(options or ()) - {"kind"}
        if unknown:
            raise ValueError(f"the options known are 'kind', 'snapshot' and 'rng', not {sorted(unknown)}")
        quest = make_quest(self._seed_of(seed), (options or {}).get("kind", self._kind_wanted))
        box = self._rewind_to_start()
        put(box, FOLDER, quest.files)
        if quest.setup:
            result = box.shell(quest.setup, timeout=30.0, cwd=FOLDER)
            if not result.ok:
                told = show(result, timeout=30.0, most=2000)
                raise SandboxError(f"sandbox {box.name}: quest {quest.kind} could not be set up:\n{told}")
        files = look(box, FOLDER)
        said = "" if self._menu else quest.prompt
        self._moment = _Episode(quest, "", said, _listing(files), fingerprint(files))
        return self.observation(), self._info()

    @property
    def _over(self) -> bool:
        return self._now().over

    @property
    def _kind(self) -> str:
        return f"shell quest, {'menu' if self._menu else 'text'}, {self._max_steps} steps"

    def _recall(self, snapshot: Snapshot) -> tuple[Any, dict[str, Any]]:
        self._moment = self._remembered(snapshot)
        if self._moment is None:
            raise gymnasium.error.ResetNeeded(f"{snapshot!r} is of no episode: env.reset()")
        return self.observation(), self._info()

    def _now(self) -> _Episode:
        if self._moment is None:
            raise gymnasium.error.ResetNeeded("no episode has begun: env.reset()")
        return self._moment

    def _info(self) -> dict[str, Any]:
        episode = self._now()
        info = {"kind": episode.quest.kind, "prompt": episode.quest.prompt, "solved": episode.progress == 1.0}
        return {**info, "menu": list(episode.quest.menu)} if self._menu else info


def _listing(files: Files) -> str:
    return "\n".join(f"{path} {files[path].kind} {files[path].mode:o}" for path in sorted(files))
