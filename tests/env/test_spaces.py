"""Spaces and their values make the journey unchanged; hostile descriptions and sizes are refused."""

import copy
from typing import Any

import gymnasium as gym
import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.utils.env_checker import data_equivalence
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox_gym.guest import wire
from sandbox_gym.guest.codec import Codec
from sandbox_gym.guest.spaces import MAX_SPACE_BYTES, build, describe

FIXED = [
    spaces.Box(-np.inf, np.inf, (3,)),
    spaces.Box(0, 255, (8, 8, 3), np.uint8),
    spaces.Box(0, 255, (84, 84, 3), np.uint8),  # large enough to be sent from where it lies
    spaces.Box(np.array([-1, -np.inf]), np.array([1, 2.0]), dtype=np.float64),
    spaces.Box(0, 1, (), np.float32),
    spaces.Box(-np.inf, 5, (2,), np.int32),
    spaces.Box(0, 1, (0,), np.float32),
    spaces.Box(0, 1, (2,), np.dtype(">f4")),
    spaces.Discrete(3),
    spaces.Discrete(5, start=-2),
    spaces.MultiBinary(4),
    spaces.MultiBinary([2, 3]),
    spaces.MultiDiscrete(np.array([[2, 3], [4, 5]])),
    spaces.MultiDiscrete(np.array([3, 3]), dtype=np.int8, start=np.array([1, 2])),
    spaces.Tuple((spaces.Discrete(2), spaces.Box(0, 1, (2,)))),
    spaces.Tuple(()),
    spaces.Dict(b=spaces.Discrete(2), a=spaces.Dict(c=spaces.MultiBinary(2))),
]
VARIABLE = [
    spaces.Text(5),
    spaces.Text(3, min_length=0, charset="zaé\ud800"),
    spaces.Dict(b=spaces.Discrete(2), a=spaces.Text(3)),
    spaces.Sequence(spaces.Box(0, 1, (2,))),
    spaces.Sequence(spaces.Discrete(3), stack=True),
    spaces.Graph(spaces.Box(0, 1, (2,)), spaces.Discrete(3)),
    spaces.Graph(spaces.Discrete(3), None),
    spaces.OneOf((spaces.Discrete(2), spaces.Text(2))),
    spaces.Tuple(
        (spaces.Graph(spaces.Box(0, 1, (2,)), None), spaces.Sequence(spaces.Graph(spaces.Discrete(3), None)))
    ),
]
ALL = FIXED + VARIABLE


def travel(value: Any) -> Any:
    meta, buffers = wire.encode(value)
    return wire.decode(meta, memoryview(b"".join(buffers)))


def same(left: Any, right: Any) -> bool:
    if isinstance(left, spaces.GraphInstance):
        return type(right) is spaces.GraphInstance and all(map(same, left, right))
    if isinstance(left, tuple):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    return data_equivalence(left, right, exact=True)


def flat(frame: tuple[Any, ...]) -> tuple[bytes, memoryview]:
    meta, *data = frame
    return meta, memoryview(b"".join(data))


@pytest.mark.parametrize("space", ALL, ids=str)
def test_a_space_is_built_equal_and_samples_alike(space: spaces.Space[Any]) -> None:
    space = copy.deepcopy(space)
    built = build(travel(describe(space)))
    assert built == space
    assert repr(built) == repr(space)
    assert built.dtype == space.dtype
    space.seed(7)
    built.seed(7)
    for _ in range(5):
        assert same(space.sample(), built.sample())


@pytest.mark.parametrize("space", ALL, ids=str)
@pytest.mark.parametrize("info", [{}, {"array": np.arange(3), "text": "é"}], ids=["bare", "info"])
def test_values_make_the_journey(space: spaces.Space[Any], info: dict[str, Any]) -> None:
    guest, host = Codec(space), Codec(build(travel(describe(space))))
    for _ in range(5):
        value = space.sample()
        observation, told = host.read(*flat(guest.reply(value, info)))
        assert same(observation, value)
        assert observation in host.space
        assert data_equivalence(told, info)
        assert same(guest.decode(*flat(host.encode(value))), value)
        assert same(host.load(travel([guest.dump(value)])[0]), value)


@pytest.mark.parametrize("space", FIXED, ids=str)
def test_fixed_sizes_come_first_and_exactly(space: spaces.Space[Any]) -> None:
    codec = Codec(space)
    assert codec.nbytes is not None
    packed = bytes(codec.pack(space.sample()))
    assert len(packed) == codec.nbytes
    _, data = flat(codec.reply(codec.unpack(memoryview(packed)), {"more": b"bytes"}))
    assert data[: codec.nbytes] == packed
    with pytest.raises(wire.WireError):
        codec.unpack(memoryview(packed + b"!"))


