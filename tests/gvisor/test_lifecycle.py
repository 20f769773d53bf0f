"""Sandboxes of gVisor's come, are copied, and go: what is theirs alone beside the conformance suite's checks."""

from __future__ import annotations

import os
import threading

import pytest

import sandbox_gym
from sandbox_gym.errors import SnapshotError
from sandbox_gym.sandbox import Sandbox, Snapshot
from tests.gvisor.conftest import gvisor, holdings

_SERVER = """
import socket
listener, served = socket.create_server(("127.0.0.1", 7000)), 0
while True:
    sock, _ = listener.accept()
    served += 1
    sock.sendall(b"%d" % served)
    sock.close()
"""
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="runsc restores sandboxes for root only")


def value(box: Sandbox, code: str) -> str | None:
    result = box.run_code(code, timeout=30)
    assert result.ok, result
    return result.value


def test_the_kernel_is_gvisors(box: Sandbox) -> None:
    assert "Starting gVisor" in box.shell("dmesg").stdout
    assert value(box, "import os; os.uname().release") == "'4.4.0'" != repr(os.uname().release)


def test_generations(box: Sandbox) -> None:
    """Snapshots of copies of snapshots; none needs the one before it."""
    value(box, "line = []")
    current = box
    for generation in range(4):
        value(current, f"line.append({generation})")
        current.shell(f"echo {generation} >> /root/line")
        before = current.parent
        snapshot = current.snapshot()
        assert (snapshot.engine, snapshot.parent) == ("gvisor", before)
        copy = Sandbox.restore(snapshot)
        snapshot.delete()
        if current is not box:
            current.terminate()
        current = copy
    with current:
        assert value(current, "line") == "[0, 1, 2, 3]"
        assert current.read_text("/root/line").split() == ["0", "1", "2", "3"]
        assert value(box, "line") == "[0]"


def test_many_copies_at_once_from_many_threads(pristine: Snapshot) -> None:
    made: list[Sandbox] = []

    def make(number: int) -> None:
        boxes = Sandbox.restore_many(pristine, 2)
        for i, box in enumerate(boxes):
            box.run_code(f"me = {number}, {i}")
        made.extend(boxes)

    threads = [threading.Thread(target=make, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    try:
        assert sorted(str(value(box, "me")) for box in made) == [
            f"({n}, {i})" for n in range(3) for i in range(2)
        ]
    finally:
        for box in made:
            box.terminate()


def test_a_snapshot_is_a_folder_that_goes_with_its_last_handle(box: Sandbox) -> None:
    before = holdings()["images"]
    snapshot = box.snapshot()
    (image,) = set(holdings()["images"]) - set(before)
    assert snapshot.memory_bytes == 0 and snapshot.disk_bytes > 1 << 20
    gvisor().put_on_disk(snapshot.id, timeout=5.0)  # where it is already
    snapshot.delete()
    assert image not in holdings()["images"]
    with pytest.raises(SnapshotError, match="deleted"):
        gvisor().put_on_disk(snapshot.id, timeout=5.0)


def test_other_engines_are_refused(box: Sandbox) -> None:
    for engine in ("fork", "criu"):
        with pytest.raises(SnapshotError, match=f"only engine is gvisor, not {engine}"):
            box.snapshot(engine=engine)
    assert value(box, "1 + 1") == "2"


def test_all_of_a_program_is_in_a_copy(box: Sandbox) -> None:
    """A server, a pipeline, a shell on a terminal, threads: each goes on, in the copy and in the source."""
    box.write_file("server.py", _SERVER)
    server = box.start(["python3", "server.py"])
    ask = (
        "import socket, time\nfor _ in range(500):\n  try:\n    c = socket.create_connection(('127.0.0.1', 7000))\n"
        "    break\n  except OSError: time.sleep(0.02)\nint(c.recv(9))"
    )
    assert value(box, ask) == "1"
    terminal = box.start(["bash", "--norc"], pty=True)
    box.session().run("cd /tmp; kept=yes")
    value(box, "import threading, queue\nq, r = queue.Queue(), queue.Queue()")
    value(box, "t = threading.Thread(target=lambda: [r.put(q.get() + 1) for _ in range(3)]); t.start()")
    value(
        box,
        "inside = socket.create_server(('127.0.0.1', 7001)); mine = socket.create_connection(('127.0.0.1', 7001))",
    )
    value(box, "theirs, _ = inside.accept()")
    (copy,) = box.fork(1)
    with copy:
        for each in (copy, box):
            assert value(each, ask) == "2"
            assert each.session().run("echo $kept $PWD").stdout == "yes /tmp\n"
            assert value(each, "q.put(41); r.get(timeout=20)") == "42"
            assert value(each, "mine.sendall(b'over'); theirs.recv(4)") == "b'over'"
            shell = each.process(terminal.id)
            shell.write(b"stty size; exit\n")
            assert shell.wait(20) == 0
            assert b"24 80" in shell.read()
        box.process(server.id).kill()
        assert value(copy, ask) == "3"


def test_an_environment_is_branched() -> None:
    env = sandbox_gym.SandboxEnv("CartPole-v1", backend="gvisor")
    try:
        env.reset(seed=3)
        env.step(0)
        (branch,) = env.branch(1)
        mine, theirs = env.step(1), branch.step(1)
        assert (mine[0] == theirs[0]).all() and mine[1] == theirs[1]
        branch.close()
    finally:
        env.close()
        from sandbox_gym import _spares

        _spares.forget()
