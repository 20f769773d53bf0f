"""What a gVisor sandbox reaches: its gateway, in a network namespace of its own beside it, and nothing else."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from sandbox_gym.backends.egress import network
from sandbox_gym.backends.gvisor import wires
from sandbox_gym.errors import SnapshotError
from sandbox_gym.network import Allow
from sandbox_gym.sandbox import Sandbox, Snapshot

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="runsc restores sandboxes for root only")

_TRY = """
import socket, time
def attempt(host, port, family=socket.AF_INET):
    sock, begun = socket.socket(family), time.monotonic()
    sock.settimeout(10)
    try:
        sock.connect((host, port)); return 'connected'
    except OSError as error:
        return error.strerror if time.monotonic() - begun < 2 else 'late'
    finally: sock.close()
"""


@pytest.fixture
def open_box(pristine: Snapshot, echo: str, web: str) -> Iterator[Sandbox]:
    """It reaches `db:5432` and `web:80`."""
    with Sandbox.restore(pristine, network=Allow(services={"db:5432": echo, "web:80": web})) as box:
        box.run_code(_TRY)
        yield box


def curl(box: Sandbox, address: str) -> str:
    return box.shell(f"curl -sS --max-time 20 {address}").stdout


def test_services_by_proxy_and_straight(open_box: Sandbox) -> None:
    assert curl(open_box, "http://web/") == "GET web/"
    assert curl(open_box, "--noproxy '*' http://web/") == "GET web/"
    talk = (
        "c = socket.create_connection(('db', 5432), 10); c.recv(6), c.sendall(b'over'), c.recv(9), c.close()"
    )
    assert open_box.run_code(talk).value == "(b'hello\\n', None, b'over', None)"
    assert [(record.kind, record.host, record.verdict) for record in open_box.network_log()] == [
        ("http", "web", "allowed"),
        ("tcp", "web", "allowed"),
        ("tcp", "db", "allowed"),
    ]


@pytest.mark.parametrize(
    "target",
    [
        "'192.0.2.9', 80",
        "'127.0.0.1', 3128",
        "'10.0.0.1', 22",
        "'::1', 80, socket.AF_INET6",
        "'2001:db8::5', 80, socket.AF_INET6",
    ],
)
def test_other_addresses_are_refused_at_once(open_box: Sandbox, target: str) -> None:
    assert open_box.run_code(f"attempt({target})").value in (
        "'No route to host'",
        "'Network is unreachable'",
        "'Connection refused'",
    )


def test_no_raw_sockets(open_box: Sandbox) -> None:
    code = "try:\n  socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)\nexcept OSError as error: print(error.strerror)"
    assert open_box.run_code(code).stdout == "Operation not permitted\n"
    code = "try:\n  socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 3)\nexcept OSError as error: print('refused')"
    assert open_box.run_code(code).stdout == "refused\n"


def test_names_of_other_rules_and_none_at_all(open_box: Sandbox) -> None:
    look = "try:\n  print(socket.gethostbyname('elsewhere.test'))\nexcept OSError: print('unknown')"
    assert open_box.run_code(look).stdout == "unknown\n"
    assert [record.host for record in open_box.network_log()] == ["elsewhere.test"]
    (closed,) = open_box.fork(1, network=None)
    with closed:
        assert closed.run_code(look).stdout == "unknown\n"
        assert closed.shell("env | grep -ci proxy").stdout == "0\n"
        assert closed.shell("ls /sys/class/net; cat /proc/net/dev | grep -c eth").stdout.split()[-1] == "0"


def test_an_open_connection_is_in_a_snapshots_way(open_box: Sandbox) -> None:
    open_box.run_code("held = socket.create_connection(('db', 5432), 10)")
    with pytest.raises(SnapshotError, match=r"1 connection\(s\) to outside are open"):
        open_box.snapshot()
    assert (
        open_box.run_code("held.recv(6), held.sendall(b'on'), held.recv(9)").value
        == "(b'hello\\n', None, b'on')"
    )
    open_box.run_code("held.close()")
    for _ in range(200):  # until both ends know
        try:
            snapshot = open_box.snapshot()
            break
        except SnapshotError:
            open_box.run_code("time.sleep(0.01)")
    snapshot.delete()
    assert curl(open_box, "http://web/") == "GET web/"


def test_what_was_open_with_a_server_of_its_own_goes_on(open_box: Sandbox) -> None:
    code = "s = socket.create_server(('', 7001)); a = socket.create_connection(('127.0.0.1', 7001)); b, _ = s.accept()"
    assert open_box.run_code(code).ok
    (copy,) = open_box.fork(1, network=None)
    with copy:
        for box in (copy, open_box):
            assert box.run_code("a.sendall(b'x'), b.recv(1)").value == "(None, b'x')"


def test_an_address_of_version_6(pristine: Snapshot) -> None:
    """The rule's own address is the gateway's beside the sandbox."""
    served = "2001:db8::7"
    with Sandbox.restore(pristine, network=Allow([f"[{served}]:5432"])) as box:
        box.run_code(_TRY)
        assert box.run_code(f"attempt('{served}', 5432, socket.AF_INET6)").value == "'connected'"
        assert box.run_code("attempt('2001:db8::8', 5432, socket.AF_INET6)").value != "'connected'"


def test_wires_lead_to_each_other_alone() -> None:
    pair = wires.make(Allow(["example.org", "192.0.2.10:443"]))
    try:
        for fd in (pair.guest, pair.gateway):
            names = network.inside(fd, lambda: [name for _, name in socket.if_nameindex()])
            assert len(names) == 2 and "lo" in names
        listener = network.inside(pair.gateway, lambda: socket.create_server((wires.PLACE.address, 9)))
        assert pair.connections() == 0
        sock = network.inside(pair.guest, lambda: socket.create_connection((wires.PLACE.address, 9), 5))
        served, _ = listener.accept()
        assert pair.connections() >= 1
        for each in (sock, served, listener):
            each.close()
        with pytest.raises(OSError, match="unreachable"):
            network.inside(pair.guest, lambda: socket.create_connection(("192.0.2.11", 443), 5))
    finally:
        pair.close()
        pair.close()
