"""A guest whose own process is the attacker's: it holds the control socket, and says on it what it likes."""

# ruff: noqa: PT017  (either outcome will do)
from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from sandbox_gym.errors import ProtocolError, SandboxDied, SandboxError, SandboxTimeout
from sandbox_gym.guest.wire import Op
from sandbox_gym.sandbox import Sandbox

# Finds the agent's socket, as any code in the guest can.
_HEAD = """
import array, os, socket, struct, sys, time
from sandbox_gym_guest.wire import Connection, Op
frame = sys._getframe()
while type(frame.f_locals.get('self')).__name__ != 'Agent': frame = frame.f_back
agent = frame.f_locals['self']
sock = agent.connection.sock
sock.setblocking(True)
def header(op=10, status=0, seq=0, meta=0, data=0): return struct.pack('<BBHIQ', op, status, seq, meta, data)
"""
_ATTACKS = {
    "flood": "while True: sock.send(b'x' * 65536)",
    "flood of frames": "while True: sock.sendall(header() * 1000)",
    "flood of right answers": "while True: sock.sendall(b''.join(header(seq=s) for s in range(200)))",
    "garbage": "sock.sendall(os.urandom(4096)); time.sleep(60)",
    "short garbage": "sock.sendall(b'abc'); time.sleep(60)",
    "oversized meta": "sock.sendall(header(meta=0xffffffff) + b'x'); time.sleep(60)",
    "oversized data": "sock.sendall(header(data=1 << 62) + b'x'); time.sleep(60)",
    "large and never": "sock.sendall(header(data=500 << 20) + b'x'); time.sleep(60)",
    "dribble": "for b in header(data=100) + bytes(100): sock.send(bytes([b])); time.sleep(0.05)\ntime.sleep(60)",
    "dribble for ever": "sock.send(header(data=100000))\nwhile True: sock.send(b'x'); time.sleep(0.05)",
    "close": "sock.close(); time.sleep(60)",
    "shutdown": "sock.shutdown(2); time.sleep(60)",
    "descriptors": (
        "r = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [0] * 200))]\n"
        "while True: sock.sendmsg([b'x'], r)"
    ),
    "wrong number": "sock.sendall(header(seq=999)); time.sleep(60)",
    "wrong op": "sock.sendall(header(op=77)); time.sleep(60)",
    "wrong status": "sock.sendall(header(status=9)); time.sleep(60)",
    "not json": "sock.sendall(header(meta=4) + b'{{{{'); time.sleep(60)",
    "not text": "sock.sendall(header(meta=4) + b'\\xff\\xfe\\xfd\\xfc'); time.sleep(60)",
    "deep json": "sock.sendall(header(meta=200000) + b'[' * 200000); time.sleep(60)",
    "reads nothing": "while True: time.sleep(60)",
}


@pytest.mark.parametrize("what", _ATTACKS)
def test_an_attack_over_the_control_socket(boxes: Callable[[int], list[Sandbox]], what: str) -> None:
    evil, other = boxes(2)
    started = time.monotonic()
    try:
        result = evil.run_code(_HEAD + _ATTACKS[what], timeout=0.8)
    except (ProtocolError, SandboxDied, SandboxTimeout) as error:
        assert evil.name in str(error)
    else:
        assert result.timed_out
        if evil.status == "running":  # it obeyed its interrupt; what it had sent is not taken for an answer
            try:
                assert evil.run_code("'mine'", timeout=1.0).value == "'mine'"
            except SandboxError as error:
                assert evil.name in str(error)
    assert time.monotonic() - started < 8
    assert other.run_code("6 * 7").value == "42"
    with Sandbox.create() as fresh:
        assert fresh.run_code("1").ok


_LIES = {
    "nothing": "None",
    "a list": "[1, 2]",
    "text": "'done'",
    "too few": "{'stdout': ''}",
    "too many": "{**good, 'more': 1}",
    "wrong types": "{**good, 'stdout': 5}",
    "bool for int": "{**good, 'stdout_cut': True}",
    "error that is none": "{**good, 'error': {'type': 1}}",
}


