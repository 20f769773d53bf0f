"""The environments that come with sandbox_gym, trained by RLlib for an iteration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from ray.rllib.algorithms.ppo import PPOConfig

from examples.users import a6_policy
from sandbox_gym import Sandbox
from sandbox_gym._spares import forget
from sandbox_gym.envs.shell_quest import ShellQuestEnv
from sandbox_gym.rllib import ppo_config


@pytest.fixture(autouse=True)
def no_sandboxes_left(cluster: Any) -> Iterator[None]:
    forget()
    before = len(Sandbox.list())
    yield
    forget()
    assert len(Sandbox.list()) == before


def returns(config: Any, **training: int) -> dict[str, Any]:
    sizes = {"train_batch_size_per_learner": 128, "minibatch_size": 64, **training}
    algorithm = config.training(num_epochs=1, **sizes).build_algo()
    try:
        result: dict[str, Any] = algorithm.train()["env_runners"]
        return result
    finally:
        algorithm.stop()


def test_a_phone_assistant_in_sandboxes() -> None:
    result = returns(ppo_config("sandbox_gym:CallAgent-v0", num_envs_per_env_runner=4, fresh="reuse"))
    assert -10 < result["episode_return_mean"] < 10
    assert result["sandboxes"]["lane_failures"] == 0


def test_terminal_quests_that_make_their_own_sandboxes() -> None:
    config = PPOConfig().environment("sandbox_gym:ShellQuest-v0", env_config={"max_steps": 4})
    result = returns(config.env_runners(num_env_runners=0, num_envs_per_env_runner=2))
    assert 0 <= result["episode_return_mean"] <= 1
    assert result["episode_len_mean"] <= 4


def test_repairs_of_a_package() -> None:
    settings = {"seed": 3, "menu": True, "encode": "flat", "max_steps": 2}
    config = PPOConfig().environment("sandbox_gym:RepoRepair-v0", env_config=settings)
    result = returns(
        config.env_runners(num_env_runners=0, rollout_fragment_length=12),
        train_batch_size_per_learner=12,
        minibatch_size=6,
    )
    assert 0 <= result["episode_return_mean"] <= 1
    assert result["episode_len_mean"] <= 2


def test_quests_are_the_same_under_the_oldest_gymnasium() -> None:
    env = ShellQuestEnv(kind="organise")
    try:
        env.reset(seed=0)
        steps = [env.step(env.quest.menu.index(command)) for command in env.quest.reference]
        assert steps[-1][2]
    finally:
        env.close()


def test_rollouts_from_one_moment_led_by_a_scored_policy(capsys: pytest.CaptureFixture[str]) -> None:
    a6_policy.main()
    said = capsys.readouterr().out.splitlines()
    assert said[-1].split()[:2] == ["scored", "on"]
    assert sum("8 calls from the same moment" in line for line in said) == a6_policy.ROUNDS
