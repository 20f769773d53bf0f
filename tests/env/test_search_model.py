"""A sandboxed environment is a model that search can rely on, and leaves nothing behind."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest

from sandbox_gym._snapshot import Snapshot
from sandbox_gym.env import SandboxEnv
from sandbox_gym.errors import SandboxTimeout
from sandbox_gym.sandbox import Sandbox
from sandbox_gym.search import MCTS
from sandbox_gym.search.model import Model, as_model
from sandbox_gym.search.testing import check_model

Make = Callable[..., SandboxEnv]


def same(left: Any, right: Any) -> bool:
    if isinstance(left, dict):
        return all(same(left[key], right[key]) for key in left)
    return bool(np.array_equal(left, right))


@pytest.mark.parametrize("name", ["CartPole-v1", "MiniGrid-DoorKey-6x6-v0", "Dice"])
def test_it_keeps_what_models_promise(name: str, sandboxed: Make) -> None:
    gc.collect()
    before = {snapshot.id for snapshot in Snapshot.list()}
    env = sandboxed(name)
    env.reset(seed=1)
    moment = env.snapshot()
    expected = env.step(1)
    env.restore(moment)
    model = as_model(env)
    assert isinstance(model, Model)
    check_model(model, same=same)
    after = env.step(1)
    assert same(after[0], expected[0])
    assert after[1:] == expected[1:]
    assert Sandbox.list() == [env.sandbox]
    moment.delete()
    env.close()
    assert {snapshot.id for snapshot in Snapshot.list()} <= before


def test_states_nest_deeper_than_process_namespaces(sandboxed: Make) -> None:
    env = sandboxed("Dice")
    env.reset(seed=1)
    model = env.search_model()
    states = [model.root()]
    for _ in range(35):
        step = model.step(states[-1], 0)
        assert step.state is not None
        states.append(step.state)
    assert len(states) <= model.max_depth
    assert model.rollout(states[-1], max_steps=3, discount=1.0, seed=0).actions
    for state in reversed(states):
        model.release(state)
    assert Sandbox.list() == [env.sandbox]


def test_a_search_after_each_of_many_moves(sandboxed: Make) -> None:
    env = sandboxed("Dice")
    env.reset(seed=1)
    for _ in range(35):
        model = env.search_model()
        root = model.root()
        step = model.step(root, 0)
        assert step.state is not None
        observation, reward, *_ = env.step(0)
        assert (observation, reward) == (step.observation, step.reward)
        model.release(step.state)
        model.release(root)


def test_a_step_that_fails_gives_back_what_it_had_made(sandboxed: Make) -> None:
    env = sandboxed("Trouble", step_timeout=1.0)
    env.reset(seed=1)
    model = env.search_model()
    root = model.root()
    held = len(Snapshot.list())
    with pytest.raises(SandboxTimeout):
        model.step_all(root, [0, 5, 9])
    assert len(Snapshot.list()) == held
    assert Sandbox.list() == [env.sandbox]
    ended = model.step(root, 9)
    assert (ended.state, ended.terminated) == (None, True)
    model.release(root)


def test_a_search_is_the_same_again_and_frees_everything(sandboxed: Make) -> None:
    env = sandboxed("CartPole-v1")
    env.reset(seed=3)
    held = {snapshot.id for snapshot in Snapshot.list()}
    search = MCTS(num_simulations=16, rollout_max_steps=20, seed=0)
    first, second = search.search(env), search.search(env)
    assert (first.action, first.value) == (second.action, second.value)
    assert np.array_equal(first.visit_counts, second.visit_counts)
    assert len({snapshot.id for snapshot in Snapshot.list()} - held) == 0
    assert Sandbox.list() == [env.sandbox]


def test_only_discrete_actions_are_searched(sandboxed: Make) -> None:
    with pytest.raises(TypeError, match="Discrete"):
        sandboxed("Sampler").search_model()


@pytest.mark.parametrize("before", [False, True])
def test_what_is_over_or_has_not_begun_is_not_searched(sandboxed: Make, before: bool) -> None:
    env = sandboxed("CartPole-v1", env_kwargs={"max_episode_steps": 2})
    if not before:
        env.reset(seed=0)
        env.step(0)
        assert env.step(0)[3]
    with pytest.raises(gymnasium.error.ResetNeeded, match=r"reset\(\)"):
        MCTS(num_simulations=3).search(env)