@pytest.mark.parametrize("what", _LIES)
def test_answers_that_lie_about_their_fields(box: Sandbox, what: str) -> None:
    code = (
        "from sandbox_gym_guest import interpreter, commands\n"
        "good = {'value': None, 'error': None, 'timed_out': False, 'stdout': '', 'stderr': '', 'stdout_cut': 0,"
        f" 'stderr_cut': 0, 'duration': 0.0}}\ninterpreter.Interpreter.run = lambda self, code: {_LIES[what]}"
    )
    assert box.run_code(code).ok
    with pytest.raises(ProtocolError, match=box.name):
        box.run_code("1")
    assert box.status == "dead"


def test_a_handler_that_raises_what_it_likes(box: Sandbox) -> None:
    assert box.run_code(
        "from sandbox_gym_guest import commands\ndef run(**k): raise SystemExit('x' * 10**6)\ncommands.run = run"
    ).ok
    with pytest.raises(ProtocolError, match=box.name):
        box.shell("true")


def test_lies_during_a_snapshot(boxes: Callable[[int], list[Sandbox]]) -> None:
    """The guest answers the order to clone itself with nonsense, or not at all."""
    for i, lie in enumerate(
        ("os._exit(0)", "raise OSError('refused')", "raise ValueError('broken')", "s.sendall(b'n' * 100)")
    ):
        (evil,) = boxes(1)
        evil.run_code(
            "import os\nfrom sandbox_gym_guest.copying import Copier\n"
            f"def clone(self, connection, frame):\n    s = connection.sock\n    {lie}\nCopier.clone = clone\nkept = {i}"
        )
        started = time.monotonic()
        evil_timeout = 10.0
        with pytest.raises(SandboxError, match=evil.name):
            evil.fork(1)
        assert time.monotonic() - started < evil_timeout
        (fine,) = boxes(1)
        with fine.fork(1)[0] as copy:
            assert copy.run_code("1").ok


def test_a_copy_that_pretends_to_be_another(boxes: Callable[[int], list[Sandbox]]) -> None:
    """It writes the announcement of a copy by itself, without having cloned: it never becomes two."""
    evil, other = boxes(2)
    evil.run_code(
        "import os\nfrom sandbox_gym_guest.copying import Copier\nfrom sandbox_gym_guest.wire import HEADER, Op\n"
        "def clone(self, connection, frame):\n    os.write(frame.fds[0], HEADER.pack(Op.READY, 0, 0, 0, 0))\n"
        "    for fd in frame.fds: os.close(fd)\nCopier.clone = clone"
    )
    try:
        (copy,) = evil.fork(1)
        copy.run_code("1", timeout=1.0)
        copy.terminate()
    except SandboxError:
        pass
    with other.fork(1)[0] as copy:
        assert other.run_code("1").ok and copy.run_code("1").ok
    with Sandbox.create() as fresh:
        assert fresh.run_code("1").ok


def test_a_guest_that_reads_a_large_request_ever_so_slowly(box: Sandbox) -> None:
    code = (
        "def slowly(*_):\n    while True: sock.recv(16384); time.sleep(0.1)\nagent.connection.serve = slowly"
    )
    box.run_code(_HEAD + code + "\nagent.connection.receive = slowly")
    started = time.monotonic()
    with pytest.raises(SandboxTimeout, match=box.name):
        box._call(
            Op.WRITE, {"path": "x", "data": bytes(32 << 20), "append": False, "mode": None}, timeout=1.0
        )
    assert time.monotonic() - started < 8
    assert box.status == "dead"


def test_many_attackers_at_once_and_a_bystander(boxes: Callable[[int], list[Sandbox]]) -> None:
    *attackers, bystander = boxes(5)
    slow: list[float] = []
    over = threading.Event()

    def attack(box: Sandbox) -> None:
        try:
            box.run_code(_HEAD + _ATTACKS["flood of frames"], timeout=1.0)
        except SandboxError:
            pass

    def watch() -> None:
        while not over.is_set():
            started = time.monotonic()
            assert bystander.run_code("1").value == "1"
            slow.append(time.monotonic() - started)

    threads = [threading.Thread(target=attack, args=(box,)) for box in attackers]
    watcher = threading.Thread(target=watch)
    for thread in (*threads, watcher):
        thread.start()
    for thread in threads:
        thread.join()
    over.set()
    watcher.join()
    assert slow and max(slow) < 3.0
