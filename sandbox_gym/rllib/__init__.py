"""sandbox_gym in RLlib: configurations that are ready to train.

    algo = ppo_config("CartPole-v1").build_algo()
    algo.train()

What they set beside the algorithm can be given to any other of RLlib's configurations too:

    config.environment("sandbox_gym:Sandbox-v0", env_config={"env_id": ...})
    config.env_runners(env_runner_cls=SandboxEnvRunner, gym_env_vectorize_mode="vector_entry_point")
    config.callbacks(SandboxCallbacks)
"""

from __future__ import annotations

try:
    import ray.rllib  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError(
        f"sandbox_gym.rllib needs RLlib (there is no {error.name}): pip install 'sandbox-gym[ray]' (in the repository, "
        ".venv-oldest has it)"
    ) from None

from sandbox_gym.rllib.callbacks import SandboxCallbacks
from sandbox_gym.rllib.configs import appo_config, dqn_config, impala_config, ppo_config
from sandbox_gym.rllib.env_runner import SandboxEnvRunner

__all__ = [
    "SandboxCallbacks",
    "SandboxEnvRunner",
    "appo_config",
    "dqn_config",
    "impala_config",
    "ppo_config",
]
