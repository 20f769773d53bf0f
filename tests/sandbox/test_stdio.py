"""A guest that speaks over standard input and output, as a container engine starts it."""

from __future__ import annotations

import os
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox_gym.channel import Channel
from sandbox_gym.errors import SandboxDied, SandboxTimeout
from sandbox_gym.guest import stdio, wire
from sandbox_gym.guest.stdio import Stdio
from sandbox_gym.guest.wire import Op


def code(channel: Channel, text: str, timeout: float = 10.0) -> Any:
    answer = channel.call(Op.CODE, {"code": text}, timeout=timeout)
    assert answer["error"] is None, answer
    return answer["value"]


@pytest.fixture
def guest(tmp_path: Path) -> Iterator[tuple[Channel, subprocess.Popen[bytes]]]:
    """No sandbox: the agent alone, as a process of this machine."""
    shutil.copytree(Path(stdio.__file__).parent, tmp_path / "sandbox_gym_guest")
    (tmp_path / "start.py").write_text("from sandbox_gym_guest.agent import main\n\nmain()\n")
    argv = [sys.executable, "-s", str(tmp_path / "start.py"), "stdio", str(tmp_path)]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=tmp_path)
    assert process.stdin is not None and process.stdout is not None
    pair: Any = Stdio(os.dup(process.stdout.fileno()), os.dup(process.stdin.fileno()))
    process.stdin.close()
    process.stdout.close()
    channel = Channel(pair, "piped")
    try:
        channel.limit(10.0)
        assert wire.Connection(pair, takes_fds=False).receive().op == Op.READY
        yield channel, process
    finally:
        channel.close()
        process.kill()
        process.wait(10)


def test_calls(guest: tuple[Channel, subprocess.Popen[bytes]]) -> None:
    channel, _ = guest
    assert code(channel, "x = 20; print('out'); x + 1") == "21"
    assert code(channel, "x, len(globals()) > 1") == "(20, True)"
    request = {"argv": ["cat"], "timeout": 5.0, "cwd": None, "env": None, "stdin": b"x" * 300_000}
    assert len(channel.call(Op.EXEC, request, timeout=10)["stdout"]) == 300_000
    block = os.urandom(3 << 20)  # more than a pipe holds, both ways
    channel.call(Op.WRITE, {"path": "big", "data": block, "append": False, "mode": None}, timeout=10)
    found = channel.call(Op.READ, {"path": "big", "offset": 0, "size": 8 << 20}, timeout=10)
    assert found["data"] == block


def test_programs_find_nothing_on_the_standard_descriptors(
    guest: tuple[Channel, subprocess.Popen[bytes]],
) -> None:
    channel, _ = guest
    channel.call(Op.CODE, {"code": "import os; os.write(1, b'garbage'); os.write(2, b'more')"}, timeout=10)
    assert code(channel, "os.read(0, 9), os.readlink('/proc/self/fd/0')") == "(b'', '/dev/null')"
    listing = "import subprocess; subprocess.check_output('ls -l /proc/self/fd', shell=True).count(b'pipe:')"
    assert code(channel, f"{listing} <= 2") == "True"  # those of check_output itself


def test_time_out_then_the_answer_that_was_owed(guest: tuple[Channel, subprocess.Popen[bytes]]) -> None:
    channel, _ = guest
    with pytest.raises(SandboxTimeout, match=r"did not answer CODE within 0\.2 s"):
        code(channel, "import time; time.sleep(0.6)", timeout=0.2)
    assert channel.wait(Op.CODE, timeout=10).status == 0


def test_guest_that_takes_no_request(guest: tuple[Channel, subprocess.Popen[bytes]], tmp_path: Path) -> None:
    channel, _ = guest
    cell = "import time; open('begun', 'w').close(); time.sleep(30)"
    channel.post(Op.CODE, *_packed({"code": cell}), timeout=5)
    deadline = time.monotonic() + 5
    while not (tmp_path / "begun").exists() and time.monotonic() < deadline:
        time.sleep(0.01)  # a frame of two requests would be against the protocol
    with pytest.raises(SandboxTimeout, match=r"took no request within 0\.2 s"):
        channel.post(Op.WRITE, b"{}", bytes(4 << 20), timeout=0.2)


def test_killed_guest_is_gone(guest: tuple[Channel, subprocess.Popen[bytes]]) -> None:
    channel, process = guest
    process.kill()
    with pytest.raises(SandboxDied):
        code(channel, "1")


def test_closed_by_the_host_the_guest_ends(guest: tuple[Channel, subprocess.Popen[bytes]]) -> None:
    channel, process = guest
    channel.close()
    assert process.wait(10) == 0


def test_another_threads_wait_is_ended(guest: tuple[Channel, subprocess.Popen[bytes]]) -> None:
    channel, _ = guest
    failed: list[BaseException] = []

    def call() -> None:
        try:
            code(channel, "import time; time.sleep(30)", timeout=30)
        except SandboxDied as error:
            failed.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    channel.interrupt()
    thread.join(10)
    assert not thread.is_alive() and failed


def test_options_and_descriptors_that_pipes_lack() -> None:
    reads, writes = os.pipe()
    pair = Stdio(reads, writes)
    try:
        with pytest.raises(OSError, match="no option"):
            pair.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, b"")
        with pytest.raises(OSError, match="no descriptors"):
            pair.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, b"")])
        with pytest.raises(BlockingIOError):
            pair.recv_into(bytearray(9), 0, socket.MSG_DONTWAIT)
        pair.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@qq", 0, 50_000))
        started = time.monotonic()
        with pytest.raises(BlockingIOError):
            pair.recv_into(bytearray(9))
        assert time.monotonic() - started >= 0.05
        pair.sendall(b"abc")
        buffer = bytearray(9)
        assert pair.recv_into(buffer) == 3 and buffer[:3] == b"abc"
    finally:
        pair.close()
        pair.close()


def _packed(value: Any) -> tuple[Any, ...]:
    meta, buffers = wire.encode(value)
    return meta, *buffers
