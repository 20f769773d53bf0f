"""Any environment with observations that a plain network takes: one float32 array of fixed size, made in the guest.

    entry_point="sandbox_gym_guest.encoded:make", env_kwargs={"env_id": "MiniGrid-DoorKey-6x6-v0", "encode": "flat"}

"flat" is one row of numbers: a Box as it is, integers of Discrete and MultiDiscrete one-hot, MultiBinary as 0 and 1,
Dict and Tuple one part after the other. Text is hashed: each word and each pair of neighbours adds 1 or -1 to one of
64 numbers (Weinberger et al. 2009, "Feature hashing"), and the whole has length 1.

"image" is [64, 64, channels] in 0 to 1, each pixel the mean of the area it covers: of an observation that is an image,
or of the one image in a Dict.

"auto" leaves rows of floats alone, takes "image" for images of 32 pixels or more, and "flat" for all the rest.
"""

from __future__ import annotations

import itertools
import re
import zlib
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium import Space, spaces
from gymnasium.envs.registration import EnvSpec

from .hosted import import_home

IMAGE_SIZE = 64  # pixels; RLlib's default CNN also knows 42, 84 and 96
TEXT_SIZE = 64  # numbers
_MAX_FLAT = 1 << 17
_SMALL = 32  # pixels: anything below is a grid of cells, not a picture
_WORD = re.compile(r"\w+|[^\w\s]")

Array = Any  # a NumPy array
Write = Callable[[Any, Array], None]
"""Writes an observation into a row of zeros, [size]."""


def make(
    env_id: str | None = None, *, entry_point: str | None = None, encode: str = "auto", **kwargs: Any
) -> gymnasium.Env[Any, Any]:
    """The environment, its observations encoded. `kwargs` go to `gymnasium.make`.

    Raises ValueError for an observation space that `encode` can't do.
    """
    if (env_id is None) == (entry_point is None):
        raise ValueError("give an env_id, or an entry_point='module:Class'")
    if env_id is not None:
        import_home(env_id)
    what: Any = env_id or EnvSpec("sandbox_gym/Encoded-v0", entry_point=entry_point)
    env: gymnasium.Env[Any, Any] = gymnasium.make(what, disable_env_checker=True, **kwargs)
    if encode == "auto":
        encode = _choice(env.observation_space)
    if encode == "none":
        return env
    if encode not in _ENCODINGS:
        raise ValueError(f"encode is one of {sorted(_ENCODINGS)} or 'auto', not {encode!r}")
    return _ENCODINGS[encode](env)


def _choice(space: Space[Any]) -> str:
    if not isinstance(space, spaces.Box):
        return "flat"
    if space.dtype.kind == "f" and len(space.shape) == 1:
        return "none"
    image = space.dtype == np.uint8 and len(space.shape) in (2, 3) and sorted(space.shape)[-2] >= _SMALL
    return "image" if image else "flat"


class Flat(gymnasium.ObservationWrapper[Any, Any, Any]):
    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self._size, self._write = _flat(env.observation_space)
        if self._size > _MAX_FLAT:
            raise ValueError(f"a flat observation of {self._size} numbers: more than {_MAX_FLAT} is too many")
        self.observation_space = spaces.Box(-np.inf, np.inf, (self._size,), np.float32)

    def observation(self, observation: Any) -> Array:
        row = np.zeros(self._size, np.float32)
        self._write(observation, row)
        return row


def _flat(space: Space[Any]) -> tuple[int, Write]:
    """How many numbers a value of this space becomes, and how."""
    if isinstance(space, (spaces.Box, spaces.MultiBinary)):
        return int(np.prod(space.shape)), _copy
    if isinstance(space, spaces.Discrete):
        return int(space.n), _one_hots(np.array([space.n]), np.array([space.start]))
    if isinstance(space, spaces.MultiDiscrete):
        return int(space.nvec.sum()), _one_hots(space.nvec.reshape(-1), space.start.reshape(-1))
    if isinstance(space, spaces.Dict):
        return _joined(list(space.spaces), list(space.spaces.values()))
    if isinstance(space, spaces.Tuple):
        return _joined(list(range(len(space.spaces))), list(space.spaces))
    # MiniGrid's missions have a space class of their own.
    if isinstance(space, spaces.Text) or (space.dtype is not None and np.dtype(space.dtype).kind == "U"):
        return TEXT_SIZE, write_text
    raise ValueError(f"no encoding of {type(space).__name__} has a fixed size: wrap the environment yourself")


