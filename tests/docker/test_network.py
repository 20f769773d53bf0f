"""Rules: what a container reaches and what not, whose rules copies have, and what becomes of open connections."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sandbox_gym.network import Allow
from sandbox_gym.sandbox import Sandbox, Snapshot
from tests.dockerd import Dockerd
from tests.network.conftest import curl, last, value

_CONNECT = "c = socket.create_connection(('db', 5432), timeout=5); c.recv(99)"
_TALK = """
try:
    c.settimeout(5); c.sendall(b'again'); got = c.recv(99)
except OSError as error:
    got = type(error).__name__
got
"""


@pytest.fixture
def opened(daemon: Dockerd, web: str, echo: str) -> Iterator[Sandbox]:
    allow = Allow(services={"one:80": web, "db:5432": echo})
    with Sandbox.create(backend="docker", network=allow, disk=None) as box:
        yield box


def test_what_is_allowed_and_what_not(opened: Sandbox, web: str) -> None:
    assert curl(opened, "http://one/") == "GET one/"
    assert last(opened).verdict == "allowed"
    assert "no rule" in curl(opened, "http://two/")
    assert last(opened).verdict == "denied"
    host, port = web.split(":")
    assert "Failed to connect" in curl(opened, f"--noproxy '*' http://{host}:{port}/")
    assert value(opened, _CONNECT) == "b'hello\\n'"


def test_closed_by_default(box: Sandbox, web: str) -> None:
    assert "resolve" in curl(box, "http://one/")
    assert not box.shell(f"curl -sS -m 5 http://{web}/").ok
    assert box.network_log() == []


def test_rules_of_copies(opened: Sandbox, web: str) -> None:
    curl(opened, "http://one/")
    snapshot = opened.snapshot()
    with (
        Sandbox.restore(snapshot) as same,
        Sandbox.restore(snapshot, network=None) as closed,
        Sandbox.restore(snapshot, network=Allow(services={"two:80": web})) as other,
    ):
        assert curl(same, "http://one/") == "GET one/"
        assert [record.host for record in same.network_log()] == ["one"]
        assert "resolve" in curl(closed, "http://one/") and closed.network_log() == []
        assert closed.shell("env | grep -i _proxy").stdout == ""
        assert curl(other, "http://two/") == "GET two/" and "no rule" in curl(other, "http://one/")
    with Sandbox.restore(closed_snapshot(opened), network=Allow(services={"one:80": web})) as again:
        assert curl(again, "http://one/") == "GET one/"


def closed_snapshot(opened: Sandbox) -> Snapshot:
    with opened.fork(1, network=None)[0] as closed:
        return closed.snapshot()


def test_open_connections_end_in_copies_and_go_on_here(opened: Sandbox) -> None:
    assert value(opened, _CONNECT) == "b'hello\\n'"
    with opened.fork(1)[0] as copy:
        assert value(copy, _TALK) in ("b''", "'ConnectionResetError'", "'ConnectionAbortedError'")
        assert value(copy, _CONNECT) == "b'hello\\n'"
    assert value(opened, _TALK) == "b'again'"


def test_a_log_goes_on_over_a_rewind(opened: Sandbox) -> None:
    opened.checkpoint("first")
    curl(opened, "http://one/")
    opened.rewind("first")
    curl(opened, "http://two/")
    assert [record.host for record in opened.network_log()] == ["one", "two"]
