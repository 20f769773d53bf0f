"""Snapshots, restores, branches and rollouts: exact copies that know nothing of each other."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from sandbox_gym._snapshot import Snapshot
from sandbox_gym.branching import Branch
from sandbox_gym.env import SandboxEnv
from sandbox_gym.errors import SandboxTimeout, SnapshotError
from tests.env.test_hosted import GAMES, assert_same

Make = Callable[..., SandboxEnv]


def play(env: SandboxEnv, actions: list[Any]) -> list[Any]:
    return [env.step(action) for action in actions]


@pytest.mark.parametrize("name", GAMES)
def test_a_branch_replays_exactly_as_its_origin(name: str, sandboxed: Make) -> None:
    env = sandboxed(name)
    env.reset(seed=5)
    env.action_space.seed(1)
    play(env, [env.action_space.sample() for _ in range(3)])
    moment = env.snapshot()
    branches = env.branch(2)
    actions = [env.action_space.sample() for _ in range(12)]
    origin = play(env, actions)
    for branch in branches:
        for ours, theirs in zip(play(branch, actions), origin, strict=True):
            assert_same(ours, theirs)
        branch.close()
    env.restore(moment)
    for ours, theirs in zip(play(env, actions), origin, strict=True):
        assert_same(ours, theirs)


KINDS = ("own", "legacy", "random", "numpy")


def rolls(env: SandboxEnv) -> list[Any]:
    observation, _, _, _, info = env.step(0)
    return [observation, *(info[kind] for kind in KINDS)]


def test_copies_that_are_to_diverge_do_in_every_kind_of_chance(sandboxed: Make) -> None:
    env = sandboxed("Dice")
    env.reset(seed=5)
    moment = env.snapshot()
    origin = rolls(env)
    env.restore(moment)
    branches = [*env.branch(2, rng="diverge"), *env.branch(2, rng=7)]
    again = env.branch(2, rng=7)
    seen = [origin, *map(rolls, branches)]
    for kind in range(len(KINDS) + 1):
        assert len({roll[kind] for roll in seen}) == len(seen), ("np_random", *KINDS)[kind]
    assert [rolls(branch) for branch in again] == seen[3:]
    assert {branch.action_space.seed(None) for branch in branches}
    for branch in branches + again:
        branch.close()
    assert rolls(env) == origin


def test_sticky_actions_of_ale_diverge(sandboxed: Make) -> None:
    env = sandboxed("ALE/Breakout-v5")
    env.reset(seed=5)
    play(env, [1, 1, 1])
    moment = env.snapshot()

    def ram(rng: Any) -> list[bytes]:
        env.restore(moment, rng=rng)
        return [env.step(int(action))[0].tobytes() for action in [2, 3] * 20]

    same = ram("same")
    assert ram("same") == same
    assert ram(3) == ram(3) != same


def test_siblings_never_see_each_other(sandboxed: Make) -> None:
    env = sandboxed("CartPole-v1")
    env.reset(seed=0)
    first, second = env.branch(2)
    first.sandbox.run_code("mine = 1; open('/tmp/mine', 'w').write('x')")
    first.step(0)
    look = "import os; 'mine' in globals(), os.path.exists('/tmp/mine')"
    for other in (env, second):
        assert other.sandbox.run_code(look).value == "(False, False)"
    assert_same(env.step(1), second.step(1))
    first.close()
    second.close()


def test_branches_take_their_actions(sandboxed: Make) -> None:
    env = sandboxed("CartPole-v1")
    env.reset(seed=0)
    moment = env.snapshot()
    left, right = env.branch(actions=[0, 1])
    assert isinstance(left, Branch)
    for branch, action in ((left, 0), (right, 1)):
        env.restore(moment)
        expected = env.step(action)
        got = branch.observation, branch.reward, branch.terminated, branch.truncated, branch.info
        assert_same(got, expected)
        assert_same(branch.env.step(0), env.step(0))
        branch.env.close()
    assert env.branch(actions=[]) == []
    with pytest.raises(TypeError):
        env.branch()  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="at least one"):
        env.branch(0)


def test_a_branch_whose_step_fails_takes_its_siblings_along(sandboxed: Make) -> None:
    env = sandboxed("Trouble", step_timeout=1.0)
    env.reset()
    before = len(env.sandbox.list())
    with pytest.raises(SandboxTimeout):
        env.branch(actions=[0, 5, 0])
    assert len(env.sandbox.list()) == before
    assert env.step(0)[1] == 1.0


def test_restore_brings_back_the_moments_observation_and_info(sandboxed: Make) -> None:
    for kind in ("dict", "text"):  # of fixed size, and not
        env = sandboxed("Sampler", env_kwargs={"kind": kind})
        observation, info = env.reset(seed=3, options={"level": 1})
        start = env.snapshot()
        seen = env.step(env.action_space.sample())
        later = env.snapshot()
        env.step(env.action_space.sample())
        assert_same((*env.restore(start),), (observation, info))
        assert_same((*env.restore(later),), (seen[0], seen[-1]))
        assert_same((*env.reset(options={"snapshot": start}),), (observation, info))


def test_an_episode_from_a_decision_point(sandboxed: Make) -> None:
    env = sandboxed("Dice")
    env.reset(seed=3)
    env.step(0)
    point = env.snapshot()
    options = {"snapshot": point}
    expected = rolls(env)
    env.reset(options=options)
    assert rolls(env) == expected
    env.reset(seed=9, options=options)
    seeded = rolls(env)
    assert seeded != expected
    env.reset(seed=9, options=options)
    assert rolls(env) == seeded
    env.reset(options={"snapshot": point, "rng": "diverge"})
    assert rolls(env) != expected
    assert options == {"snapshot": point}
    with pytest.raises(ValueError, match="level"):
        env.reset(options={"snapshot": point, "level": 2})


def test_before_the_first_reset_there_is_no_moment(sandboxed: Make) -> None:
    env = sandboxed("CartPole-v1")
    moment = env.snapshot()
    with pytest.raises(gym.error.ResetNeeded):
        env.restore(moment)
    env.reset(seed=0)
    moment.delete()
    with pytest.raises(SnapshotError):
        env.restore(moment)


def test_a_branch_may_outlive_its_origin_and_nothing_outlives_both(sandboxed: Make) -> None:
    gc.collect()
    before = {snapshot.id for snapshot in Snapshot.list()}
    env = sandboxed("CartPole-v1")
    env.reset(seed=0)
    (branch,) = env.branch(1)
    env.close()
    branch.step(0)
    branch.reset(seed=1)
    branch.close()
    assert {snapshot.id for snapshot in Snapshot.list()} <= before


def test_a_branch_of_a_branch_and_foreign_snapshots(sandboxed: Make) -> None:
    env = sandboxed("CartPole-v1")
    env.reset(seed=0)
    (child,) = env.branch(1)
    child.step(1)
    (grandchild,) = child.branch(1)
    expected = grandchild.step(0)
    moment = child.snapshot()
    env.restore(moment)  # a child's snapshot, in its parent
    assert_same(env.step(0), expected)
    child.close()
    grandchild.close()


def test_rollouts_equal_steps(sandboxed: Make) -> None:
    env = sandboxed("CartPole-v1")
    env.reset(seed=0)
    moment = env.snapshot()
    actions = [0, 1] * 4
    steps = play(env, actions)
    env.restore(moment)
    played = env.rollout(actions, observations=True, discount=0.5)
    assert np.array_equal(played.observations, np.stack([step[0] for step in steps]))
    assert played.rewards.tolist() == [step[1] for step in steps]
    assert played.actions.tolist() == actions
    assert played.value == pytest.approx(sum(0.5**i for i in range(8)))
    assert (len(played), played.length, played.terminated, played.truncated) == (8, 8, False, False)
    assert_same((*env.restore(env.snapshot()),), (steps[-1][0], {}))


def test_random_rollouts(sandboxed: Make) -> None:
    env = sandboxed("CartPole-v1")
    env.reset(seed=0)
    moment = env.snapshot()

    def roll(seed: int | None) -> list[int]:
        env.restore(moment)
        played = env.rollout(policy="random", max_steps=200, seed=seed)
        assert played.terminated
        assert played.observations is None
        assert played.value == len(played)
        return [int(action) for action in played.actions]

    assert roll(1) == roll(1) != roll(2)
    assert roll(None) == roll(None)
    over = env.rollout([0, 1])
    assert (len(over), over.terminated, over.value) == (0, True, 0.0)
    env.restore(moment)
    assert len(env.rollout(policy="random", max_steps=3)) == 3
    with pytest.raises(TypeError):
        env.rollout()
    with pytest.raises(ValueError, match="greedy"):
        env.rollout(policy="greedy")


def test_rollouts_of_values_that_are_no_arrays(sandboxed: Make) -> None:
    for kind in ("dict", "text", "graph", "sequence"):
        env = sandboxed("Sampler", env_kwargs={"kind": kind})
        env.reset(seed=0)
        moment = env.snapshot()
        played = env.rollout(policy="random", max_steps=5, seed=1, observations=True)
        assert len(played.observations) == len(played.actions) == 5
        assert all(observation in env.observation_space for observation in played.observations)
        env.restore(moment)
        for action, observation in zip(played.actions, played.observations, strict=True):
            assert_same((env.step(action)[0], {}), (observation, {}))


def test_a_rollout_that_fails_gives_no_value(sandboxed: Make) -> None:
    env = sandboxed("Trouble", step_timeout=1.0)
    env.reset()
    with pytest.raises(ValueError, match="nan"):
        env.rollout([0, 1, 0])
    with pytest.raises(SandboxTimeout):
        env.rollout([0, 5])


def test_a_snapshot_of_another_environment_is_refused(sandboxed: Make) -> None:
    one, other = sandboxed("CartPole-v1"), sandboxed("Acrobot-v1")
    for env in (one, other):
        env.reset(seed=0)
    snapshot = one.snapshot()
    with pytest.raises(ValueError, match=r"of another environment.*CartPole"):
        other.restore(snapshot)
    other.step(0)
    one.restore(snapshot)
    snapshot.delete()
