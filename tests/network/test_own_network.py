"""Names and addresses that are public, in a network namespace of the test's own that holds them all: no packet leaves.

The client there is its own machine in this: its resolver knows what its /etc/hosts says, and nobody else can be asked.
"""

# ruff: noqa: E501  (programs are text)
from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import sandbox_gym

_HOSTS = """127.0.0.1 localhost
9.9.9.7 web.test www.wild.test front.test
10.9.9.9 inside.test
9.9.9.7 mixed.test
10.9.9.9 mixed.test
169.254.169.254 meta.test
"""
_CLIENT = """
import ipaddress, os, socket, ssl, sys, threading
sys.path.insert(0, {root!r})
from sandbox_gym import Allow, Sandbox
from sandbox_gym.backends.egress import network
from sandbox_gym.guest import syscalls
from tests.network.conftest import _Pages, _Server, RAW

assert os.listdir('/sys/class/net') or True
syscalls.loopback_up()
for address in ('9.9.9.7', '10.9.9.9', '169.254.169.254', '2600::7'):
    network.add_address(address)
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain({certificate!r})
class Six(_Server):
    address_family = socket.AF_INET6
for kind, address, port in ((_Server, '9.9.9.7', 80), (_Server, '9.9.9.7', 443), (_Server, '9.9.9.7', 9000), (_Server, '10.9.9.9', 80),
                            (_Server, '169.254.169.254', 80), (Six, '2600::7', 9000)):
    server = kind((address, port), _Pages)
    if port == 443:
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    threading.Thread(target=server.serve_forever, daemon=True).start()

allow = Allow(['web.test', '*.wild.test', 'front.test:9000', 'inside.test', 'mixed.test', 'meta.test', '9.9.9.7:9000', '[2600::7]:9000',
               '10.9.9.9:80', 'unknown.test'])
found = {{}}
with Sandbox.create(network=allow) as box:
    def see(name, command):
        done = box.shell('curl -sSk -m 10 ' + command, timeout=20)
        found[name] = (done.stdout + done.stderr).strip()
    def run(name, code):
        done = box.run_code(RAW + code)
        found[name] = done.value if done.ok else str(done.error)
    for way in ('', '--noproxy "*" '):
        see(way + 'http', way + 'http://web.test/a')
        see(way + 'https', way + 'https://web.test/b')
        see(way + 'wild', way + 'http://www.wild.test/c')
        see(way + 'wild tls', way + 'https://www.wild.test/d')
        see(way + 'port', way + 'http://front.test:9000/e')
        see(way + 'address', way + 'http://9.9.9.7:9000/f')
        see(way + 'six', way + 'http://[2600::7]:9000/g')
        see(way + 'private by its address', way + 'http://10.9.9.9/h')
        for name in ('inside', 'meta', 'unknown'):
            see(way + name, way + f'http://{{name}}.test/')
        see(way + 'mixed', way + 'http://mixed.test/i')
        see(way + 'other port of a name', way + 'http://web.test:9000/')
        see(way + 'other port of an address', way + 'http://9.9.9.7:80/')
        see(way + 'fronted host', way + '-H "Host: front.test" http://web.test/')
    run('no tls', "tunnel('web.test:443', b'plain text')")
    run('no tls, straight', "talk(('web.test', 443), b'GET / HTTP/1.1\\\\r\\\\nHost: web.test\\\\r\\\\n\\\\r\\\\n')")
    run('no name', "tunnel('web.test:443', hello(None))")
    run('tunnel to 80', "tunnel('web.test:80', b'GET /t HTTP/1.1\\\\r\\\\nHost: web.test\\\\r\\\\n\\\\r\\\\n').split()[-1]")
    run('tunnel to 80, fronted', "tunnel('web.test:80', b'GET /t HTTP/1.1\\\\r\\\\nHost: front.test\\\\r\\\\n\\\\r\\\\n')")
    found['log'] = [(r.kind, r.host, r.port, r.verdict, r.reason) for r in box.network_log()]
print(found)
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, certificate: Path) -> dict[str, Any]:
    if os.geteuid() != 0:
        pytest.skip("a network namespace of one's own with addresses is root's")
    hosts = tmp_path_factory.mktemp("net") / "hosts"
    hosts.write_text(_HOSTS)
    root = str(Path(sandbox_gym.__file__).parent.parent)
    code = _CLIENT.format(root=root, certificate=str(certificate))
    script = 'mount --bind "$1" /etc/hosts && mount -t tmpfs none /run && exec "$2" -c "$3"'
    result = subprocess.run(
        ["unshare", "-n", "-m", "sh", "-c", script, "sh", str(hosts), sys.executable, code],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    made = ast.literal_eval(result.stdout)
    assert isinstance(made, dict)
    return made


@pytest.mark.parametrize("way", ["", '--noproxy "*" '])
def test_what_is_allowed(found: dict[str, Any], way: str) -> None:
    assert found[way + "http"] == "GET web.test/a"
    assert found[way + "https"] == "GET web.test/b"
    assert found[way + "wild"] == "GET www.wild.test/c"
    assert found[way + "wild tls"] == "GET www.wild.test/d"
    assert found[way + "port"] == "GET front.test:9000/e"
    assert found[way + "address"] == "GET 9.9.9.7:9000/f"
    assert found[way + "six"] == "GET [2600::7]:9000/g"
    assert found[way + "private by its address"] == "GET 10.9.9.9/h"
    assert found[way + "mixed"] == "GET mixed.test/i"


@pytest.mark.parametrize("way", ["", '--noproxy "*" '])
def test_names_that_lead_to_private_addresses(found: dict[str, Any], way: str) -> None:
    assert "inside.test resolves to 10.9.9.9, which is no public address" in found[way + "inside"]
    assert "meta.test resolves to 169.254.169.254, which is no public address" in found[way + "meta"]
    assert (
        "http",
        "meta.test",
        80,
        "denied",
        "meta.test resolves to 169.254.169.254, which is no public address",
    ) in found["log"]


@pytest.mark.parametrize("way", ["", '--noproxy "*" '])
def test_what_is_refused(found: dict[str, Any], way: str) -> None:
    assert "could not be looked up" in found[way + "unknown"]
    for name in ("other port of a name", "other port of an address"):
        assert (
            "no rule allows" in found[way + name]
            or "Failed to connect" in found[way + name]
            or "Couldn't connect" in found[way + name]
        )
    assert "the Host field names another: front.test:80" in found[way + "fronted host"]


def test_ports_of_the_web_carry_nothing_else(found: dict[str, Any]) -> None:
    assert found["no tls"] == "b''"
    assert "GET" not in found["no tls, straight"]
    assert found["no name"] == "b''"
    assert found["tunnel to 80"] == "b'web.test/t'"
    assert "front.test/t" not in found["tunnel to 80, fronted"]
    reasons = [reason for *_, verdict, reason in found["log"] if verdict == "denied"]
    assert "no TLS on port 443" in reasons and "TLS names another server: none" in reasons
