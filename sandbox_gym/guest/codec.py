"""Values of spaces as raw bytes, and the layout of what crosses the wire at each step; the same code on both sides."""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from gymnasium import Space, spaces

from . import wire
from .wire import WireError

LARGE = 1 << 14  # bytes from which an array is sent from where it lies
_INT64 = struct.Struct("<q")

Packed = bytes | memoryview


class Leaf(NamedTuple):
    """How values of one size become bytes. `unpack` takes just `nbytes` of them."""

    nbytes: int
    pack: Callable[[Any], Packed]
    unpack: Callable[[Packed], Any]
    # `pack` of a value that `unpack` gives back as it was, to the dtype; None of any other.
    exact: Callable[[Any], Packed | None]


class Codec:
    """A space's values as bytes. `nbytes`: their number; None where values differ in size (Text, Sequence, Graph,
    OneOf, and what holds one), which travel by `wire.encode`.

    An action is `encode`d and `decode`d: raw bytes with empty meta where it is exactly of the space's form, else (a
    list for an array, another dtype, a value outside the space) as `wire.encode([action])`, so that the environment
    gets just what its user gave. An observation with its info is a `reply` that is `read`:

        fixed size    meta = encode(info), empty when info is;  data = the observation's nbytes, then info's buffers
        otherwise     meta, data = encode([observation, info])
    """

    def __init__(self, space: Space[Any]) -> None:
        self.space = space
        self.leaf = leaf = _leaf(space)
        self._graphs = _holds_graph(space)
        self.nbytes: int | None = leaf.nbytes if leaf else None
        # dtype and shape, where a value is one array or number
        self.array: tuple[Any, tuple[int, ...]] | None = None
        if leaf:
            self._pack, self._unpack, self._exact = leaf.pack, leaf.unpack, leaf.exact
            if not isinstance(space, (spaces.Tuple, spaces.Dict)):
                self.array = number_dtype(space), space.shape or ()

    def pack(self, value: Any) -> Packed:
        """The value as bytes, cast to the space's dtype. Raises ValueError or TypeError when it does not fit."""
        return self._pack(value)

    def unpack(self, data: Packed) -> Any:
        """A fresh value. Raises WireError when `data` has not this space's size."""
        if len(data) != self.nbytes:
            raise WireError(f"{len(data)} bytes for a value of {self.nbytes}")
        return self._unpack(data)

    def encode(self, value: Any) -> tuple[Any, ...]:
        """A request's `(meta, *data)`."""
        if self.nbytes is not None and (data := self._exact(value)) is not None:
            return b"", data
        meta, buffers = wire.encode([value])
        return meta, *buffers

    def decode(self, meta: bytes, data: memoryview) -> Any:
        """The value of `encode`."""
        if not meta and self.nbytes is not None:
            return self.unpack(data)
        (value,) = wire.decode(meta, data)
        return self.refine(value)

    def reply(self, observation: Any, info: Any) -> tuple[Any, ...]:
        """A reply's `(meta, *data)`."""
        if self.nbytes is None:
            meta, buffers = wire.encode([observation, info])
            return meta, *buffers
        if not info:
            return b"", self._pack(observation)
        meta, buffers = wire.encode(info)
        return meta, self._pack(observation), *buffers

    def read(self, meta: bytes, data: memoryview) -> tuple[Any, dict[Any, Any]]:
        """The observation and info of `reply`; `data` begins with the observation. Raises WireError."""
        if self.nbytes is None:
            value = wire.decode(meta, data)
            if not isinstance(value, list) or len(value) != 2:
                raise WireError("a reply that is no observation and info")
            observation, info = self.refine(value[0]), value[1]
        elif meta:
            observation, info = self.unpack(data[: self.nbytes]), wire.decode(meta, data[self.nbytes :])
        else:
            return self.unpack(data), {}
        if not isinstance(info, dict):
            raise WireError(f"an info that is no dict but {type(info).__name__}")
        return observation, info

    def dump(self, value: Any) -> Any:
        """The value inside a larger one: bytes where the size is fixed."""
        return value if self.nbytes is None else self._pack(value)

    def load(self, dumped: Any) -> Any:
        """The value of `dump`. Raises WireError."""
        if self.nbytes is None:
            return self.refine(dumped)
        if not isinstance(dumped, bytes):
            raise WireError(f"bytes of a value are {type(dumped).__name__}")
        return self.unpack(memoryview(dumped))

    def refine(self, value: Any) -> Any:
        """What the wire makes of a GraphInstance is a tuple: makes it one again."""
        try:
            return _refine(self.space, value) if self._graphs else value
        except (TypeError, ValueError, KeyError, IndexError) as error:
            raise WireError(f"a value that is not of its space: {error}") from None


def number_dtype(space: Any) -> Any:
    """The dtype of a space of numbers."""
    return np.dtype(np.int64 if space.dtype is None else space.dtype)


def _leaf(space: Space[Any]) -> Leaf | None:
    if isinstance(space, spaces.Discrete):
        return _discrete_leaf(number_dtype(space))
    if isinstance(space, (spaces.Box, spaces.MultiBinary, spaces.MultiDiscrete)):
        assert space.dtype is not None and space.shape is not None
        return _array_leaf(np.dtype(space.dtype), space.shape)
    if isinstance(space, spaces.Tuple):
        return _composite_leaf(list(range(len(space.spaces))), list(space.spaces), tuple)
    if isinstance(space, spaces.Dict):
        return _composite_leaf(list(space.spaces), list(space.spaces.values()), dict)
    return None