def _copy(value: Any, row: Array) -> None:
    row[:] = np.asarray(value).reshape(-1)


def _one_hots(sizes: Array, starts: Array) -> Write:
    offsets = np.concatenate([[0], np.cumsum(sizes)[:-1]]) - starts

    def write(value: Any, row: Array) -> None:
        row[offsets + np.asarray(value).reshape(-1)] = 1

    return write


def _joined(keys: list[Any], parts: list[Space[Any]]) -> tuple[int, Write]:
    pieces: list[tuple[Any, slice, Write]] = []
    end = 0
    for key, part in zip(keys, parts):
        size, write = _flat(part)
        pieces.append((key, slice(end, end + size), write))
        end += size

    def write_all(value: Any, row: Array) -> None:
        for key, place, write in pieces:
            write(value[key], row[place])

    return end, write_all


def write_text(text: str, row: Array) -> None:
    """Adds the text's words and pairs of words to a row of zeros, as a vector of length 1."""
    words = _WORD.findall(text.lower())
    for token in (*words, *map(" ".join, itertools.pairwise(words))):
        number = zlib.crc32(token.encode())  # `hash` differs from process to process
        row[number % len(row)] += 1 if number >> 31 else -1
    row /= max(1.0, float(np.linalg.norm(row)))


class Image(gymnasium.ObservationWrapper[Any, Any, Any]):
    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self._key, box = _find_image(env.observation_space)
        self._channels_first = len(box.shape) == 3 and box.shape[0] <= 4 < box.shape[2]
        height, width = box.shape[1:] if self._channels_first else box.shape[:2]
        flat = len(box.shape) == 2
        channels = 1 if flat else box.shape[0] if self._channels_first else box.shape[2]
        self._low, self._range = float(box.low.min()), float(box.high.max()) - float(box.low.min())
        self._rows, self._columns = _areas(height), _areas(width)
        self.observation_space = spaces.Box(0.0, 1.0, (IMAGE_SIZE, IMAGE_SIZE, channels), np.float32)

    def observation(self, observation: Any) -> Array:
        image = np.asarray(observation if self._key is None else observation[self._key], np.float32)
        if self._channels_first:
            image = image.transpose(1, 2, 0)
        image = (image.reshape(*image.shape[:2], -1) - self._low) / self._range
        high = self._rows @ image.reshape(image.shape[0], -1)  # [64, width * channels]
        wide = high.reshape(IMAGE_SIZE, image.shape[1], -1).transpose(0, 2, 1) @ self._columns.T
        return np.clip(
            wide.transpose(0, 2, 1), 0.0, 1.0
        )  # [64, 64, channels]; sums of weights exceed 1 by rounding


def _find_image(space: Space[Any]) -> tuple[Any, spaces.Box]:
    """The key of the image in a Dict, or None where all is one; and its space."""
    found = [
        (key, part)
        for key, part in (space.spaces.items() if isinstance(space, spaces.Dict) else [(None, space)])
        if isinstance(part, spaces.Box) and len(part.shape) in (2, 3) and part.is_bounded()
    ]
    if len(found) != 1:
        raise ValueError(f"encode='image' takes an image, or a Dict with one in it, not {space}")
    return found[0]


def _areas(size: int) -> Array:
    """Weights [64, size] that make each new pixel the mean of the old ones under it."""
    edges = np.linspace(0, size, IMAGE_SIZE + 1)
    old = np.arange(size)
    overlap = np.minimum(edges[1:, None], old + 1) - np.maximum(edges[:-1, None], old)
    return (np.maximum(overlap, 0) * (IMAGE_SIZE / size)).astype(np.float32)


_ENCODINGS: dict[str, Callable[[gymnasium.Env[Any, Any]], gymnasium.Env[Any, Any]]] = {
    "flat": Flat,
    "image": Image,
}
