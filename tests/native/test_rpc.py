"""What criu is told and what it says: protocol buffers, both ways."""

from __future__ import annotations

import os
import socket
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox_gym.backends.native import criu, rpc

_NUMBERS = st.integers(0, (1 << 64) - 1)
_MESSAGES = st.lists(
    st.tuples(st.integers(1, 1000), st.one_of(_NUMBERS, st.binary(max_size=300))), max_size=12
)
_TEXT = st.text("ab/[]:1é", max_size=40)
_NAMES = sorted(rpc._OPTIONS)
_OPTIONS = st.dictionaries(
    st.sampled_from(_NAMES),
    st.one_of(st.integers(0, 1 << 31), _TEXT, st.lists(_TEXT, min_size=1, max_size=4)),
)


@given(_MESSAGES)
def test_fields_come_back_as_they_were_and_in_order(message: list[tuple[int, int | bytes]]) -> None:
    assert list(rpc.fields(rpc.join(message))) == message


@given(st.integers(-(1 << 31), (1 << 31) - 1))
def test_a_signed_number_comes_back(number: int) -> None:
    ((_, value),) = rpc.fields(rpc._field(1, number))
    assert rpc._signed(value) == number


@given(_OPTIONS, st.sampled_from([rpc.DUMP, rpc.RESTORE]))
def test_a_request_says_its_kind_and_each_option(options: dict[str, rpc.Value], kind: int) -> None:
    outer = list(rpc.fields(rpc.request(kind, options)))
    assert outer[0] == (1, kind) and [number for number, _ in outer] == [1, 2]
    expected = []
    for name, value in options.items():
        for item in value if isinstance(value, list) else [value]:
            expected.append((rpc._OPTIONS[name], item.encode() if isinstance(item, str) else item))
    assert list(rpc.fields(outer[1][1])) == expected


@given(st.binary(max_size=200))
def test_whatever_comes_is_fields_or_a_value_error(block: bytes) -> None:
    try:
        for number, value in rpc.fields(block):
            assert number >= 0 and isinstance(value, (int, bytes))
    except ValueError:
        pass


@given(_MESSAGES.filter(bool), st.data())
def test_a_message_that_breaks_off_gives_no_field_that_is_not_whole(
    message: list[tuple[int, int | bytes]], data: st.DataObject
) -> None:
    block = rpc.join(message)
    cut = data.draw(st.integers(0, len(block) - 1))
    found = []
    whole = cut in {len(rpc.join(message[:i])) for i in range(len(message))}
    try:
        for field in rpc.fields(block[:cut]):
            found.append(field)
        assert whole
    except ValueError:
        assert not whole
    assert found == message[: len(found)]


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (rpc.message({1: rpc.DUMP, 2: 1}), {"kind": rpc.DUMP, "success": True}),
        (
            rpc.message({1: rpc.RESTORE, 2: 1, 4: rpc.message({1: 77})}),
            {"kind": rpc.RESTORE, "success": True, "pid": 77},
        ),
        # A restore that failed names process -1, as 64 bits.
        (
            rpc.message({1: rpc.RESTORE, 2: 0, 4: rpc.message({1: -1})}),
            {"kind": rpc.RESTORE, "success": False, "pid": -1},
        ),
        (
            rpc.message({1: rpc.NOTIFY, 2: 1, 5: rpc.message({1: "post-dump", 2: 5})}),
            {"kind": rpc.NOTIFY, "success": True, "script": "post-dump", "pid": 5},
        ),
    ],
)
def test_what_criu_says_is_read(block: bytes, expected: dict[str, object]) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        theirs.send(block)
        assert rpc.receive(ours) == expected
        theirs.close()
        with pytest.raises(EOFError):
            rpc.receive(ours)


def test_criu_itself_understands_and_is_understood() -> None:
    found = criu.find()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.settimeout(20)
        process = subprocess.Popen([found.path, "swrk", str(theirs.fileno())], pass_fds=[theirs.fileno()])
        theirs.close()
        try:
            ours.send(rpc.message({1: _VERSION}))
            assert rpc.receive(ours) == {"kind": _VERSION, "success": True}
        finally:
            process.kill()
            process.wait(20)


_VERSION = 10  # enum criu_req_type


def test_an_independent_reader_finds_the_same() -> None:
    block = rpc.request(rpc.DUMP, {"pid": 300, "external": ["a", "unix[5]"], "log_file": "log"})
    said = subprocess.run(
        ["protoc", "--decode_raw"],
        input=block,
        capture_output=True,
        check=True,
        timeout=30,
        env={"PATH": os.environ["PATH"]},
    ).stdout.decode()
    assert " ".join(said.split()) == '1: 1 2 { 2: 300 37: "a" 37: "unix[5]" 10: "log" }'
