"""The env runner: seeds of its own for every lane, and what happens when sandboxes fail."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import ray
from ray.rllib.env.env_runner import ENV_STEP_FAILURE, NUM_ENV_STEP_FAILURES_LIFETIME
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner
from ray.rllib.utils.metrics import ENV_RESET_TIMER, ENV_STEP_TIMER

from sandbox_gym.errors import SandboxDied, SandboxTimeout

_ACCIDENTS = (SandboxDied, SandboxTimeout)  # a supervisor that is gone, a machine that is too busy to reset
_TRIES = 3  # accidents within one `sample()`, after which they are none


class SandboxEnvRunner(SingleAgentEnvRunner):
    """A `SingleAgentEnvRunner` for `SandboxVectorEnv`.

    Seeds. Where `config.debugging(seed=...)` is set, the first episode of each lane has a seed that no other lane of no
    other env runner has (RLlib's own are seed + worker + lane, the same for many). Restarted runners, and those of an
    algorithm from a checkpoint, get others than before. Later episodes go on with their lane's random numbers.

    Failures. A guest that fails ends the episode of its lane; the step that was never made is left out of the samples.
    When the supervisor is gone, all lanes start new episodes with another; what their unfinished ones had sampled since
    the last `sample()` is lost. What keeps failing raises: here, and with `sandbox_gym.rllib.algorithms` in `train()`.
    """

    def __init__(self, **kwargs: Any) -> None:
        self.failure: str | None = None  # why this runner can't go on
        self._accidents = 0
        self._seedings = 0
        super().__init__(**kwargs)

    # ---- seeds --------------------------------------------------------------------------------------------------

    def _lane_seeds(self) -> list[int]:
        """A seed for each lane, for episodes that begin now."""
        config, worker = self.config, self.worker_index or 0
        lives = ray.get_runtime_context()
        restarted = lives.get_actor_id() is not None and lives.was_current_actor_reconstructed
        moment = (
            int(config.in_evaluation),
            int(self.num_env_steps_sampled_lifetime),
            self._seedings,
            secrets.randbits(32) if restarted else 0,
        )
        self._seedings += 1
        return lane_seeds(config.seed, worker, self.num_envs, moment)

    # ---- sampling -----------------------------------------------------------------------------------------------

    def sample(self, **kwargs: Any) -> list[Any]:
        self._accidents = 0
        return without_failed_steps(super().sample(**kwargs))

    def _try_env_reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        while True:
            try:
                with self.metrics.log_time(ENV_RESET_TIMER):
                    return self.env.reset(seed=None if seed is None else self._lane_seeds(), options=options)
            except Exception as error:
                self._endure(error)

    def _try_env_step(self, actions: Any) -> Any:
        try:
            with self.metrics.log_time(ENV_STEP_TIMER):
                results = self.env.step(actions)
        except Exception as error:
            self.metrics.log_value(NUM_ENV_STEP_FAILURES_LIFETIME, 1, reduce="lifetime_sum")
            self._endure(error)
            return ENV_STEP_FAILURE  # RLlib now resets all lanes
        self._log_env_steps(metric=self._metrics_num_try_env_step, num_steps=1)
        return results

    def _endure(self, error: Exception) -> None:
        """Raises the error, unless it may be an accident."""
        self._accidents += 1
        if not isinstance(error, _ACCIDENTS) or self._accidents >= _TRIES:
            self.failure = f"{type(error).__name__}: {error}"
            raise error from None  # its cause holds a guest's traceback, and RLlib fails to copy it

    def apply(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """RLlib's calls. Where sandboxes have failed, the error goes to the caller and this process lives on; RLlib's
        own `apply` would end it, and its message with it.
        """
        try:
            return func(self, *args, **kwargs)
        except Exception as error:
            if self.failure is None:
                super().apply(_raise, error)
            raise


def lane_seeds(seed: int, worker: int, num_envs: int, moment: tuple[int, ...] = ()) -> list[int]:
    """31-bit seeds for the lanes of one worker: those of no two workers meet, as long as all have `num_envs` lanes and
    the same `moment`.
    """
    first = int(np.random.SeedSequence([abs(seed), *moment]).generate_state(1)[0])
    return [(first + worker * num_envs + lane) % 2**31 for lane in range(num_envs)]


def without_failed_steps(episodes: list[Any]) -> list[Any]:
    """Episodes that a failure has truncated end with the step before, since that step was never made."""
    kept = []
    for episode in episodes:
        if not episode.is_truncated or "sandbox_error" not in episode.get_infos(-1):
            kept.append(episode)
        elif len(episode) > 1:
            kept.append(episode.slice(slice(0, len(episode) - 1)))
            kept[-1].is_truncated = True
    return kept


def _raise(_: Any, error: Exception) -> NoReturn:
    raise error