def _array_leaf(dtype: Any, shape: tuple[int, ...]) -> Leaf:
    ndarray = np.ndarray
    nbytes = math.prod(shape) * dtype.itemsize
    large = nbytes >= LARGE

    def exact(value: Any) -> Packed | None:
        if type(value) is not ndarray or value.dtype != dtype or value.shape != shape:
            return None
        if large and value.flags.c_contiguous:
            return memoryview(value.reshape(-1).view(np.uint8))  # type: ignore[arg-type]  # an array is a buffer
        return value.tobytes()

    def pack(value: Any) -> Packed:
        data = exact(value)
        return _cast(value, dtype, shape).tobytes() if data is None else data

    def unpack(data: Packed) -> Any:
        return ndarray(shape, dtype, bytearray(data))

    def unpack_bools(data: Packed) -> Any:
        return np.asarray(ndarray(shape, np.uint8, bytearray(data)) != 0)  # any other byte would be neither

    return Leaf(nbytes, pack, unpack_bools if dtype == np.bool_ else unpack, exact)


def _cast(value: Any, dtype: Any, shape: tuple[int, ...]) -> Any:
    array = np.asarray(value)
    if array.shape != shape or array.dtype.kind not in "biuf":
        raise ValueError(
            f"{array.dtype} of shape {array.shape}, where the space has {dtype} of shape {shape}"
        )
    with np.errstate(all="ignore"):
        cast = array.astype(dtype)
    if dtype.kind != "f" and not (cast == array).all():
        raise ValueError(f"numbers of dtype {array.dtype} that {dtype}, the space's dtype, can't hold")
    return cast


def _discrete_leaf(dtype: Any) -> Leaf:
    number = dtype.type
    native = dtype == np.int64 and dtype.isnative
    bounds = np.iinfo(dtype)

    def exact(value: Any) -> bytes | None:
        kind = type(value)
        if kind is number or (kind is int and bounds.min <= value <= bounds.max):
            return pack(value)
        return None

    def pack(value: Any) -> bytes:
        try:
            return _INT64.pack(value) if native else np.array(operator.index(value), dtype).tobytes()
        except (struct.error, OverflowError, TypeError):
            raise ValueError(f"{value!r} where the space has a {dtype}") from None

    def unpack(data: Packed) -> Any:
        return np.frombuffer(data, dtype)[0]

    def unpack_native(data: Packed) -> Any:
        return number(_INT64.unpack(data)[0])

    return Leaf(dtype.itemsize, pack, unpack_native if native else unpack, exact)


def _composite_leaf(keys: list[Any], parts: list[Space[Any]], kind: type[Any]) -> Leaf | None:
    found = [_leaf(part) for part in parts]
    leaves = [leaf for leaf in found if leaf is not None]
    if len(leaves) < len(found):
        return None
    ends = np.cumsum([leaf.nbytes for leaf in leaves], dtype=int).tolist()
    packers = [(key, leaf.pack) for key, leaf in zip(keys, leaves)]
    unpackers = [(key, end - leaf.nbytes, end, leaf.unpack) for key, leaf, end in zip(keys, leaves, ends)]
    parts_exact = [(key, leaf.exact) for key, leaf in zip(keys, leaves)]
    names = set(keys)

    def exact(value: Any) -> bytes | None:
        form: Any = type(value)
        if form is not kind or len(value) != len(keys) or not (kind is tuple or value.keys() == names):
            return None
        blocks: list[Packed] = []
        for key, part in parts_exact:
            block = part(value[key])
            if block is None:
                return None
            blocks.append(block)
        return b"".join(blocks)

    def pack(value: Any) -> bytes:
        try:
            if len(value) == len(keys):
                return b"".join([pack(value[key]) for key, pack in packers])
        except (KeyError, IndexError):
            pass
        raise ValueError(f"a {type(value).__name__} whose parts are not the space's: {keys}")

    def unpack_tuple(data: Packed) -> Any:
        return tuple([unpack(data[start:end]) for _, start, end, unpack in unpackers])

    def unpack_dict(data: Packed) -> Any:
        return {key: unpack(data[start:end]) for key, start, end, unpack in unpackers}

    return Leaf(ends[-1] if ends else 0, pack, unpack_dict if kind is dict else unpack_tuple, exact)


def _holds_graph(space: Space[Any]) -> bool:
    if isinstance(space, spaces.Sequence):
        return _holds_graph(space.feature_space)
    if isinstance(space, spaces.Dict):
        return any(map(_holds_graph, space.spaces.values()))
    if isinstance(space, (spaces.Tuple, spaces.OneOf)):
        return any(map(_holds_graph, space.spaces))
    return isinstance(space, spaces.Graph)


def _refine(space: Any, value: Any) -> Any:
    if isinstance(space, spaces.Graph):
        nodes, edges, links = value
        return spaces.GraphInstance(nodes, edges, links)
    if isinstance(space, spaces.Tuple):
        return tuple(_refine(part, item) for part, item in zip(space.spaces, value, strict=True))
    if isinstance(space, spaces.Dict):
        return {key: _refine(space.spaces[key], item) for key, item in value.items()}
    if isinstance(space, spaces.OneOf):
        index, item = value
        return index, _refine(space.spaces[operator.index(index)], item)
    if isinstance(space, spaces.Sequence):
        if space.stack:
            return _refine(space.stacked_feature_space, value)
        return tuple(_refine(space.feature_space, item) for item in value)
    return value
