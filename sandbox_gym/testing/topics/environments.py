"""Gymnasium's environments in sandboxes of this backend."""

from __future__ import annotations

from typing import Any

import gymnasium
from gymnasium.vector import AutoresetMode

from sandbox_gym import _spares
from sandbox_gym.env import SandboxEnv, make_env
from sandbox_gym.testing.subject import Subject, check, expect
from sandbox_gym.testing.vector import assert_same, check_vector_env
from sandbox_gym.vector import SandboxVectorEnv

_GAME = "CartPole-v1"
_ACTIONS = [0, 1, 1, 0, 1, 0, 0, 1]


def _game(subject: Subject) -> SandboxEnv:
    env = SandboxEnv(_GAME, backend=subject.backend, image=subject.image)
    subject.later(env.close)
    return env


def _play(env: Any, actions: list[int]) -> list[Any]:
    return [env.step(action) for action in actions]


@check("env")
def equals_the_bare_one(subject: Subject) -> None:
    """A hosted environment gives what the bare one gives, from the same seed, episode after episode."""
    env, bare = _game(subject), gymnasium.make(_GAME)
    subject.later(bare.close)
    for seed in (3, None):
        assert_same(env.reset(seed=seed), bare.reset(seed=seed), f"reset(seed={seed})")
        assert_same(_play(env, _ACTIONS), _play(bare, _ACTIONS), "steps")


@check("env")
def branches_replay(subject: Subject) -> None:
    """Branches, and a restored snapshot, go on as their origin does, without touching each other."""
    env = _game(subject)
    env.reset(seed=5)
    _play(env, [0, 1])
    moment = env.snapshot()
    subject.later(moment.delete)
    (branch,) = env.branch(1)
    subject.later(branch.close)
    _play(branch, [1, 1, 1])
    origin = _play(env, _ACTIONS)
    branch.restore(moment)
    assert_same(_play(branch, _ACTIONS), origin, "the branch's steps")
    env.restore(moment)
    assert_same(_play(env, _ACTIONS), origin, "the steps after restore")


@check("env")
def reset_is_pristine(subject: Subject) -> None:
    """An episode finds nothing of the one before: memory, disk, processes."""
    env: Any = make_env(backend=subject.backend, image=subject.image, language="shell")
    subject.later(env.close)
    env.reset(seed=0)
    observation, *_ = env.step("echo left > left; sleep 98773 & cat left")
    expect(observation, "left", "what the action said")
    env.reset(seed=0)
    observation, *_ = env.step("cat left 2>/dev/null || echo none")
    expect(observation, "none", "what the next episode finds")


@check("env")
def vector_equals_sync(subject: Subject) -> None:
    """A vector of sandboxes gives what Gymnasium's SyncVectorEnv gives, resets and masks included."""
    subject.later(_spares.forget)  # else a warm guest is kept for the next of its kind
    check_vector_env(
        lambda mode: SandboxVectorEnv(
            2, _GAME, autoreset_mode=mode, spares=0, backend=subject.backend, image=subject.image
        ),
        lambda: gymnasium.make(_GAME),
        steps=12,
        modes=[AutoresetMode.NEXT_STEP],
    )
