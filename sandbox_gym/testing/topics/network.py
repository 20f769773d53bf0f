"""What a sandbox reaches: nothing, or what its rules name. All servers are on this machine's loopback."""

from __future__ import annotations

import contextlib
import socket

from sandbox_gym.network import Allow, NetworkRecord
from sandbox_gym.sandbox import Sandbox
from sandbox_gym.testing.subject import Subject, check, expect, until, value

_WORDS = """
import socket, urllib.request, urllib.error
def get(url):
    try:
        return urllib.request.urlopen(url, timeout=20).read().decode()
    except urllib.error.HTTPError as error:
        return f'{error.code}'
    except OSError as error:
        return f'failed: {error}'
def connect(host, port):
    try:
        with socket.create_connection((host, port), timeout=20) as s:
            return s.recv(99)
    except OSError as error:
        return None
def known(name):
    try:
        return bool(socket.getaddrinfo(name, 80))
    except OSError:
        return False
"""


def ask(box: Sandbox, expression: str) -> str | None:
    return value(box, f"{_WORDS}{expression}")


def _denied(box: Sandbox, host: str, *kinds: str) -> None:
    """That it is in the log as refused."""

    def found() -> list[NetworkRecord]:
        log = box.network_log()
        return [r for r in log if r.host == host and r.verdict == "denied" and (not kinds or r.kind in kinds)]

    until(found, f"{host} is in the log, as denied: {box.network_log()}", 10.0)


@check("network")
def closed_by_default(subject: Subject) -> None:
    """Without rules neither this host nor another is reached, and no name is known."""
    address = subject.echo()
    host, port = address.split(":")
    box = subject.create()
    (copy,) = subject.fork(box)
    addresses = {host, "127.0.0.2", "192.0.2.1"}
    with contextlib.suppress(OSError):
        addresses |= {
            str(row[4][0]) for row in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)
        }
    for sandbox in (box, copy):
        reached = ask(sandbox, f"[a for a in {sorted(addresses)} if connect(a, {port}) is not None]")
        expect(reached, "[]", "addresses that were reached")
        expect(
            ask(sandbox, "known('example.org'), known('localhost')"), "(False, True)", "names that are known"
        )
        expect(sandbox.network_log(), [], "the log")


@check("network")
def loopback_is_its_own(subject: Subject) -> None:
    """A server inside is reached from inside, and from nowhere else."""
    box, other = subject.create(), subject.create()
    value(box, "import socket; server = socket.create_server(('127.0.0.1', 7078)); server.listen()")
    code = "c = socket.create_connection(('127.0.0.1', 7078), timeout=20); far, _ = server.accept()"
    code += "; c.sendall(b'x'); far.recv(9)"
    expect(value(box, code), "b'x'", "from inside")
    expect(ask(other, "connect('127.0.0.1', 7078)"), None, "from another sandbox")
    with socket.socket() as sock:
        assert sock.connect_ex(("127.0.0.1", 7078)) != 0, "it is reached from the host"


@check("network")
def allowed_web_server(subject: Subject) -> None:
    """A service that a rule names answers HTTP; the log says so."""
    box = subject.create(network=Allow(services={"api:80": subject.web()}))
    expect(ask(box, "get('http://api/hello')"), "'GET api/hello'", "the answer")
    (record,) = [r for r in box.network_log() if r.kind != "dns"]
    expect((record.host, record.port, record.verdict), ("api", 80, "allowed"), "the log")


@check("network")
def denied_web_servers(subject: Subject) -> None:
    """Another name, a raw address, another port and a redirect to another host are refused and logged."""
    web = subject.web()
    box = subject.create(network=Allow(services={"api:80": web}))
    # Else the client would not ask for the raw address by its proxy.
    value(box, "import os\nfor name in ('no_proxy', 'NO_PROXY'): os.environ.pop(name, None)")
    for url, host in (
        ("http://denied.test/", "denied.test"),
        (f"http://{web}/", "127.0.0.1"),
        ("http://192.0.2.7/", "192.0.2.7"),
        ("http://[2001:db8::7]/", "2001:db8::7"),
        ("http://api:81/", "api"),
        ("http://api/away", "elsewhere.test"),
    ):
        answer = ask(box, f"get({url!r})")
        assert answer and "GET" not in answer, f"{url}: {answer}"
        _denied(box, host)
    expect(ask(box, "get('http://api/hello')"), "'GET api/hello'", "what is allowed")


@check("network")
def names_stay_inside(subject: Subject) -> None:
    """Names that no rule covers are not known, and each look-up is logged: none leaves."""
    box = subject.create(network=Allow(["*.allowed.test"], services={"api:80": subject.web()}))
    expect(
        ask(box, "known('c2VjcmV0.denied.test'), known('api'), known('a.allowed.test')"),
        "(False, True, True)",
        "known",
    )
    _denied(box, "c2VjcmV0.denied.test", "dns")


@check("network")
def raw_connections(subject: Subject) -> None:
    """A service with a port of its own takes any bytes, and other ports of its name take none."""
    echo = subject.echo()
    box = subject.create(network=Allow(services={"db:5432": echo}))
    expect(ask(box, "connect('db', 5432)"), "b'hello\\n'", "its greeting")
    expect(ask(box, "connect('db', 5433)"), None, "another port")
    record = next(r for r in box.network_log() if r.port == 5432)
    expect((record.host, record.verdict), ("db", "allowed"), "the log")


@check("network")
def rules_of_copies(subject: Subject) -> None:
    """Copies have their origin's rules, or none, or others, and so have their copies."""
    web = subject.web()
    box = subject.create(network=Allow(services={"one:80": web}))
    snapshot = subject.snapshot(box)
    same, closed = subject.restore(snapshot), subject.restore(snapshot, network=None)
    other = subject.restore(snapshot, network=Allow(services={"two:80": web}))
    look = "'GET' in get('http://one/'), 'GET' in get('http://two/')"
    for sandbox, wanted in (
        (box, "(True, False)"),
        (same, "(True, False)"),
        (closed, "(False, False)"),
        (other, "(False, True)"),
        (subject.fork(other)[0], "(False, True)"),
    ):
        expect(ask(sandbox, look), wanted, "whether 'one' and 'two' are reached")
    expect(closed.network_log(), [], "the log where it is closed")


@check("network")
def connections_end_in_copies(subject: Subject) -> None:
    """An open connection to outside has ended in copies, where a new one can be made; it goes on in the source."""
    box = subject.create(network=Allow(services={"db:5432": subject.echo()}))
    expect(
        ask(box, "s = socket.create_connection(('db', 5432), timeout=20)\ns.recv(99)"),
        "b'hello\\n'",
        "its greeting",
    )
    (copy,) = subject.fork(box)
    talk = (
        "\ntry:\n    s.sendall(b'again')\n    got = s.recv(99)\nexcept ConnectionError:\n    got = b''\ngot"
    )
    expect(ask(box, talk), "b'again'", "what the source hears")
    expect(ask(copy, talk), "b''", "what the copy hears")
    expect(ask(copy, "connect('db', 5432)"), "b'hello\\n'", "a new one's greeting")
    expect(ask(box, talk), "b'again'", "what the source hears then")
