"""Ready configurations of RLlib's algorithms on `sandbox_gym:Sandbox-v0`."""

from __future__ import annotations

from typing import Any

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.appo import APPOConfig
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.algorithms.impala import IMPALAConfig
from ray.rllib.algorithms.ppo import PPOConfig

from sandbox_gym.rllib.algorithms import SandboxAPPO, SandboxDQN, SandboxIMPALA, SandboxPPO
from sandbox_gym.rllib.callbacks import SandboxCallbacks
from sandbox_gym.rllib.env_runner import SandboxEnvRunner


def ppo_config(env_id: str | None = None, **options: Any) -> Any:
    """PPO whose env runners step lanes that are sandboxes; an ordinary AlgorithmConfig, to be configured further.

    `env_id` or `entry_point="module:Class"`, with `env_kwargs`: the environment. `encode`: how its observations become
    arrays that RLlib's default networks accept, "auto", "flat" or "image" as in `sandbox_gym.envs.encoded`, or
    None for observations as they are.

    `num_env_runners`: processes that sample beside the one that learns; 0: that one does. `num_envs_per_env_runner`:
    lanes of each. All other options are those of `SandboxVectorEnv`: `fresh`, `image`, `step_timeout`, the limits.

        algo = ppo_config("CartPole-v1").training(lr=1e-4).build_algo()
        algo.train()
    """
    return _sandboxed(PPOConfig(algo_class=SandboxPPO), env_id, **options)


def appo_config(env_id: str | None = None, **options: Any) -> Any:
    """As `ppo_config`, for APPO. Samples asynchronously: one env runner process by default."""
    return _sandboxed(APPOConfig(algo_class=SandboxAPPO), env_id, **{"num_env_runners": 1, **options})


def impala_config(env_id: str | None = None, **options: Any) -> Any:
    """As `ppo_config`, for IMPALA. Samples asynchronously: one env runner process by default."""
    return _sandboxed(IMPALAConfig(algo_class=SandboxIMPALA), env_id, **{"num_env_runners": 1, **options})


def dqn_config(env_id: str | None = None, **options: Any) -> Any:
    """As `ppo_config`, for DQN."""
    return _sandboxed(DQNConfig(algo_class=SandboxDQN), env_id, **options)


def _sandboxed(
    config: AlgorithmConfig,
    env_id: str | None,
    *,
    entry_point: str | None = None,
    env_kwargs: dict[str, Any] | None = None,
    encode: str | None = "auto",
    num_env_runners: int = 0,
    num_envs_per_env_runner: int = 8,
    **sandbox: Any,
) -> AlgorithmConfig:
    if (env_id is None) == (entry_point is None):
        raise ValueError("give an env_id, or an entry_point='module:Class'")
    env: dict[str, Any] = {"env_id": env_id, "entry_point": entry_point, "env_kwargs": env_kwargs}
    if encode is not None:
        kwargs = {**(env_kwargs or {}), "encode": encode, "env_id": env_id, "entry_point": entry_point}
        env = {"entry_point": "sandbox_gym_guest.encoded:make", "env_kwargs": kwargs}
    return (
        config.environment("sandbox_gym:Sandbox-v0", env_config={**env, **sandbox})
        .env_runners(
            env_runner_cls=SandboxEnvRunner,
            gym_env_vectorize_mode="vector_entry_point",
            num_env_runners=num_env_runners,
            num_envs_per_env_runner=num_envs_per_env_runner,
        )
        .callbacks(SandboxCallbacks)
        .fault_tolerance(restart_failed_env_runners=True, delay_between_env_runner_restarts_s=1.0)
    )
