"""`CallAgent-v0`: an estate agency's phone assistant chooses what to say next."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from sandbox_gym.envs.call_agent_caller import ACTIONS, Call, advance
from sandbox_gym.envs.call_agent_observation import SIZE, observe
from sandbox_gym.envs.call_agent_policy import play_to_decision

__all__ = ["ACTIONS", "CallAgentEnv"]


class CallAgentEnv(gymnasium.Env[Any, Any]):
    """Somebody rings. Find out why, keep him well-disposed, and end the call with the best that can come of it.

    A caller wants to rent, to buy, to sell, to have something repaired, or only to look. What he wants, can pay and
    has patience for is hidden until he tells; how he feels can be heard, roughly. The actions are `ACTIONS`, by number;
    the observation is what is known of him, what he did last, how he sounds, and how often each thing was said: a Box
    of numbers in 0 to 1, [SIZE].

    The reward is what an ending brings: a viewing 10 (7 with a discount), a call back up to 6, a transfer up to 4, with
    those that suit the caller worst below zero; less 0.1 a turn and 2 for a good mood lost; -3 when he hangs up.

    `info`: "transcript", "said" and "heard" (the last lines), "outcome" (None while it lasts), and "decision": the
    caller has said what he wants and waits, so that much hangs on what comes next.
    `reset(options={"decision": n})` begins at the n-th such moment, played there by a plain receptionist.
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi", "rgb_array"], "render_fps": 1}  # noqa: RUF012

    def __init__(self, render_mode: str | None = None) -> None:
        if render_mode not in (None, *self.metadata["render_modes"]):
            raise ValueError(f"render_mode is 'ansi', 'rgb_array' or None, not {render_mode!r}")
        self.action_space = spaces.Discrete(len(ACTIONS))
        self.observation_space = spaces.Box(0.0, 1.0, (SIZE,), np.float32)
        self.render_mode = render_mode
        self._call: Call | None = None

    @property
    def call(self) -> Call:
        """Where the call stands, the caller's secrets included. Raises ResetNeeded before the first."""
        if self._call is None:
            raise gymnasium.error.ResetNeeded("nobody has called yet: env.reset()")
        return self._call

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        unknown = set(options or ()) - {"decision"}
        if unknown:
            raise ValueError(f"the option known is 'decision', not {sorted(unknown)}")
        self._call = play_to_decision(self.np_random.random, int((options or {}).get("decision", 0)))
        return observe(self._call), self._info()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if not self.action_space.contains(action):
            raise ValueError(f"an action is a number below {len(ACTIONS)}, not {action!r}: {ACTIONS}")
        reward = advance(self.call, ACTIONS[int(action)], self.np_random.random)
        return observe(self.call), reward, self.call.outcome is not None, False, self._info()

    def render(self) -> Any:
        if self.render_mode == "ansi":
            return transcript(self.call)
        if self.render_mode == "rgb_array":
            from sandbox_gym.envs.call_agent_picture import draw_call

            return draw_call(self.call)
        return None

    def _info(self) -> dict[str, Any]:
        call = self.call
        return {
            "transcript": transcript(call),
            "said": next((text for who, text in reversed(call.transcript) if who == "assistant"), ""),
            "heard": call.transcript[-1][1],
            "decision": call.decision,
            "outcome": call.outcome,
        }


def transcript(call: Call) -> str:
    """All that was said, a line each."""
    return "\n".join(f"{who}: {text}" for who, text in call.transcript)
