"""What a hostile guest or a bad moment can do: floods, silence, the proxy killed, the sandbox killed."""

# ruff: noqa: E501  (programs for the guest are text)
from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox_gym.backends import lookup
from sandbox_gym.backends.egress import conversation, proxy
from sandbox_gym.backends.shared import protocol
from sandbox_gym.errors import SandboxDied
from sandbox_gym.network import Allow
from sandbox_gym.sandbox import Sandbox, Snapshot
from tests.conftest import descendants
from tests.network.conftest import Opened, curl, do, last, value
from tests.sandbox.test_faults import supervisor_of


def until(condition: Callable[[], object], patience: float = 10.0) -> None:
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def supervisor() -> int:
    backend: Any = lookup.get("native")
    return supervisor_of(backend._process.pid)


def proxies() -> list[int]:
    """Its children that run with nobody's rights, in its own pid namespace, outside of any sandbox."""
    found = []
    for pid in descendants(supervisor()):
        try:
            status = dict(
                line.split(":\t", 1)
                for line in Path(f"/proc/{pid}/status").read_text().splitlines()
                if ":\t" in line
            )
            session = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[3]
        except OSError:
            continue
        # NSpid: two levels below ours is the supervisor's namespace; a guest has one more.
        alone = (
            len(status["NSpid"].split()) == 2 and int(session) == pid and status["PPid"] == str(supervisor())
        )
        if (
            alone
            and status["CapEff"].strip("0") == ""
            and "Z" not in status["State"]
            and status["NoNewPrivs"] == "1"
        ):
            found.append(pid)
    return found


def sockets_inside(pid: int) -> int:
    return sum(link.startswith("socket:") for link in links(pid))


def links(pid: int) -> list[str]:
    found = []
    for entry in os.listdir(f"/proc/{pid}/fd"):
        try:
            found.append(os.readlink(f"/proc/{pid}/fd/{entry}"))
        except OSError:
            continue
    return found


def test_the_proxy_has_no_rights(opened: Opened, web: str) -> None:
    box = opened(services={"one:80": web})
    assert curl(box, "http://one/") == "GET one/"
    (pid,) = proxies()
    status = Path(f"/proc/{pid}/status").read_text()
    if os.geteuid() == 0:
        assert "Uid:\t65534\t65534\t65534\t65534" in status and "Groups:\t \n" in status
    assert os.readlink(f"/proc/{pid}/ns/net") == os.readlink("/proc/self/ns/net")
    inside = value(
        box, "import os; sorted(os.listdir('/proc/self/fd')), [p for p in os.listdir('/proc') if p.isdigit()]"
    )
    assert inside.endswith("['1'])")  # no process more in the sandbox


def test_a_flood_of_connections(opened: Opened, echo: str) -> None:
    """They wait, and others are not held up."""
    flooder, other = opened(services={"db:5432": echo}), opened(services={"db:5432": echo})
    flood = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))\nheld = []\n"
        "for i in range(300):\n    s = socket.socket(); s.setblocking(False); s.connect_ex(('127.0.0.1', 3128)); held.append(s)\nlen(held)"
    )
    assert value(flooder, flood) == "300"
    until(lambda: any("connections are open" in record.reason for record in flooder.network_log()))
    assert value(other, "s = socket.create_connection(('db', 5432), timeout=5); s.recv(9)") == "b'hello\\n'"
    (pid,) = proxies()
    assert sockets_inside(pid) < 200
    value(flooder, "[s.close() for s in held]")
    until(lambda: sockets_inside(pid) < 40)
    assert value(flooder, "s = socket.create_connection(('db', 5432), timeout=9); s.recv(9)") == "b'hello\\n'"


def test_floods_of_bytes_and_queries_are_bounded(opened: Opened, echo: str) -> None:
    box = opened(services={"db:5432": echo})
    (pid,) = proxies()

    def memory() -> int:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096

    before = memory()
    flood = (  # never read: the echo's answers have nowhere to go
        "held = []\nfor i in range(20):\n    s = socket.create_connection(('db', 5432), timeout=5); s.setblocking(False); held.append(s)\n"
        "for s in held:\n    try:\n        while True: s.send(bytes(65536))\n    except BlockingIOError: pass\n"
        "u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\nfor i in range(20000): u.sendto(bytes(500), ('127.0.0.1', 53))\n1"
    )
    assert value(box, flood) == "1"
    assert value(box, "ask('db')") == "(0, 1)"
    assert memory() - before < 64 << 20


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, echo: str) -> Iterator[Any]:
    """The address of a proxy in this process, with shorter times than sandboxes have, that lets through to `echo`."""
    monkeypatch.setattr(conversation, "_BEGINNING", 0.2)
    monkeypatch.setattr(conversation, "_LEFT", 0.2)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.setblocking(False)
    thread = threading.Thread(target=asyncio.run, args=(proxy._run(theirs),))
    thread.start()
    with socket.create_server(("127.0.0.1", 0)) as listener, ours, theirs:
        allow = Allow(services={"a.org:80": echo}).to_json()
        order = {"op": "open", "key": 1, "allow": allow, "listeners": [["proxy", -1, 3128]]}
        protocol.send(ours, order, [listener.fileno()])
        yield listener.getsockname()
        ours.shutdown(socket.SHUT_RDWR)
        thread.join(timeout=10)
        assert not thread.is_alive()


