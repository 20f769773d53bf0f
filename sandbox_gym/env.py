"""`Sandbox-v0`: any Gymnasium environment, in a sandbox of its own, now with snapshots and branches."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import gymnasium

from sandbox_gym import _audit
from sandbox_gym._snapshot import Snapshot
from sandbox_gym.branching import Branch, BranchableEnv
from sandbox_gym.errors import SandboxError
from sandbox_gym.guest.wire import Op
from sandbox_gym.hosting import Hosting, Remote, Step, Trajectory, call, make, plain
from sandbox_gym.sandbox import Sandbox

if TYPE_CHECKING:
    from sandbox_gym.snapshot_model import SnapshotModel

__all__ = ["Branch", "BranchableEnv", "SandboxEnv", "Trajectory", "make_env"]

_STEPS_PER_TIMEOUT = 100  # of a rollout: each hundred steps begun may take a step's timeout


class SandboxEnv(BranchableEnv):
    """A Gymnasium environment that runs inside a sandbox; spaces, rewards, infos and rendering are the hosted one's.

    `env_id` is made there by `gymnasium.make(env_id, **env_kwargs)`, with its registered wrappers (env_kwargs take
    max_episode_steps); or `entry_point="module:Class"` of a module the sandbox can import. Further keywords are those
    of `Sandbox.create`.

    Seeds: `reset(seed=s)` gives what the bare environment gives. A reset without one restores all but np_random, which
    goes on as in the bare environment; other generators are seeded anew, reproducibly after a seeded reset.

    Raises:
        SnapshotError: the environment can't be captured (the message says why).
        SandboxTimeout: it was not made within `reset_timeout` seconds.
        SandboxError, or Gymnasium's own error: it raised.
    """

    # "human" is left to Gymnasium's HumanRendering, which shows a sandbox's rgb_array on this side.
    metadata: dict[str, Any] = {"render_modes": ["rgb_array", "ansi"], "render_fps": 30}  # noqa: RUF012

    def __init__(
        self,
        env_id: str | None = None,
        *,
        entry_point: str | None = None,
        env_kwargs: dict[str, Any] | None = None,
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
        if render_mode == "human":
            raise ValueError(
                "a sandbox has no screen: gymnasium.make shows one, or take render_mode='rgb_array'"
            )
        request = {
            "env_id": env_id,
            "entry_point": entry_point,
            "env_kwargs": plain(env_kwargs, "env_kwargs"),
            "render_mode": render_mode,
            "max_episode_steps": max_episode_steps,
        }
        self._step_timeout = step_timeout
        self._reset_timeout = reset_timeout
        box = Sandbox.create(backend=backend, image=image, **limits)
        try:
            self._remote = Remote(make(box, request, timeout=reset_timeout))
            self._open(box)
        except BaseException:
            box.terminate()
            raise
        hosting = self._remote.hosting
        self.observation_space = hosting.observation_space
        self.action_space = hosting.action_space
        self.render_mode = hosting.render_mode
        modes = [mode for mode in hosting.metadata["render_modes"] if mode != "human"]
        self.metadata = {**hosting.metadata, "render_modes": modes}

    @property
    def hosted(self) -> Hosting:
        """What the guest said of its environment: name, spec, metadata."""
        return self._remote.hosting

    @property
    def _kind(self) -> str:
        return self._remote.hosting.kind

    def step(self, action: Any) -> Step:
        """One step of the hosted environment, with what it raises raised here.

        Raises:
            SandboxTimeout: it took longer than `step_timeout`; the sandbox was killed, and reset starts anew.
            SandboxDied, LimitExceeded: it is gone, or was killed at its memory limit. Never a reward that looks real.
        """
        self._fresh = False
        return self._remote.step(self.sandbox, action, timeout=self._step_timeout)

    def render(self) -> Any:
        """The hosted environment's frame: an array, text, or a list of either."""
        frame = call(self.sandbox, Op.RENDER, timeout=self._step_timeout)
        _audit.drawn(self.sandbox, frame)
        return frame

    def rollout(
        self,
        actions: Sequence[Any] | None = None,
        *,
        policy: str | None = None,
        max_steps: int = 1000,
        seed: int | None = None,
        discount: float = 1.0,
        observations: bool = False,
        timeout: float | None = None,
    ) -> Trajectory:
        """Plays inside the guest, in one message: the given `actions`, or `policy="random"` for up to `max_steps`,
        until the episode ends. The environment is left where that ends; an episode that is over already gives no step.

        `seed` chooses the random actions (without one they go on from where the last rollout's stopped). `discount`
        weighs `Trajectory.value`. `timeout`: seconds for all of it, by default `step_timeout` for each 100 steps.

        Raises what `step` does.
        """
        if (actions is None) == (policy is None):
            raise TypeError("rollout takes actions, or policy='random'")
        steps = max_steps if actions is None else len(actions)
        request = {
            "actions": None if actions is None else list(actions),
            "policy": policy,
            "max_steps": max_steps,
            "seed": seed,
            "discount": discount,
            "observations": observations,
        }
        self._fresh = False
        return self._remote.rollout(self.sandbox, request, timeout=timeout or self.rollout_timeout(steps))

    def rollout_timeout(self, steps: int) -> float:
        """Seconds that a rollout of so many steps may take when it is given no timeout."""
        return self._step_timeout * max(1, math.ceil(steps / _STEPS_PER_TIMEOUT))

    def search_model(self) -> SnapshotModel:
        """This environment as `sandbox_gym.search` sees it: a state is a frozen copy of the guest."""
        from sandbox_gym.snapshot_model import SnapshotModel

        return SnapshotModel(self)

    def _begin(self, seed: int | None, options: dict[str, Any] | None) -> tuple[Any, dict[str, Any]]:
        plain(options, "options")
        carry = None
        if seed is None:
            seed = int(self.np_random.integers(2**31))
            carry = self._chance()
        box = self._rewind_to_start()
        return self._remote.reset(box, timeout=self._reset_timeout, seed=seed, options=options, carry=carry)

    def _chance(self) -> Any:
        """np_random of the copy that is to be replaced; None when there is none, or no copy that still answers."""
        if self._fresh or self.sandbox.status != "running":
            return None
        try:
            return call(self.sandbox, Op.RESET, {"what": "chance"}, timeout=self._step_timeout)
        except (SandboxError, gymnasium.error.Error):
            return None

    def _recall(self, snapshot: Snapshot) -> tuple[Any, dict[str, Any]]:
        return self._remote.reset(self.sandbox, timeout=self._step_timeout, what="again")


def make_env(env_id: str | None = None, *, entry_point: str | None = None, **kwargs: Any) -> BranchableEnv:
    """What `gymnasium.make("Sandbox-v0", ...)` calls: a hosted environment, or with neither, the sandbox itself."""
    if env_id is None and entry_point is None:
        from sandbox_gym.envs.terminal import TerminalEnv

        return TerminalEnv(**kwargs)
    caller = sys._getframe(1)
    if caller.f_globals.get("__name__") == "gymnasium.envs.registration":
        # It tells nobody else, and a wrapper outside counts on when the sandbox is restored.
        limit = caller.f_locals.get("max_episode_steps")
        if limit is not None and limit > 0:
            warnings.warn(
                f"gymnasium.make counts max_episode_steps={limit} outside of the sandbox, where snapshots, branches "
                f"and rollouts know nothing of it: give env_kwargs={{'max_episode_steps': {limit}}} instead",
                RuntimeWarning,
                stacklevel=3,
            )
    return SandboxEnv(env_id, entry_point=entry_point, **kwargs)


make_env.metadata = SandboxEnv.metadata  # type: ignore[attr-defined]  # gymnasium.make reads the render modes here
