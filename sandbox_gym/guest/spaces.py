"""Spaces as plain data: `describe` runs in the guest, `build` on the host, on what a hostile guest may have written,
so all sizes are bounded before anything is allocated. `Codec` (in `codec`) is what their values travel by.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from .codec import Codec, number_dtype
from .wire import WireError

__all__ = ["MAX_SPACE_BYTES", "Codec", "build", "describe"]

MAX_SPACE_BYTES = 64 << 20  # of all bounds of all boxes of one description
_MAX_SPACES = 10_000
_MAX_DEPTH = 32
_MAX_TEXT = 1 << 24
_OPEN_TEXT = (
    1024  # the length allowed where a text's space is a class of the environment's own, as in MiniGrid
)
_PRINTABLE = "".join(map(chr, range(32, 127)))


def describe(space: Space[Any]) -> dict[str, Any]:
    """A space as data for `wire.encode`. Raises TypeError for a class that is none of Gymnasium's."""
    for kind, (cls, to_data, _) in _KINDS.items():
        if isinstance(space, cls):
            return {"kind": kind, **to_data(space)}
    if space.dtype is not None and np.dtype(space.dtype).kind == "U":
        return {"kind": "text", "most": _OPEN_TEXT, "least": 0, "charset": _PRINTABLE}
    raise TypeError(f"{type(space).__name__} is none of Gymnasium's spaces, so its values have no known form")


def build(description: Any) -> Space[Any]:
    """The space that `describe` was given, equal to it. Raises WireError for what `describe` can't have written."""
    try:
        return _Builder().build(description, 0)
    except WireError:
        raise
    except (
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        AttributeError,
        AssertionError,
        OverflowError,
        SyntaxError,  # of numpy, for a dtype with a comma in it
    ) as error:
        raise WireError(f"no description of a space: {type(error).__name__}: {error}") from None


class _Builder:
    def __init__(self) -> None:
        self._spaces = 0
        self._bytes = 0

    def build(self, description: Any, depth: int) -> Space[Any]:
        self._spaces += 1
        if self._spaces > _MAX_SPACES or depth > _MAX_DEPTH:
            raise WireError(f"a space of more than {_MAX_SPACES} parts or {_MAX_DEPTH} levels")
        _, _, from_data = _KINDS[description["kind"]]
        space: Space[Any] = from_data(description, lambda part: self.build(part, depth + 1), self._spend)
        return space

    def _spend(self, nbytes: int) -> None:
        self._bytes += nbytes
        if self._bytes > MAX_SPACE_BYTES:
            raise WireError(f"a space whose bounds take more than {MAX_SPACE_BYTES} bytes")


_Build = Callable[[Any], Space[Any]]
_Spend = Callable[[int], None]


def _thin(array: Any) -> Any:
    """One element where all are equal: an image's bounds are then two numbers."""
    array = np.asarray(array)
    one = array.reshape(-1)[:1]  # an array still: a scalar would lose its byte order
    return one.reshape(()) if array.size and (array == one).all() else array


def _thick(value: Any, shape: tuple[int, ...], dtype: Any, spend: _Spend) -> Any:
    spend(math.prod(shape) * dtype.itemsize)
    value = np.asarray(value)
    if value.dtype != dtype or value.shape not in ((), shape):
        raise WireError("bounds that do not fit their space")
    return np.full(shape, value, dtype)


def _shape(packed: Any) -> tuple[int, ...]:
    shape = tuple(operator.index(n) for n in packed)
    if len(shape) > 32 or any(n < 0 for n in shape):
        raise WireError("an impossible shape")
    return shape


def _dtype(packed: Any, kinds: str) -> Any:
    dtype = np.dtype(str(packed))
    if dtype.kind not in kinds:
        raise WireError(f"a space of dtype {dtype}")
    return dtype


def _box_data(space: spaces.Box) -> dict[str, Any]:
    return {
        "dtype": space.dtype.str,
        "shape": list(space.shape),
        "low": _thin(space.low),
        "high": _thin(space.high),
        "below": _thin(space.bounded_below),
        "above": _thin(space.bounded_above),
    }


def _box(data: Any, build: _Build, spend: _Spend) -> Space[Any]:
    dtype, shape, flags = _dtype(data["dtype"], "biuf"), _shape(data["shape"]), np.dtype(bool)
    low, high = (_thick(data[key], shape, dtype, spend) for key in ("low", "high"))
    below, above = (_thick(data[key], shape, flags, spend) for key in ("below", "above"))
    box: spaces.Box[Any] = spaces.Box(low, high, shape, dtype)
    if dtype.kind != "f":  # an integer box forgets which of its bounds were infinite
        box.bounded_below, box.bounded_above = below, above
    return box


