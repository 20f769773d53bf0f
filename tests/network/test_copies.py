"""Copies: whose rules they have, what becomes of connections that were open, and of the listening sockets."""

# ruff: noqa: E501  (programs for the guest are text)
from __future__ import annotations

import os

import gymnasium as gym
import pytest

import sandbox_gym
from sandbox_gym.errors import SnapshotError
from sandbox_gym.network import Allow
from sandbox_gym.sandbox import Sandbox
from tests.network.conftest import Opened, curl, do, last, value

_CONNECT = "c = socket.create_connection(('db', 5432), timeout=5); c.recv(99)"
_TALK = """
try:
    c.settimeout(5); c.sendall(b'again'); got = c.recv(99)
except OSError as error:
    got = type(error).__name__
got
"""


def connected(opened: Opened, echo: str) -> Sandbox:
    box = opened(services={"db:5432": echo})
    assert value(box, _CONNECT) == "b'hello\\n'"
    return box


@pytest.fixture
def as_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("criu is root's")


def test_rules_by_default_and_of_its_own(opened: Opened, web: str) -> None:
    box = opened(services={"one:80": web})
    same, closed, other = (
        box.fork(1)[0],
        box.fork(1, network=None)[0],
        box.fork(1, network=Allow(services={"two:80": web}))[0],
    )
    try:
        assert curl(box, "http://one/") == curl(same, "http://one/") == "GET one/"
        assert "resolve" in curl(closed, "http://one/") and closed.network_log() == []
        assert closed.shell("env | grep -i _proxy").stdout == ""
        assert curl(other, "http://two/") == "GET two/" and "no rule" in curl(other, "http://one/")
        assert [record.host for record in same.network_log()] == ["one"]
        # And what comes from those has theirs.
        with same.fork(1)[0] as grandchild:
            assert curl(grandchild, "http://one/") == "GET one/"
        snapshot = closed.snapshot()
        with (
            Sandbox.restore(snapshot) as still,
            Sandbox.restore(snapshot, network=Allow(services={"one:80": web})) as again,
        ):
            assert "resolve" in curl(still, "http://one/")
            assert curl(again, "http://one/") == "GET one/"
            assert "127.0.0.1:3128" in value(again, "import os; os.environ['HTTPS_PROXY']")
        snapshot.delete()
    finally:
        for sandbox in (same, closed, other):
            sandbox.terminate()


def test_the_source_goes_on_with_its_records(opened: Opened, web: str) -> None:
    box = opened(services={"one:80": web})
    curl(box, "http://one/1")
    assert box.checkpoint().engine == "fork"
    curl(box, "http://one/2")
    box.rewind()
    curl(box, "http://one/3")
    assert len(box.network_log()) == 3


def test_an_open_connection_by_criu(opened: Opened, echo: str, as_root: None) -> None:
    box = connected(opened, echo)
    with pytest.raises(SnapshotError, match="socket"):
        box.snapshot(engine="fork")
    snapshot = box.snapshot()
    assert snapshot.engine == "criu"
    assert value(box, _TALK) == "b'again'"  # the source's goes on
    with Sandbox.restore(snapshot) as copy, Sandbox.restore(snapshot, network=None) as closed:
        for sandbox in (copy, closed):
            assert value(sandbox, _TALK) in (
                "'ConnectionResetError'",
                "'ConnectionAbortedError'",
                "'BrokenPipeError'",
            )
        do(copy, _CONNECT + "; c.close()")
        assert last(copy).host == "db"
        assert closed.run_code("socket.create_connection(('db', 5432), timeout=5)").error is not None
    assert value(box, _TALK) == "b'again'"
    box.run_code("c.close()")
    after = box.snapshot()
    assert after.engine == "fork"  # nothing of the proxy's is the guest's
    after.delete()
    snapshot.delete()


def test_a_process_that_waits_for_a_connection(opened: Opened, echo: str, as_root: None) -> None:
    """In the copy it hears of the end at once, and may connect again at once."""
    box = opened(services={"db:5432": echo})
    program = (  # what ends a connection, once it is there, ends no other
        "import socket\nfor n in range(9):\n    s = socket.create_connection(('db', 5432), timeout=60)\n"
        "    print(n, s.recv(99), flush=True)\n    try:\n        s.recv(99)\n    except OSError as e:\n        pass\n"
    )
    process = box.start(["python3", "-c", program])
    assert process.read_text(timeout=10) == "0 b'hello\\n'\n"
    snapshot = box.snapshot()
    with Sandbox.restore(snapshot) as copy:
        assert copy.process(process.id).read_text(timeout=10) == "1 b'hello\\n'\n"
    assert process.poll() is None
    snapshot.delete()


def test_a_server_inside_and_a_connection_outside(opened: Opened, echo: str, as_root: None) -> None:
    """Connections within the sandbox go on in the copy, also one that its other end has left; those to outside don't."""
    box = connected(opened, echo)
    do(
        box,
        "server = socket.create_server(('127.0.0.1', 7000))\n"
        "near = socket.create_connection(('127.0.0.1', 7000)); far, _ = server.accept()\n"
        "left = socket.create_connection(('127.0.0.1', 7000)); end, _ = server.accept(); end.sendall(b'bye'); end.close()",
    )
    snapshot = box.snapshot()
    with Sandbox.restore(snapshot) as copy:
        assert value(copy, "near.sendall(b'x'); far.recv(9)") == "b'x'"
        assert value(copy, "left.recv(9), left.recv(9)") == "(b'bye', b'')"
        assert "Error" in value(copy, _TALK)
    snapshot.delete()


def test_archives_open_nothing(opened: Opened, web: str, echo: str, as_root: None, tmp_path: object) -> None:
    box = opened(services={"one:80": web, "db:5432": echo})
    do(box, _CONNECT)
    snapshot = box.snapshot(engine="criu")
    snapshot.save(f"{tmp_path}/x.sbx")
    loaded = sandbox_gym.Snapshot.load(f"{tmp_path}/x.sbx")
    with (
        Sandbox.restore(loaded) as copy,
        Sandbox.restore(loaded, network=Allow(services={"one:80": web})) as again,
    ):
        assert copy.run_code("import socket; socket.getaddrinfo('one', 80)").error is not None
        assert copy.network_log() == []
        assert curl(again, "http://one/") == "GET one/"
        for sandbox in (copy, again):
            assert "Error" in value(sandbox, _TALK)
    loaded.delete()
    snapshot.delete()


def test_environments(web: str) -> None:
    env = gym.make(
        "Sandbox-v0", network=Allow(services={"one:80": web}), language="shell", disable_env_checker=True
    )
    try:
        env.reset(seed=0)
        observation, *_ = env.step("curl -sS http://one/")
        assert "GET one/" in observation
        (child,) = env.unwrapped.branch(1)  # type: ignore[attr-defined]
        try:
            assert "GET one/" in child.step("curl -sS http://one/")[0]
        finally:
            child.close()
    finally:
        env.close()


def test_what_is_no_rule() -> None:
    for bad in ("example.org", ["example.org"], True):
        with pytest.raises(ValueError, match="Allow"):
            Sandbox.create(network=bad)  # type: ignore[arg-type]
