"""RLlib with lanes that are sandboxes against RLlib with bare environments, the same configuration in the same run."""

from __future__ import annotations

import statistics
import time
from typing import Any

from benchmarks._report import Row, progress

_ENV = "CartPole-v1"
_LANES = 8
_GOAL = 450.0  # mean return of the last 100 episodes
_MOST_STEPS = 600_000
_BARS = {"sampling": 1.0, "training": 1.3}


def configure(kind: str, *, seed: int = 0) -> Any:
    """PPO on CartPole, sampling and learning in this process. `kind`: "async" for bare environments, each in a process
    of AsyncVectorEnv; "snapshot" or "reuse" for sandboxes, by how episodes begin. The same env runner seeds all of them
    alike, so that they play the same episodes and learn the same.
    """
    from ray.rllib.algorithms.ppo import PPOConfig

    from sandbox_gym.rllib import SandboxEnvRunner, ppo_config

    if kind == "async":
        config: Any = PPOConfig().environment(_ENV)
        config.env_runners(
            env_runner_cls=SandboxEnvRunner,
            num_env_runners=0,
            num_envs_per_env_runner=_LANES,
            gym_env_vectorize_mode="async",
        )
    else:
        config = ppo_config(_ENV, num_envs_per_env_runner=_LANES, fresh=kind)
    config.training(
        train_batch_size_per_learner=1024,
        minibatch_size=256,
        num_epochs=8,
        lr=1e-3,
        gamma=0.98,
        lambda_=0.8,
        entropy_coeff=0.0,
        vf_loss_coeff=0.01,
        vf_clip_param=1000.0,
    )
    config.rl_module(model_config={"fcnet_hiddens": [64, 64], "vf_share_layers": True})
    return config.debugging(seed=seed)


def sampling(quick: bool) -> list[Row]:
    """Environment steps per second of an env runner, policy included, in alternating rounds; medians. The policy has
    learned nothing yet: an episode lasts 22 steps, and with fresh="snapshot" each costs a new copy of a sandbox, which
    bare environments have nothing like.
    """
    rounds, steps = (7, 1024) if quick else (15, 4096)
    algorithms = {kind: configure(kind).build_algo() for kind in ("async", "reuse", "snapshot")}
    rates: dict[str, list[float]] = {kind: [] for kind in algorithms}
    try:
        for kind, algorithm in algorithms.items():
            progress(f"RLlib sampling: {kind}")
            algorithm.env_runner.sample(num_timesteps=512)
        for _ in range(rounds):
            for kind, algorithm in algorithms.items():
                start = time.perf_counter()
                episodes = algorithm.env_runner.sample(num_timesteps=steps)
                rates[kind].append(sum(map(len, episodes)) / (time.perf_counter() - start))
    finally:
        for algorithm in algorithms.values():
            algorithm.stop()
    bare = statistics.median(rates["async"])
    return [
        Row(
            f"RLlib env steps/s, {_LANES} lanes, fresh={kind}",
            statistics.median(rates[kind]),
            "1/s",
            "bare, gym_env_vectorize_mode=async",
            bare,
            bar=_BARS["sampling"] if kind == "reuse" else None,
            more_is_better=True,
        )
        for kind in ("reuse", "snapshot")
    ]


def training(seeds: int = 3) -> list[Row]:
    """Seconds of PPO until CartPole's mean return is 450; medians over seeds."""
    taken: dict[str, list[float]] = {"async": [], "snapshot": []}
    for seed in range(seeds):
        for kind, times in taken.items():
            seconds, steps = _train(kind, seed)
            times.append(seconds)
            progress(f"PPO to a return of {_GOAL:g}, seed {seed}, {kind}: {seconds:.0f} s, {steps} steps")
    return [
        Row(
            f"PPO on {_ENV} to a mean return of {_GOAL:g}, {_LANES} sandboxes",
            statistics.median(taken["snapshot"]),
            "s",
            "bare, gym_env_vectorize_mode=async",
            statistics.median(taken["async"]),
            bar=_BARS["training"],
        )
    ]


def _train(kind: str, seed: int) -> tuple[float, int]:
    """Seconds and steps. Raises RuntimeError when the return is not reached: a time without it would mean nothing."""
    start = time.perf_counter()
    algorithm = configure(kind, seed=seed).build_algo()
    try:
        steps = 0
        while steps < _MOST_STEPS:
            result = algorithm.train()["env_runners"]
            steps = int(result["num_env_steps_sampled_lifetime"])
            if result["episode_return_mean"] >= _GOAL:
                return time.perf_counter() - start, steps
    finally:
        algorithm.stop()
    raise RuntimeError(f"PPO with {kind} has not reached {_GOAL:g} in {_MOST_STEPS} steps")
