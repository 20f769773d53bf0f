"""Checks for vector environments, which Gymnasium does not ship: equal to SyncVectorEnv, step for step."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

_Step = tuple[Any, Any, Any, Any, dict[str, Any]]


def check_vector_env(
    make: Callable[[AutoresetMode], VectorEnv[Any, Any, Any]],
    make_single: Callable[[], gymnasium.Env[Any, Any]],
    *,
    steps: int = 200,
    seed: int = 0,
    modes: Iterable[AutoresetMode] = tuple(AutoresetMode),
    policy: Callable[[Any], Any] | None = None,
    same_spaces: bool = True,
) -> int:
    """Drives `make(mode)` and a SyncVectorEnv of `make_single` side by side, in every autoreset mode: observations,
    rewards, flags and infos must be the same, to the dtype, masks and `final_obs` included; the spaces too, unless
    `same_spaces` is False.

    Actions are sampled from the action space, or come from `policy(observations)`. Resets by an int, a list, a mask,
    and without a seed are among the steps. Returns how many episodes ended; raises AssertionError, with the first
    difference.
    """
    ended = 0
    for mode in modes:
        env = make(mode)
        try:
            reference = SyncVectorEnv([make_single] * env.num_envs, autoreset_mode=mode)
            try:
                if same_spaces:
                    _compare_spaces(env, reference)
                ended += _compare(env, reference, mode, steps, seed, policy)
            finally:
                reference.close()
        finally:
            env.close()
            env.close()  # twice does no harm
    return ended


def _compare_spaces(env: VectorEnv[Any, Any, Any], reference: SyncVectorEnv) -> None:
    for name in ("single_observation_space", "single_action_space", "observation_space", "action_space"):
        ours, theirs = getattr(env, name), getattr(reference, name)
        assert ours == theirs, f"{name} is {ours}, not {theirs}"


def _compare(
    env: VectorEnv[Any, Any, Any],
    reference: SyncVectorEnv,
    mode: AutoresetMode,
    steps: int,
    seed: int,
    policy: Callable[[Any], Any] | None,
) -> int:
    where = f"{mode.name}: "
    assert env.metadata.get("autoreset_mode") is mode, f"{where}metadata['autoreset_mode'] is {env.metadata}"
    reference.action_space.seed(seed)
    n = env.num_envs
    ended = 0
    observations = _both_reset(env, reference, f"{where}reset(seed={seed})", seed=seed)
    for step in range(steps):
        place = f"{where}step {step}"
        if step == steps // 2:
            seeds = [None if lane % 2 else seed + 10 * lane for lane in range(n)]
            observations = _both_reset(env, reference, f"{place}, reset(seed={seeds})", seed=seeds)
        if step == steps * 3 // 4:
            mask = np.arange(n) % 2 == 0
            observations = _both_reset(env, reference, f"{place}, masked reset", options={"reset_mask": mask})
        actions = reference.action_space.sample() if policy is None else policy(observations)
        kept = copy.deepcopy(observations)
        theirs, ours = reference.step(copy.deepcopy(actions)), env.step(actions)
        assert_same(observations, kept, f"{place}: observations that were handed out before")
        _assert_same_step(ours, theirs, place)
        observations = ours[0]
        over = theirs[2] | theirs[3]
        ended += int(over.sum())
        if mode is AutoresetMode.DISABLED and over.any():
            observations = _both_reset(
                env, reference, f"{place}, reset of what ended", options={"reset_mask": over}
            )
    _both_reset(env, reference, f"{where}reset()", options={})
    return ended


def _both_reset(env: Any, reference: Any, place: str, **how: Any) -> Any:
    options = how.get("options")
    theirs = reference.reset(**{**how, "options": None if options is None else dict(options)})
    kept = None if options is None else dict(options)
    ours = env.reset(**how)
    assert options is None or options.keys() == (kept or {}).keys(), (
        f"{place}: the caller's options were changed"
    )
    assert_same(ours[0], theirs[0], f"{place}: observations")
    assert_same(ours[1], theirs[1], f"{place}: infos")
    return ours[0]


def _assert_same_step(ours: _Step, theirs: _Step, place: str) -> None:
    names = ("observations", "rewards", "terminations", "truncations", "infos")
    for name, our, their in zip(names, ours, theirs):
        assert_same(our, their, f"{place}: {name}")


def assert_same(ours: Any, theirs: Any, place: str) -> None:
    """The same values, down to dtypes, shapes and the types of containers. Raises AssertionError, which says where."""
    if isinstance(theirs, np.ndarray) and theirs.dtype != object:
        assert isinstance(ours, np.ndarray), f"{place}: a {type(ours).__name__}, not an array"
        assert ours.dtype == theirs.dtype, f"{place}: dtype {ours.dtype}, not {theirs.dtype}"
        assert ours.shape == theirs.shape, f"{place}: shape {ours.shape}, not {theirs.shape}"
        assert np.array_equal(ours, theirs, equal_nan=theirs.dtype.kind in "fc"), (
            f"{place}: {ours}, not {theirs}"
        )
    elif isinstance(theirs, dict):
        assert isinstance(ours, dict), f"{place}: a {type(ours).__name__}, not a dict"
        assert ours.keys() == theirs.keys(), f"{place}: keys {sorted(ours)}, not {sorted(theirs)}"
        for key in theirs:
            assert_same(ours[key], theirs[key], f"{place}[{key!r}]")
    elif isinstance(theirs, (list, tuple, np.ndarray)):
        assert type(ours) is type(theirs), f"{place}: a {type(ours).__name__}, not a {type(theirs).__name__}"
        assert len(ours) == len(theirs), f"{place}: of length {len(ours)}, not {len(theirs)}"
        for index, (our, their) in enumerate(zip(ours, theirs)):
            assert_same(our, their, f"{place}[{index}]")
    else:
        same = ours == theirs or (isinstance(theirs, float) and math.isnan(theirs) and math.isnan(ours))
        assert same, f"{place}: {ours!r}, not {theirs!r}"
