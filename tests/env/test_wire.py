"""The codec against whatever hypothesis thinks of, and against bytes that no encoder wrote."""

import collections
import enum
import math
import string
from typing import Any

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sandbox_gym.guest import wire

# "O" aside, every kind that travels: numbers, text, bytes, dates.
dtypes = st.one_of(
    hnp.boolean_dtypes(),
    hnp.integer_dtypes(endianness="?"),
    hnp.unsigned_integer_dtypes(endianness="?"),
    hnp.floating_dtypes(endianness="?"),
    hnp.complex_number_dtypes(endianness="?"),
    hnp.unicode_string_dtypes(max_len=4),
    hnp.byte_string_dtypes(max_len=4),
    hnp.datetime64_dtypes(),
    hnp.timedelta64_dtypes(),
)
arrays = hnp.arrays(dtypes, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
texts = st.text(st.characters(exclude_categories=()), max_size=12)  # lone surrogates too
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.complex_numbers(), texts, st.binary(max_size=20)
)
hashables = st.recursive(scalars, lambda inner: st.tuples(inner, inner), max_leaves=4)
values = st.recursive(
    scalars | arrays | arrays.map(lambda a: a.ravel()[0] if a.size else a) | st.sets(hashables, max_size=3),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(hashables | st.just("$"), inner, max_size=4)
    ),
    max_leaves=12,
)


def travel(value: object) -> Any:
    meta, buffers = wire.encode(value)
    return wire.decode(meta, memoryview(b"".join(bytes(block) for block in buffers)))


def same(left: object, right: object) -> bool:
    """Equal in value and type at every level; nan is nan, arrays agree in dtype and shape."""
    if type(left) is not type(right):
        return False
    if isinstance(left, (np.ndarray, np.generic)):
        assert isinstance(right, (np.ndarray, np.generic))
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    if isinstance(left, dict):
        assert isinstance(right, dict)
        pairs = zip(left.items(), right.items(), strict=True)
        return len(left) == len(right) and all(same(k, q) and same(v, w) for (k, v), (q, w) in pairs)
    if isinstance(left, (list, tuple)):
        assert isinstance(right, (list, tuple))
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float):
        assert isinstance(right, float)
        return (math.isnan(left) and math.isnan(right)) or (left == right and str(left) == str(right))
    return repr(left) == repr(right) if isinstance(left, complex) else _equal(left, right)


def _equal(left: object, right: object) -> bool:
    if isinstance(left, set) and isinstance(right, set):  # nan is not itself, and lies anywhere in a set
        return sorted(map(repr, left)) == sorted(map(repr, right))
    return left == right


@given(values)
@example(np.float32(0.1))
@example(np.zeros((0, 3), ">f2"))
@example(np.array("", "U0"))
@example({"$": 1})
@example({"$": "o", "v": "no repr"})
@example([b"", b"ab", bytearray(b"c")][:2])
@example(2**200)
@example({None, math.nan})
def test_values_come_back_as_they_were(value: object) -> None:
    assert same(travel(value), value)


@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_that_are_not_contiguous(order: str) -> None:
    array = np.asarray(np.arange(24.0).reshape(4, 6), order=order)[::2, 1::2]  # type: ignore[call-overload]
    assert same(travel(array), np.ascontiguousarray(array))


def test_arrays_come_back_writable_and_on_their_own() -> None:
    first, second = travel([np.zeros(3), np.zeros(3)])
    first[:] = 1
    assert second.sum() == 0
    assert second.flags.aligned


def test_object_arrays_and_subclasses_become_plain() -> None:
    class Level(enum.IntEnum):
        HIGH = 3

    array = np.empty(2, object)
    array[:] = ["a", None]
    back = travel({"array": array, "level": Level.HIGH, "ordered": collections.OrderedDict(a=1)})
    assert isinstance(back, dict)
    assert back["array"].dtype == object
    assert back["array"].tolist() == ["a", None]
    assert back["level"] == 3
    assert type(back["level"]) is int
    assert type(back["ordered"]) is dict


def test_what_has_no_safe_form_is_its_repr() -> None:
    class Broken:
        def __repr__(self) -> str:
            raise ZeroDivisionError

    back = travel([object, Broken()])
    assert isinstance(back, list)
    assert all(type(item) is wire.Opaque for item in back)
    assert "Broken" in back[1]


@given(st.binary(max_size=60), st.binary(max_size=16))
@settings(max_examples=300)
def test_bytes_of_no_encoder_raise_only_wire_error(meta: bytes, data: bytes) -> None:
    decode_or_refuse(meta, data)


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(string.printable, max_size=6),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.fixed_dictionaries(
            {"$": st.sampled_from(["a", "n", "oa", "m", "b", "c", "s", "t", "o", "zz", 3, None])},
            optional={
                "v": inner | st.lists(inner, max_size=3),
                "p": inner | st.tuples(st.integers(-5, 20), st.integers(-5, 20)),
                "d": st.sampled_from(
                    ["<f8", "O", "|S0", "<U3", "M8[ns]", "V8", "f8,i4", ",", "(2,)f8", "", "x"]
                )
                | inner,
                "s": inner | st.lists(st.integers(-2, 2**40), max_size=4),
            },
        )
    ),
    max_leaves=10,
)


@given(junk, st.binary(max_size=24))
@settings(max_examples=500)
def test_well_formed_nonsense_raises_only_wire_error(value: object, data: bytes) -> None:
    import json

    decode_or_refuse(json.dumps(value).encode(), data)


@given(values, st.data())
@settings(max_examples=300)
def test_mutations_raise_only_wire_error(value: object, data: st.DataObject) -> None:
    meta, buffers = wire.encode(value)
    changed = bytearray(meta or b"null")
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    decode_or_refuse(bytes(changed), b"".join(bytes(block) for block in buffers))


@pytest.mark.parametrize(
    "meta",
    [
        b"[" * 100_000,
        b'{"$":"a","d":"<f8","s":[1099511627776],"p":[0,0]}',
        b'{"$":"a","d":"|S0","s":[1099511627776],"p":[0,0]}',
        b'{"$":"oa","s":[1099511627776],"v":[]}',
        b'{"$":"a","d":"O","s":[1],"p":[0,8]}',
        b'{"$":"a","d":"<f8","s":[1],"p":[8,8]}',
        b'{"$":"a","d":"<f8","s":[-1],"p":[0,8]}',
        b'{"$":"b","p":[-8,8]}',
        b'[{"$":"b","p":[0,8]},{"$":"b","p":[0,8]}]',
        b'{"$":"s","v":[[]]}',
        b"1" * 10_000,
    ],
)
def test_attacks_are_refused(meta: bytes) -> None:
    with pytest.raises(wire.WireError):
        wire.decode(meta, memoryview(bytes(8)))


def decode_or_refuse(meta: bytes, data: bytes) -> None:
    try:
        wire.decode(meta, memoryview(data))
    except wire.WireError:
        pass
