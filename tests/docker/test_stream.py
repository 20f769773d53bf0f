"""Output comes in pieces, each with a header: whatever pieces the kernel makes of that, the bytes are the same."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from sandbox_gym.backends.docker.stream import Attached
from sandbox_gym.channel import Channel
from sandbox_gym.errors import SandboxDied, SandboxTimeout
from sandbox_gym.guest import wire
from sandbox_gym.guest.wire import HEADER, Op

Pair = tuple[Attached, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair()
    yield Attached(ours), theirs
    ours.close()
    theirs.close()


def piece(block: bytes, stream: int = 1) -> bytes:
    return struct.pack(">BxxxI", stream, len(block)) + block


@pytest.mark.parametrize("size", [1, 7, 8, 9, 100, 70_000])
def test_pieces_of_any_size(pair: Pair, size: int) -> None:
    attached, theirs = pair
    block = bytes(range(256)) * 800
    sent = b"".join(piece(block[i : i + 5000]) + piece(b"") for i in range(0, len(block), 5000))

    def send() -> None:
        for start in range(0, len(sent), size):
            theirs.sendall(sent[start : start + size])
        theirs.close()

    thread = threading.Thread(target=send)
    thread.start()
    got, some = bytearray(), bytearray(3333)
    while count := attached.recv_into(some):
        got += some[:count]
    thread.join()
    assert got == block


def test_what_has_come_of_several_pieces(pair: Pair) -> None:
    attached, theirs = pair
    theirs.sendall(piece(b"abc") + piece(b"defgh"))
    first, rest = bytearray(2), bytearray(20)
    assert attached.recv_into(first) == 2
    assert attached.recv_into(rest) == 6
    assert bytes(first) == b"ab" and rest[:6] == b"cdefgh"
    with pytest.raises(BlockingIOError):
        attached.recv_into(rest, 0, socket.MSG_DONTWAIT)


def test_another_stream_is_an_error(pair: Pair) -> None:
    attached, theirs = pair
    theirs.sendall(piece(b"said aside", stream=2))
    with pytest.raises(OSError, match="stream 2"):
        attached.recv_into(bytearray(10))


def test_under_a_channel(pair: Pair) -> None:
    attached, theirs = pair
    channel = Channel(attached, "box")  # type: ignore[arg-type]  # it has what a channel uses of a socket
    meta, _ = wire.encode("x" * 100_000)
    channel.post(Op.PING, timeout=1)
    assert theirs.recv(100) == HEADER.pack(Op.PING, 0, 1, 0, 0)
    answer = HEADER.pack(Op.PING, 0, 1, len(meta), 0) + meta
    theirs.sendall(b"".join(piece(answer[i : i + 32768]) for i in range(0, len(answer), 32768)))
    assert len(channel.wait(Op.PING, timeout=5).meta) == len(meta)
    channel.post(Op.PING, timeout=0.05)
    with pytest.raises(SandboxTimeout):
        channel.wait(Op.PING, timeout=0.05)
    theirs.shutdown(socket.SHUT_RDWR)
    with pytest.raises(SandboxDied):
        channel.wait(Op.PING, timeout=5)
    channel.close()