def test_sizes_are_none_where_values_vary() -> None:
    assert all(Codec(space).nbytes is None for space in VARIABLE)


@given(st.data())
@settings(max_examples=150)
def test_any_box_and_any_value_of_it(data: st.DataObject) -> None:
    dtype = data.draw(
        hnp.floating_dtypes(endianness="?")
        | hnp.integer_dtypes(endianness="?")
        | hnp.unsigned_integer_dtypes()
    )
    shape = data.draw(hnp.array_shapes(min_dims=0, max_dims=3, max_side=4))
    elements = {"allow_nan": False} if dtype.kind == "f" else None
    bounds = np.sort(data.draw(hnp.arrays(dtype, (2, *shape), elements=elements)), axis=0)
    try:
        space = spaces.Box(bounds[0], bounds[1], shape, dtype)
    except (ValueError, TypeError):  # bounds that Gymnasium itself refuses: -inf above, inf below
        return
    built = build(travel(describe(space)))
    assert isinstance(built, spaces.Box)
    assert built.dtype == space.dtype
    assert np.array_equal(built.low, space.low)
    assert np.array_equal(built.high, space.high)
    codec = Codec(built)
    value = data.draw(hnp.arrays(dtype, shape))  # nan and what lies outside the space as well
    back = codec.unpack(memoryview(bytes(codec.pack(value))))
    assert (back.dtype, back.shape, back.tobytes()) == (value.dtype, value.shape, value.tobytes())
    assert back.flags.writeable


def test_integer_bounds_remember_that_they_were_infinite() -> None:
    space = spaces.Box(-np.inf, 5, (2,), np.int32)
    built = build(travel(describe(space)))
    assert isinstance(built, spaces.Box)
    assert not built.is_bounded("below")
    assert built.is_bounded("above")


def test_unpacked_arrays_are_fresh_and_writable() -> None:
    codec = Codec(spaces.Box(0, 1, (2,)))
    block = bytearray(8)
    value = codec.unpack(memoryview(block))
    block[:] = b"\xff" * 8
    value += 1
    assert value.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("space", "action"),
    [
        (spaces.Discrete(3), 2**70),
        (spaces.Discrete(3), "left"),
        (spaces.Discrete(3), None),
        (spaces.Discrete(3), np.array([1])),
        (spaces.Box(0, 1, (2,)), [0.5, 0.5]),
        (spaces.Box(0, 1, (2,)), np.array([0.1, 0.2])),  # float64: its digits would be lost
        (spaces.Box(0, 1, (2,)), np.zeros((1, 2), np.float32)),
        (spaces.Dict(a=spaces.Discrete(2)), {"b": 1}),
        (spaces.Tuple((spaces.Discrete(2),)), [1]),
        (spaces.MultiBinary(2), np.array([True, False])),
    ],
    ids=str,
)
def test_actions_of_another_form_arrive_as_given(space: spaces.Space[Any], action: Any) -> None:
    back = Codec(space).decode(*flat(Codec(space).encode(action)))
    assert type(back) is type(action)
    assert np.array_equal(back, action) if isinstance(action, np.ndarray) else back == action
    if isinstance(action, np.ndarray):
        assert back.dtype == action.dtype


def test_observations_are_cast_to_the_spaces_dtype_or_refused() -> None:
    box = Codec(spaces.Box(-5, 5, (2,), np.float32))
    assert box.unpack(memoryview(box.pack([1, 2.5]))).tolist() == [1, 2.5]
    image = Codec(spaces.Box(0, 255, (2,), np.uint8))
    assert image.unpack(memoryview(image.pack([1, 255]))).tolist() == [1, 255]
    for wrong in ([1, 256], [0.5, 1], [1, np.nan], [1], ["a", "b"], None):
        with pytest.raises((ValueError, TypeError)):
            image.pack(wrong)
    pair = Codec(spaces.Dict(a=spaces.Discrete(2)))
    for value in ({}, {"a": 1, "b": 1}, {"a": 0.5}):
        with pytest.raises((ValueError, TypeError)):
            pair.pack(value)