def test_who_never_says_where_to_is_cut_off(served: Any) -> None:
    with socket.create_connection(served, timeout=10) as silent:
        silent.sendall(b"GET http://a.org/ HT")
        assert silent.recv(9) == b""


def test_a_server_that_keeps_a_connection_that_nobody_needs(served: Any) -> None:
    """The echo sends the request back, and would wait for ever for another."""
    with socket.create_connection(served, timeout=10) as sock:
        sock.sendall(b"GET http://a.org/ HTTP/1.1\r\nHost: a.org\r\n\r\n")
        answer = b""
        while not answer.endswith(b"close\r\n\r\n"):
            answer += sock.recv(999)
        sock.shutdown(socket.SHUT_WR)
        assert sock.recv(9) == b""


def test_the_proxy_is_killed(opened: Opened, web: str, echo: str) -> None:
    box = opened(services={"one:80": web, "db:5432": echo})
    value(box, "c = socket.create_connection(('db', 5432), timeout=5); c.recv(9)")
    (pid,) = proxies()
    os.kill(pid, signal.SIGKILL)
    assert (
        value(box, "c.settimeout(5)\ntry:\n    r = c.recv(9)\nexcept ConnectionError:\n    r = b''\nr")
        == "b''"
    )
    assert curl(box, "http://one/") == "GET one/"  # another serves, by the same sockets
    until(lambda: len(proxies()) == 1 and proxies() != [pid])
    assert last(box).host == "one"
    with box.fork(1)[0] as copy:
        assert curl(copy, "http://one/") == "GET one/"


def test_a_sandbox_is_killed(pristine: Snapshot, echo: str) -> None:
    with Sandbox.restore(pristine, network=Allow(services={"db:5432": echo})) as other:
        assert other.network_log() == []  # the proxy has heard of it
        (pid,) = proxies()

        def listening() -> int:
            """Sockets that supervisor and proxy have both: the proxy's, the name server's, and one for the rule."""
            return sum(link.startswith("socket:") for link in set(links(pid)) & set(links(supervisor())))

        until(lambda: listening() == 3)
        mine = len(links(pid))
        box = Sandbox.restore(pristine, network=Allow(services={"db:5432": echo}))
        do(box, "held = [socket.create_connection(('db', 5432), timeout=5) for _ in range(20)]")
        until(lambda: listening() == 6 and len(links(pid)) >= mine + 40)
        box.terminate()
        with pytest.raises(SandboxDied):
            box.network_log()
        until(lambda: listening() == 3 and len(links(pid)) <= mine)  # less, where others were still ending


def test_the_proxy_is_killed_again_and_again(client: Callable[..., Any], web: str) -> None:
    """Then the sandbox is closed, and new rules are an error that says why."""
    code = (
        "import signal\nfrom tests.network.test_harm import proxies, until\nfrom sandbox_gym import Allow, BackendUnavailable\n"
        f"allow = Allow(services={{'one:80': {web!r}}})\n"
        "box, killed = Sandbox.create(network=allow), set()\n"
        "def kill():\n    found = set(proxies()) - killed\n    for pid in found:\n        os.kill(pid, signal.SIGKILL)\n"
        "    killed.update(found)\n    return found\n"
        "for _ in range(5):\n    until(kill)\n"
        "until(lambda: not box.run_code('import socket; socket.create_connection((\"127.0.0.1\", 3128), timeout=5).close()').ok)\n"
        "try:\n    Sandbox.create(network=allow)\nexcept BackendUnavailable as error:\n    print(error)\n"
        "print(Sandbox.create().run_code('1').value)"
    )
    out, err = client(code).communicate(timeout=60)
    assert "has ended 5 times in 10 s" in out and out.splitlines()[-1] == "1", err


def test_nothing_stays(client: Callable[..., Any], traces_of: Any, web: str) -> None:
    """The client is killed while all is in use."""
    code = (
        "from sandbox_gym import Allow\nfrom sandbox_gym.backends import lookup\n"
        f"box = Sandbox.create(network=Allow(services={{'one:80': {web!r}}}))\n"
        "assert box.shell('curl -sS http://one/').stdout == 'GET one/'\n"
        "box.run_code('import socket; c = socket.create_connection((\"one\", 80))')\n"
        "print(lookup.get('native')._folder, flush=True)\ninput()"
    )
    process = client(code)
    folder = Path(process.stdout.readline().strip())
    traces = traces_of(process.pid, folder)
    assert len(traces.processes) > 3
    process.kill()
    traces.assert_gone()
