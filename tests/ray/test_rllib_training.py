"""Training by RLlib, each configuration for an iteration or two."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.ppo import PPOConfig

from sandbox_gym import Sandbox
from sandbox_gym._spares import forget
from sandbox_gym.rllib import SandboxEnvRunner, appo_config, dqn_config, impala_config, ppo_config
from tests.ray.rllib_toys import tell_seeds

TOYS = "tests.ray.rllib_toys"


@pytest.fixture(autouse=True)
def no_sandboxes_left(cluster: Any) -> Iterator[None]:
    forget()
    before = len(Sandbox.list())
    yield
    forget()
    assert len(Sandbox.list()) == before


def short(config: Any) -> Any:
    return config.training(train_batch_size_per_learner=256, minibatch_size=128, num_epochs=1)


def train(config: Any, iterations: int = 1) -> dict[str, Any]:
    algorithm = config.build_algo()
    try:
        for _ in range(iterations):
            result: dict[str, Any] = algorithm.train()
        return result
    finally:
        algorithm.stop()


def test_ppo_and_what_its_sandboxes_did() -> None:
    result = train(short(ppo_config("CartPole-v1")), 2)["env_runners"]
    assert 9 < result["episode_return_mean"] < 100
    sandboxes = result["sandboxes"]
    assert sandboxes["restores"] >= 8 + result["num_episodes_lifetime"] - 8
    assert 0 < sandboxes["restore_seconds"][50] <= sandboxes["restore_seconds"][99] < 5
    assert sandboxes["lane_failures"] == 0
    assert sandboxes["live"] >= 8


@pytest.mark.parametrize("fresh", ["snapshot", "reuse"])
def test_sandboxes_learn_just_what_bare_environments_do(fresh: str) -> None:
    """The same seeds, the same random numbers over all episodes: the losses are equal to the last bit."""
    bare = PPOConfig().environment("CartPole-v1")
    bare.env_runners(
        env_runner_cls=SandboxEnvRunner,
        gym_env_vectorize_mode="sync",
        num_env_runners=0,
        num_envs_per_env_runner=8,
    )
    losses = [
        train(short(config).debugging(seed=1), 2)["learners"]["default_policy"]["total_loss"]
        for config in (bare, ppo_config("CartPole-v1", fresh=fresh))
    ]
    assert losses[0] == losses[1]


def test_evaluation_has_lanes_and_seeds_of_its_own() -> None:
    config = short(ppo_config(entry_point=f"{TOYS}:Counter", num_envs_per_env_runner=4))
    config.debugging(seed=2).callbacks(on_episode_start=tell_seeds)
    result = train(config.evaluation(evaluation_interval=1, evaluation_duration=8))
    evaluated = result["evaluation"]["env_runners"]
    assert evaluated["num_episodes"] == 8
    assert len({*evaluated["seeds"], *result["env_runners"]["seeds"]}) == 8


def test_without_copies_no_restores() -> None:
    sandboxes = train(short(ppo_config("CartPole-v1", fresh="reuse")), 2)["env_runners"]["sandboxes"]
    assert sandboxes["restores"] == 8, "only those that lanes began with"


@pytest.mark.parametrize("configure", [appo_config, impala_config])
def test_asynchronous_algorithms(configure: Callable[..., Any]) -> None:
    config = configure("CartPole-v1", num_envs_per_env_runner=4).training(train_batch_size_per_learner=200)
    config.learners(num_aggregator_actors_per_learner=0)
    algorithm = config.reporting(min_time_s_per_iteration=1).build_algo()
    try:
        # While it waits, `train` is so busy that a process's first sample, with its imports, takes ten seconds.
        algorithm.env_runner_group.foreach_env_runner(
            lambda runner: len(runner.sample()), local_env_runner=False
        )
        for _ in range(30):  # the first iterations may end before the first samples are there
            result = algorithm.train()
            if "default_policy" in result.get("learners", {}):
                break
    finally:
        algorithm.stop()
    assert math.isfinite(result["learners"]["default_policy"]["total_loss"])
    assert result["env_runners"]["num_env_steps_sampled_lifetime"] >= 200
    assert result["env_runners"]["sandboxes"]["live"] >= 4


def test_dqn() -> None:
    config = dqn_config("CartPole-v1", num_envs_per_env_runner=4).training(
        num_steps_sampled_before_learning_starts=50
    )
    result = train(config.reporting(min_sample_timesteps_per_iteration=100))
    assert result["env_runners"]["sandboxes"]["restores"] >= 4
    assert math.isfinite(result["learners"]["default_policy"]["total_loss"])


ENCODED = {
    "dict, auto": ({"entry_point": f"{TOYS}:Mixed"}, (147 + 64 + 4 + 3 + 5,)),
    "picture, auto": ({"entry_point": f"{TOYS}:Picture"}, (64, 64, 3)),
    "discrete": ({"env_id": "FrozenLake-v1"}, (16,)),
    "MiniGrid": ({"env_id": "MiniGrid-Empty-5x5-v0"}, (147 + 64 + 4,)),
    "MiniGrid, its image": ({"env_id": "MiniGrid-Empty-5x5-v0", "encode": "image"}, (64, 64, 3)),
}


@pytest.mark.parametrize("name", list(ENCODED))
def test_encoded_observations(name: str) -> None:
    how, shape = ENCODED[name]
    config = ppo_config(num_envs_per_env_runner=2, **how).training(
        train_batch_size_per_learner=32, minibatch_size=32, num_epochs=1
    )
    algorithm = config.build_algo()
    try:
        assert algorithm.env_runner.env.single_observation_space.shape == shape
        loss = algorithm.train()["learners"]["default_policy"]["total_loss"]
    finally:
        algorithm.stop()
    assert math.isfinite(loss)


def test_a_checkpoint_goes_on(tmp_path: Path) -> None:
    config = short(ppo_config(entry_point=f"{TOYS}:Counter"))
    config.debugging(seed=5).callbacks(on_episode_start=tell_seeds)
    algorithm = config.build_algo()
    try:
        first = algorithm.train()["env_runners"]["draws"]
        path = algorithm.save_to_path(tmp_path / "checkpoint")
        weights = algorithm.get_module().get_state()
        sampled = algorithm.train()["env_runners"]["num_env_steps_sampled_lifetime"]
    finally:
        algorithm.stop()
    again = Algorithm.from_checkpoint(path)
    try:
        assert type(again) is type(algorithm)
        for name, value in again.get_module().get_state().items():
            assert np.array_equal(value, weights[name])
        result = again.train()
        assert result["training_iteration"] == 2
        assert result["env_runners"]["num_env_steps_sampled_lifetime"] == sampled
        assert len(result["env_runners"]["seeds"]) == 8
        assert not set(result["env_runners"]["draws"]) & set(first), "the same episodes once more"
    finally:
        again.stop()


def test_one_environment_is_named() -> None:
    with pytest.raises(ValueError, match="env_id, or an entry_point"):
        ppo_config()
    with pytest.raises(ValueError, match="env_id, or an entry_point"):
        ppo_config("CartPole-v1", entry_point=f"{TOYS}:Counter")
