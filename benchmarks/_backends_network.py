"""Egress: how fast an allowed host is, and that whatever is not allowed is refused and recorded."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator

from benchmarks._report import Row
from sandbox_gym.network import Allow
from sandbox_gym.sandbox import Sandbox

MEGABYTES = 128
_BAR, _OF_FLOOR = (
    0.5,
    0.75,
)  # of direct throughput; of what the least relay in between passes, where that is less
# A process of its own: in this one it would share the interpreter's lock with whatever is measured.
SERVER = """
import http.server, sys
block = bytes(1 << 20)
class Pages(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        away = self.path == '/away'
        self.send_response(302 if away else 200)
        if away:
            self.send_header('Location', 'http://elsewhere.test/')
        size = int(self.path[1:] or 0) if self.path[1:].isdigit() else 0
        self.send_header('Content-Length', str(size << 20))
        self.end_headers()
        for _ in range(size):
            self.wfile.write(block)
    def log_message(self, *args):
        pass
server = http.server.ThreadingHTTPServer((sys.argv[1], 0), Pages)
print(server.server_port, flush=True)
server.serve_forever()
"""
# The same on the host and in a sandbox: bytes a second of a body, straight from the socket.
CLIENT = """
import os, socket, sys, time, urllib.parse
proxy, host, port, megabytes = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
peer, url = (host, port), f'/{megabytes}'
if proxy == 'proxy':
    way = urllib.parse.urlsplit(os.environ['http_proxy'])
    peer, url = (way.hostname, way.port), f'http://{host}{url}'
buffer = bytearray(1 << 20)
with socket.create_connection(peer, timeout=30) as sock:
    start = time.perf_counter()
    sock.sendall(f'GET {url} HTTP/1.1\\r\\nHost: {host}\\r\\nConnection: close\\r\\n\\r\\n'.encode())
    count = 0
    while got := sock.recv_into(buffer):
        count += got
    took = time.perf_counter() - start
assert count > megabytes << 20, (count, bytes(buffer[:300]))
print(count / took)
"""
_WORDS = """
import os, socket, urllib.parse, urllib.request
for name in ('no_proxy', 'NO_PROXY'):
    os.environ.pop(name, None)
def get(url):
    try:
        return urllib.request.urlopen(url, timeout=10).status
    except OSError:
        return None
def connect(host, port):
    try:
        socket.create_connection((host, port), timeout=10).close()
        return True
    except OSError:
        return None
def tunnel(to):
    way = urllib.parse.urlsplit(os.environ['http_proxy'])
    with socket.create_connection((way.hostname, way.port), timeout=10) as sock:
        sock.sendall(f'CONNECT {to} HTTP/1.1\\r\\nHost: {to}\\r\\n\\r\\n'.encode())
        return True if b' 200 ' in sock.recv(4096) else None
def look_up(name):
    try:
        return bool(socket.getaddrinfo(name, 80))
    except OSError:
        return None
"""


@contextlib.contextmanager
def _server() -> Iterator[int]:
    """The port, on loopback, of a web server."""
    process = subprocess.Popen([sys.executable, "-c", SERVER, "127.0.0.1"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


RELAY = """
import fcntl, os, socket, sys, threading
def pump(source, target):
    out, into = os.pipe()
    fcntl.fcntl(into, fcntl.F_SETPIPE_SZ, 1 << 20)
    while count := os.splice(source.fileno(), into, 1 << 20):
        while count:
            count -= os.splice(out, target.fileno(), count)
    os.close(out), os.close(into)
    target.shutdown(socket.SHUT_WR)
listener = socket.create_server(('127.0.0.1', 0))
print(listener.getsockname()[1], flush=True)
while True:
    near, _ = listener.accept()
    far = socket.create_connection(('127.0.0.1', int(sys.argv[1])))
    threading.Thread(target=pump, args=(near, far), daemon=True).start()
    pump(far, near)
"""


@contextlib.contextmanager
def _relay(port: int) -> Iterator[int]:
    """The least that can stand in between: blocking calls of splice(2), and nothing that looks at anything."""
    command = [sys.executable, "-c", RELAY, str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()


def run(backend: str, quick: bool, bare: Callable[[], float] | None = None) -> list[Row]:
    """`bare`: bytes a second that its like reaches with nothing in between, where that is not what the host's own
    programs reach.
    """
    with _server() as port:
        rules = Allow(services={"api:80": f"127.0.0.1:{port}", "api": f"127.0.0.1:{port}"})
        with Sandbox.create(backend=backend, network=rules, cpus=None) as box:
            return [*_throughput(backend, box, port, quick, bare), _refusals(backend, box)]


def _throughput(
    backend: str, box: Sandbox, port: int, quick: bool, bare: Callable[[], float] | None
) -> list[Row]:
    megabytes, rounds = (MEGABYTES, 4) if quick else (4 * MEGABYTES, 9)
    box.write_file("/tmp/client.py", CLIENT)

    def direct(at: int = port) -> float:
        command = [sys.executable, "-c", CLIENT, "-", "127.0.0.1", str(at), str(megabytes)]
        return float(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout)

    def inside(way: str, at: int, host: str = "api") -> Callable[[], float]:
        command = ["python3", "/tmp/client.py", way, host, str(at), str(megabytes)]

        def measure() -> float:
            result = box.exec(command, timeout=60)
            assert result.ok, result
            return float(result.stdout)

        return measure

    ways = {"by the proxy": inside("proxy", 80), "straight": inside("-", port)}
    speeds: dict[str, list[float]] = {way: [] for way in (*ways, "bare", "relay")}
    with _relay(port) as relay:
        for _ in range(rounds):
            speeds["bare"].append((bare or direct)() / 2**20)
            speeds["relay"].append(direct(relay) / 2**20)
            for way, measure in ways.items():
                speeds[way].append(measure() / 2**20)
    # The best of each: others use the machine, too.
    host, between = max(speeds["bare"]), max(speeds["relay"])
    peer = "the host's own client" if bare is None else "bare, without a proxy"
    bar = _BAR
    floor: list[Row] = []
    if bare is None:
        # A third process on two cores: where not even the least of them passes half, nothing can.
        bar = min(bar, _OF_FLOOR * between / host)
        floor = [Row(f"{backend}: a bare relay, splice(2)", between, "MB/s", peer, host)]
    rows = [
        Row(f"{backend}: an allowed host {way}", max(speeds[way]), "MB/s", peer, host, bar, True)
        for way in ways
    ]
    return floor + rows


def _refusals(backend: str, box: Sandbox) -> Row:
    """Each is refused in the sandbox, and in its log."""
    tries = {
        "a denied name": ("get('http://denied.test/')", "denied.test"),
        "a raw address": ("get('http://192.0.2.7/')", "192.0.2.7"),
        "a DNS tunnel": (
            "look_up('c2VjcmV0LW9mLXRoZS1ndWVzdA.tunnel.test')",
            "c2vjcmv0lw9mlxrozs1ndwvzda.tunnel.test",
        ),
        "a redirect to a denied host": ("get('http://api/away')", "elsewhere.test"),
        "IPv6": ("get('http://[2001:db8::7]/')", "2001:db8::7"),
        "a CONNECT to another port": ("tunnel('api:22')", "api"),
    }
    refused = 0
    for name, (code, host) in tries.items():
        before = len(box.network_log())
        result = box.run_code(f"{_WORDS}{code}", timeout=60)
        records = [r for r in box.network_log()[before:] if r.verdict == "denied"]
        logged = any(r.host.lower() == host for r in records)
        if result.ok and result.value is None and logged:
            refused += 1
        else:
            print(f"{backend}: {name} came to {result.value} {result.error}, and {records}", file=sys.stderr)
    return Row(
        f"{backend}: ways out, refused and logged", refused, "of them", "ways out", len(tries), 1.0, True
    )