def test_arrays_that_are_not_contiguous_are_packed_in_order() -> None:
    for side in (2, 100):  # below and above the size that is sent from where it lies
        codec = Codec(spaces.Box(0, 1, (side, side), np.float64))
        value = np.arange(2.0 * side * side).reshape(side, 2 * side)[:, ::2]
        assert same(codec.unpack(memoryview(bytes(codec.pack(value)))), value)
        assert same(codec.unpack(memoryview(bytes(codec.pack(np.asfortranarray(value))))), value)


def test_subclasses_become_the_space_they_are() -> None:
    class Compass(spaces.Discrete):
        pass

    assert type(build(travel(describe(Compass(4))))) is spaces.Discrete


def test_a_text_space_of_ones_own_becomes_text() -> None:
    class Mission(spaces.Space[str]):
        def __init__(self) -> None:
            super().__init__(dtype=str)

    built = build(travel(describe(spaces.Dict(mission=Mission()))))
    assert {"mission": "open the door"} in built


def test_a_space_of_an_unknown_kind_is_named() -> None:
    class Odd(spaces.Space[Any]):
        pass

    with pytest.raises(TypeError, match="Odd"):
        describe(Odd())


@pytest.mark.parametrize(
    "description",
    [
        None,
        "box",
        {},
        {"kind": "nothing"},
        {"kind": "discrete", "n": 0, "start": 0, "dtype": "<i8"},
        {"kind": "discrete", "n": 2**70, "start": 0, "dtype": "<i8"},
        {"kind": "discrete", "n": 300, "start": 0, "dtype": "|i1"},
        {"kind": "discrete", "n": 2.5, "start": 0, "dtype": "<i8"},
        {"kind": "binary", "n": [10**6, 10**6]},
        {"kind": "binary", "n": -1},
        {"kind": "text", "most": 2**40, "least": 0, "charset": "a"},
        {"kind": "text", "most": 1, "least": 2, "charset": "a"},
        {"kind": "tuple", "spaces": 3},
        {"kind": "oneof", "spaces": []},
        {"kind": "graph", "node": {"kind": "discrete", "n": 2, "start": 0, "dtype": "<i8"}},
    ],
    ids=str,
)
def test_hostile_descriptions_are_refused(description: Any) -> None:
    with pytest.raises(wire.WireError):
        build(description)


def test_hostile_sizes_are_refused_before_they_are_allocated() -> None:
    box = describe(spaces.Box(0, 1, (2,)))
    for shape in ([2**40], [2**20, 2**20], [-1], [1] * 40):
        with pytest.raises(wire.WireError):
            build({**box, "shape": shape})
    half = {**box, "shape": [MAX_SPACE_BYTES // 16]}
    build(half)
    with pytest.raises(wire.WireError):
        build({"kind": "tuple", "spaces": [half] * 3})
    deep = box
    for _ in range(100):
        deep = {"kind": "tuple", "spaces": [deep]}
    with pytest.raises(wire.WireError):
        build(deep)
    with pytest.raises(wire.WireError):
        build(
            {"kind": "tuple", "spaces": [{"kind": "discrete", "n": 1, "start": 0, "dtype": "<i8"}] * 20_000}
        )


@given(st.sampled_from(ALL), st.data())
@settings(max_examples=200)
def test_mutated_descriptions_raise_only_wire_error(space: spaces.Space[Any], data: st.DataObject) -> None:
    meta, buffers = wire.encode(describe(space))
    changed = bytearray(meta)
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(32, 126))
    try:
        build(wire.decode(bytes(changed), memoryview(b"".join(buffers))))
    except wire.WireError:
        pass


@given(st.sampled_from(ALL), st.binary(max_size=80), st.data())
def test_fuzzed_replies_raise_only_wire_error(
    space: spaces.Space[Any], noise: bytes, data: st.DataObject
) -> None:
    codec = Codec(space)
    space.seed(0)  # hypothesis replays: the frame must be the same again
    meta, block = flat(codec.reply(space.sample(), {"lives": 3}))
    changed = bytearray(meta)
    changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    for frame in (
        (bytes(changed), block),
        (meta, memoryview(noise)),
        (noise, block),
        (b"", memoryview(noise)),
    ):
        try:
            codec.read(*frame)
        except wire.WireError:
            pass


def test_every_registered_environment_of_gymnasium_can_be_described() -> None:
    for env_id in ("CartPole-v1", "FrozenLake-v1", "Blackjack-v1", "Pendulum-v1"):
        env = gym.make(env_id)
        for space in (env.observation_space, env.action_space):
            assert build(travel(describe(space))) == space
