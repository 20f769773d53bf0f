"""What sandboxes do, among RLlib's metrics."""

from __future__ import annotations

from typing import Any

from ray.rllib.callbacks.callbacks import RLlibCallback

from sandbox_gym.vector import SandboxVectorEnv

_WINDOW = 1000  # restores that percentiles are taken of


class SandboxCallbacks(RLlibCallback):
    """Adds to `result["env_runners"]["sandboxes"]`, over all env runners:

    restore_seconds   percentiles 50 and 99 of what a lane waited for its copy; a copy made ahead costs next to nothing
    restores          copies that lanes were given, since training began
    lane_failures     episodes that ended because a guest died, hung or raised, since training began
    live              sandboxes that an env runner has now, copies made ahead included: the mean over env runners

    A class of yours goes beside this one: `config.callbacks([SandboxCallbacks, Yours])`.
    """

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, int]] = {}  # restores and failures reported, by environment

    def on_sample_end(self, *, env_runner: Any, metrics_logger: Any, samples: Any, **kwargs: Any) -> None:
        env = env_runner.env.unwrapped
        if not isinstance(env, SandboxVectorEnv):
            return
        now = env.statistics
        restores, failures = self._seen.get(id(env), (0, 0))
        self._seen = {id(env): (now.restores, now.failures)}
        fresh = now.restores - restores
        for seconds in now.recent_restores[-fresh:] if fresh else ():
            metrics_logger.log_value(
                ("sandboxes", "restore_seconds"),
                seconds,
                reduce="percentiles",
                window=_WINDOW,
                percentiles=[50, 99],
            )
        metrics_logger.log_value(("sandboxes", "restores"), fresh, reduce="lifetime_sum")
        metrics_logger.log_value(
            ("sandboxes", "lane_failures"), now.failures - failures, reduce="lifetime_sum"
        )
        metrics_logger.log_value(("sandboxes", "live"), now.sandboxes, window=1)
