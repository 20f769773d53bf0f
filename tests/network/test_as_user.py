"""The whole path as an ordinary user: the proxy, straight connections and names, a copy, and what only criu could."""

# ruff: noqa: E501  (programs are text)
from __future__ import annotations

from collections.abc import Callable

from tests.sandbox.test_unprivileged import as_user

__all__ = ["as_user"]

_CODE = """
import http.server, threading
from sandbox_gym import Allow, SnapshotError
class Pages(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'GET ' + self.path.encode())
    def log_message(self, *args):
        pass
server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Pages)
threading.Thread(target=server.serve_forever, daemon=True).start()
allow = Allow(['192.0.2.9:9'], services={'api:80': f'127.0.0.1:{server.server_address[1]}'})
get = "import urllib.request as u\\nu.urlopen('http://api/x', timeout=5).read().decode()"
straight = "import socket\\ns = socket.create_connection(('api', 80), timeout=5)\\ns.sendall(b'GET /y HTTP/1.0\\\\r\\\\nHost: api\\\\r\\\\n\\\\r\\\\n')\\ns.recv(999)[:12]"
with Sandbox.create(network=allow) as box:
    print(box.run_code(get).value)
    print(box.run_code(straight).value)
    print(box.run_code("u.urlopen('http://denied.test/')").error.message)
    try:
        box.snapshot()
    except SnapshotError as error:
        print('socket' in str(error))
    box.run_code('s.close()')
    copy, = box.fork(1)
    closed, = box.fork(1, network=None)
    print(copy.run_code(get).value, closed.run_code(get).error is None)
    copy.terminate(); closed.terminate()
    print([(r.kind, r.host, r.verdict) for r in box.network_log()])
"""


def test_an_ordinary_user(as_user: Callable[[str], str]) -> None:
    assert as_user(_CODE).splitlines() == [
        "'GET /x'",
        "b'HTTP/1.0 200'",
        "HTTP Error 403: Refused",
        "True",
        "'GET /x' False",
        "[('http', 'api', 'allowed'), ('tcp', 'api', 'allowed'), ('http', 'denied.test', 'denied')]",
    ]
