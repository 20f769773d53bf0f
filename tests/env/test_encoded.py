"""Observations as arrays of one size: what each encoding holds, and that a sandbox gives what the environment does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from sandbox_gym.guest.encoded import IMAGE_SIZE, TEXT_SIZE, make, write_text

Sandboxed = Callable[..., Any]


class Once(gymnasium.Env[Any, Any]):
    """Shows one value of any space."""

    action_space = spaces.Discrete(2)

    def __init__(self, space: gymnasium.Space[Any], value: Any) -> None:
        self.observation_space = space
        self._value = value

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return self._value, {}


ONCE = f"{__name__}:Once"


def encoded(space: gymnasium.Space[Any], value: Any, encode: str = "auto") -> Any:
    env = make(entry_point=ONCE, encode=encode, space=space, value=value)
    observation, _ = env.reset()
    assert observation in env.observation_space
    return observation


def words(text: str) -> Any:
    row = np.zeros(TEXT_SIZE, np.float32)
    write_text(text, row)
    return row


def test_numbers_one_after_the_other() -> None:
    space = spaces.Dict(
        {
            "box": spaces.Box(-1, 1, (2, 2), np.float64),
            "all": spaces.Tuple((spaces.Discrete(3, start=-1), spaces.MultiBinary((1, 2)))),
            "kinds": spaces.MultiDiscrete([2, 3], start=[0, 5]),
        }
    )
    value = {
        "box": np.array([[0.5, -1], [0, 1]]),
        "all": (1, np.array([[1, 0]], np.int8)),
        "kinds": np.array([1, 6]),
    }
    row = encoded(space, value)
    parts: dict[str, list[float]] = {"box": [0.5, -1, 0, 1], "all": [0, 0, 1, 1, 0], "kinds": [0, 1, 0, 1, 0]}
    expected = [number for key in space.spaces for number in parts[key]]
    assert row.tolist() == expected


def test_text() -> None:
    row = encoded(spaces.Text(100), "Open the red door.")
    assert np.linalg.norm(row) == pytest.approx(1)
    assert np.array_equal(row, words("open THE red door.")), "case is no matter"
    assert not np.array_equal(row, words("the red door. open")), "order is"
    assert not np.array_equal(row, words("open the blue door."))
    assert not words("").any()
    assert np.flatnonzero(words("door")).tolist() == [45], "the same in every process, for ever"


def test_rows_of_floats_stay() -> None:
    env = make("CartPole-v1")
    assert env.observation_space == gymnasium.make("CartPole-v1").observation_space
    assert not any(type(layer).__name__ in ("Flat", "Image") for layer in _layers(env))


def _layers(env: Any) -> Any:
    while isinstance(env, gymnasium.Wrapper):
        yield env
        env = env.env


@pytest.mark.parametrize("shape", [(210, 160, 3), (3, 90, 120), (50, 40), (64, 64, 1)])
def test_an_image_is_a_mean_of_areas(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, shape, np.uint8)
    seen = encoded(spaces.Box(0, 255, shape, np.uint8), image)
    channels = 1 if len(shape) == 2 else min(shape)
    assert seen.shape == (IMAGE_SIZE, IMAGE_SIZE, channels)
    last = image.transpose(1, 2, 0) if shape[0] == 3 else image.reshape(*shape[:2], -1)
    assert np.allclose(seen.mean((0, 1)), last.mean((0, 1)) / 255, atol=1e-4)
    if shape == (64, 64, 1):
        assert np.allclose(seen, image / 255, atol=1e-6)
    half = np.zeros(shape, np.uint8)
    half[(slice(None), slice(None, 45)) if shape[0] == 3 else slice(None, shape[0] // 2)] = 255
    seen = encoded(spaces.Box(0, 255, shape, np.uint8), half)
    assert np.allclose(seen[: IMAGE_SIZE // 2], 1)
    assert np.allclose(seen[IMAGE_SIZE // 2 :], 0)


def test_the_image_of_a_dict() -> None:
    space = spaces.Dict({"cells": spaces.Box(0, 10, (7, 7, 3), np.uint8), "mission": spaces.Text(9)})
    seen = encoded(space, {"cells": np.full((7, 7, 3), 5, np.uint8), "mission": "go"}, "image")
    assert np.allclose(seen, 0.5)


def test_what_has_no_encoding() -> None:
    with pytest.raises(ValueError, match="no encoding of Sequence has a fixed size"):
        encoded(spaces.Sequence(spaces.Discrete(2)), (0,))
    with pytest.raises(ValueError, match="an image, or a Dict with one in it"):
        encoded(spaces.Discrete(2), 0, "image")
    with pytest.raises(ValueError, match="131073 numbers"):
        encoded(spaces.Discrete(2**17 + 1), 0)
    with pytest.raises(ValueError, match="encode is one of"):
        make("CartPole-v1", encode="nonsense")
    with pytest.raises(ValueError, match="env_id, or an entry_point"):
        make()


@pytest.mark.parametrize("entry_point", ["sandbox_gym_guest.encoded:make", "sandbox_gym.envs.encoded:make"])
@pytest.mark.parametrize("name", ["MiniGrid-Empty-5x5-v0", "ALE/Breakout-v5", "FrozenLake-v1"])
def test_in_a_sandbox_as_outside(sandboxed: Sandboxed, name: str, entry_point: str) -> None:
    ours = sandboxed(entry_point=entry_point, env_kwargs={"env_id": name})
    theirs = make(name)
    assert ours.observation_space == theirs.observation_space
    assert np.array_equal(ours.reset(seed=3)[0], theirs.reset(seed=3)[0])
    for action in (0, 1, 2, 1):
        assert np.array_equal(ours.step(action)[0], theirs.step(action)[0])
    theirs.close()