def _discrete_data(space: spaces.Discrete) -> dict[str, Any]:
    return {"n": int(space.n), "start": int(space.start), "dtype": number_dtype(space).str}


def _discrete(data: Any, build: _Build, spend: _Spend) -> Space[Any]:
    n, start, dtype = operator.index(data["n"]), operator.index(data["start"]), _dtype(data["dtype"], "iu")
    bounds = np.iinfo(dtype)
    if not (bounds.min <= start and 0 < n <= bounds.max and start + n - 1 <= bounds.max):
        raise WireError(f"a Discrete space of {n} from {start}")
    space: Space[Any] = spaces.Discrete(n, start=start, dtype=dtype.type)
    return space


def _binary(data: Any, build: _Build, spend: _Spend) -> Space[Any]:
    n = data["n"]
    sizes = (operator.index(n),) if isinstance(n, int) else _shape(n)
    if any(size < 1 for size in sizes):
        raise WireError("an empty MultiBinary space")
    spend(math.prod(sizes))
    return spaces.MultiBinary(sizes[0] if isinstance(n, int) else sizes)


def _multi_data(space: spaces.MultiDiscrete) -> dict[str, Any]:
    shape = list(space.nvec.shape)
    return {"dtype": space.dtype.str, "shape": shape, "nvec": _thin(space.nvec), "start": _thin(space.start)}


def _multi(data: Any, build: _Build, spend: _Spend) -> Space[Any]:
    dtype, shape = _dtype(data["dtype"], "iu"), _shape(data["shape"])
    nvec, start = (_thick(data[key], shape, dtype, spend) for key in ("nvec", "start"))
    space: Space[Any] = spaces.MultiDiscrete(nvec, dtype=dtype.type, start=start)
    return space


def _text_data(space: spaces.Text) -> dict[str, Any]:
    characters = list(space.character_list)
    odd = any(len(character) != 1 for character in characters)
    charset = characters if odd else "".join(characters)
    return {"most": space.max_length, "least": space.min_length, "charset": charset}


def _text(data: Any, build: _Build, spend: _Spend) -> Space[Any]:
    most, least, charset = operator.index(data["most"]), operator.index(data["least"]), data["charset"]
    if not 0 <= least <= most <= _MAX_TEXT:
        raise WireError(f"a text space of {least} to {most} characters")
    if not isinstance(charset, str):
        charset = frozenset(map(str, charset))
    return spaces.Text(most, min_length=least, charset=charset)


def _tuple(data: Any, build: _Build, spend: _Spend) -> Space[Any]:
    return spaces.Tuple([build(part) for part in data["spaces"]])


def _dict(data: Any, build: _Build, spend: _Spend) -> Space[Any]:
    return spaces.Dict([(key, build(part)) for key, part in data["spaces"]])  # pairs: a dict would be sorted


def _sequence(data: Any, build: _Build, spend: _Spend) -> Space[Any]:
    return spaces.Sequence(build(data["space"]), stack=bool(data["stack"]))


def _graph(data: Any, build: _Build, spend: _Spend) -> Space[Any]:
    edge = data["edge"]
    return spaces.Graph(build(data["node"]), None if edge is None else build(edge))


def _one_of(data: Any, build: _Build, spend: _Spend) -> Space[Any]:
    return spaces.OneOf([build(part) for part in data["spaces"]])


def _parts(space: Any) -> dict[str, Any]:
    return {"spaces": [describe(part) for part in space.spaces]}


_KINDS: dict[str, tuple[type[Any], Callable[[Any], dict[str, Any]], Callable[[Any, _Build, _Spend], Any]]] = {
    "box": (spaces.Box, _box_data, _box),
    "discrete": (spaces.Discrete, _discrete_data, _discrete),
    "binary": (spaces.MultiBinary, lambda s: {"n": s.n if isinstance(s.n, int) else list(s.n)}, _binary),
    "multi": (spaces.MultiDiscrete, _multi_data, _multi),
    "text": (spaces.Text, _text_data, _text),
    "tuple": (spaces.Tuple, _parts, _tuple),
    "dict": (spaces.Dict, lambda s: {"spaces": [[k, describe(v)] for k, v in s.spaces.items()]}, _dict),
    "sequence": (
        spaces.Sequence,
        lambda s: {"space": describe(s.feature_space), "stack": s.stack},
        _sequence,
    ),
    "graph": (
        spaces.Graph,
        lambda s: {"node": describe(s.node_space), "edge": s.edge_space and describe(s.edge_space)},
        _graph,
    ),
    "oneof": (spaces.OneOf, _parts, _one_of),
}
