"""RLlib's algorithms, which end with an error when sandboxes keep failing; RLlib's would go on without samples."""

from __future__ import annotations

import time
import traceback
from typing import Any

from ray.rllib.algorithms.appo import APPO
from ray.rllib.algorithms.dqn import DQN
from ray.rllib.algorithms.impala import IMPALA
from ray.rllib.algorithms.ppo import PPO

from sandbox_gym.errors import SandboxError

_PATIENCE = 300.0  # seconds in which one env runner at least must have started again
_PAUSE = 0.1  # seconds between two looks


class _Watched:
    """Restores env runners as RLlib does, then makes sure that there are some."""

    def setup(self, config: Any) -> None:
        """Raises SandboxError: the first env runner could not start."""
        parent: Any = super()
        try:
            parent.setup(config)
        except IndexError as error:
            if traceback.extract_tb(error.__traceback__)[-1].name != "get_spaces":
                raise
            # RLlib has only logged what the env runner raised, and then asks it for its spaces.
            raise SandboxError(
                "the first env runner could not start: Ray logged above what it raised. With num_env_runners=0 it is "
                "raised here"
            ) from None

    def restore_env_runners(self, env_runner_group: Any) -> list[int]:
        """Called before each training step.

        Raises SandboxError: an env runner says that its sandboxes keep failing, or none has come back in time.
        """
        deadline = time.monotonic() + _PATIENCE
        while True:
            parent: Any = super()
            restored: list[int] = parent.restore_env_runners(env_runner_group)
            if restored:
                _raise_failures(env_runner_group, restored)
            if not env_runner_group.num_remote_env_runners() or env_runner_group.healthy_env_runner_ids():
                return restored
            if time.monotonic() > deadline:
                raise SandboxError(
                    f"no env runner has come back within {_PATIENCE:.0f} s: see why in the logs of Ray's workers, "
                    "then build the algorithm again, from its last checkpoint"
                )
            time.sleep(_PAUSE)


def _raise_failures(group: Any, runners: list[int]) -> None:
    failures = group.foreach_env_runner(
        lambda runner: getattr(runner, "failure", None),
        remote_worker_ids=runners,
        local_env_runner=False,
        timeout_seconds=_PATIENCE,
    )
    for failure in failures:
        if failure is not None:
            raise SandboxError(f"an env runner's sandboxes keep failing: {failure}")


class SandboxPPO(_Watched, PPO):
    pass


class SandboxAPPO(_Watched, APPO):
    pass


class SandboxIMPALA(_Watched, IMPALA):
    pass


class SandboxDQN(_Watched, DQN):
    pass
