"""Servers on this machine's loopback, and sandboxes that may reach them or not. Nothing here talks to anyone else."""

from __future__ import annotations

import contextlib
import http.server
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sandbox_gym.network import Allow, NetworkRecord
from sandbox_gym.sandbox import Sandbox, Snapshot
from tests.sandbox.conftest import _pristine, box, client, no_leaks, pristine, run_folder

__all__ = ["_pristine", "box", "client", "no_leaks", "pristine", "run_folder"]


class _Pages(http.server.BaseHTTPRequestHandler):
    """Says what it was asked, and by whom it was called."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:  # and POST
        length = int(self.headers.get("Content-Length", 0))
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            body = self.rfile.read(length)
        if self.path == "/away":
            self.send_response(302)
            self.send_header("Location", "http://elsewhere.test/")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        answer = f"{self.command} {self.headers['Host']}{self.path} {body.decode()}".strip().encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_POST = do_GET  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:
        pass


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that ends in the middle is a part of these tests."""


@contextlib.contextmanager
def serving(context: ssl.SSLContext | None = None) -> Iterator[str]:
    """`address:port` of a server of HTTP, or HTTPS."""
    with _Server(("127.0.0.1", 0), _Pages) as server:
        if context is not None:
            server.socket = context.wrap_socket(
                server.socket, server_side=True, do_handshake_on_connect=False
            )
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="session")
def web() -> Iterator[str]:
    """`address:port` of an HTTP server."""
    with serving() as address:
        yield address


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of secure.test, with its key."""
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    key = path.with_name("key.pem")
    what = ["-subj", "/CN=secure.test", "-addext", "subjectAltName=DNS:secure.test,DNS:*.secure.test"]
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
    ]
    subprocess.run(
        [*command, "-days", "2", *what, "-keyout", str(key), "-out", str(path)],
        check=True,
        capture_output=True,
    )
    path.write_text(path.read_text() + key.read_text())
    return path


@pytest.fixture(scope="session")
def secure_web(certificate: Path) -> Iterator[str]:
    """`address:port` of an HTTPS server."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with serving(context) as address:
        yield address


@pytest.fixture(scope="session")
def echo() -> Iterator[str]:
    """`address:port` of a server that greets, and sends back all it gets."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)

    def answer(sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError):
            sock.sendall(b"hello\n")
            while block := sock.recv(1 << 16):
                sock.sendall(block)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = listener.accept()
                threading.Thread(target=answer, args=(sock,), daemon=True, name="echo").start()

    threading.Thread(target=accept, daemon=True).start()
    yield f"127.0.0.1:{listener.getsockname()[1]}"
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


Opened = Callable[..., Sandbox]


@pytest.fixture
def opened(pristine: Snapshot) -> Iterator[Opened]:
    """`opened(*hosts, **services)`: a sandbox that may reach these; `_` in a service's name stands for its port's ':',
    and the names may come as one dict, too.
    """
    made: list[Sandbox] = []

    def make(*hosts: str, services: dict[str, str] | None = None) -> Sandbox:
        made.append(Sandbox.restore(pristine, network=Allow(hosts, services=services)))
        return made[-1]

    yield make
    for sandbox in made:
        sandbox.terminate()
    for thread in threading.enumerate():  # of servers here: a connection ends with its sandbox
        if "process_request_thread" in thread.name or thread.name == "echo":
            while thread.ident is None:  # listed, and not started yet
                time.sleep(0.001)
            thread.join(timeout=5)
            assert not thread.is_alive()


def curl(sandbox: Sandbox, what: str) -> str:
    """What curl prints, errors too."""
    result = sandbox.shell(f"curl -sS -m 10 {what}", timeout=20)
    return result.stdout + result.stderr


def last(sandbox: Sandbox) -> NetworkRecord:
    return sandbox.network_log()[-1]


RAW = """
import socket, struct, ssl
def talk(address, *blocks, family=socket.AF_INET):
    'Sends each, and reads what comes until the end; "reset" for a connection that breaks.'
    got = b''
    try:
        with socket.create_connection(address, timeout=5) as s:
            for block in blocks:
                s.sendall(block)
            while more := s.recv(65536):
                got += more
    except ConnectionError:
        got += b'reset'
    return got
def by_proxy(*blocks):
    return talk(('127.0.0.1', 3128), *blocks)
def hello(name):
    'A ClientHello.'
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    inward, outward = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(inward, outward, server_hostname=name)
    try:
        tls.do_handshake()
    except ssl.SSLWantReadError:
        return outward.read()
def tunnel(to, block):
    'What comes through a tunnel after its 200, or the refusal.'
    with socket.create_connection(('127.0.0.1', 3128), timeout=5) as s:
        s.sendall(f'CONNECT {to} HTTP/1.1\\r\\nHost: {to}\\r\\n\\r\\n'.encode())
        first = s.recv(65536)
        if b' 200 ' not in first:
            return first
        early = first.split(b'\\r\\n\\r\\n', 1)[1]
        s.sendall(block)
        try:
            got = early or s.recv(65536)
            while got.startswith(b'HTTP/') and b'\\r\\n\\r\\n' not in got and (more := s.recv(65536)):
                got += more
            head, _, body = got.partition(b'\\r\\n\\r\\n')
            length = int(head.lower().partition(b'content-length:')[2].split()[0]) if b'ength:' in head else 0
            while len(body) < length and (more := s.recv(65536)):
                body += more
            return got if not length else head + b'\\r\\n\\r\\n' + body
        except ConnectionError:
            return b''
def ask(name, kind=1):
    'Code of the answer (3: no such name) and how many records it has.'
    q = struct.pack('!6H', 7, 0x100, 1, 0, 0, 0)
    for label in name.split('.'):
        q += bytes([len(label)]) + label.encode()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        for patience in (0.5, 1, 2, 4):
            s.settimeout(patience)
            s.sendto(q + struct.pack('!BHH', 0, kind, 1), ('127.0.0.1', 53))
            try:
                block = s.recv(4096)
                break
            except TimeoutError:
                continue
        _, flags, _, answers, _, _ = struct.unpack_from('!6H', block)
    return flags & 15, answers
"""


def do(sandbox: Sandbox, code: str) -> None:
    """Statements, with what RAW defines."""
    result = sandbox.run_code(RAW + code, timeout=30)
    assert result.error is None, result


def value(sandbox: Sandbox, code: str) -> str:
    """repr of an expression, with what RAW defines."""
    result = sandbox.run_code(RAW + code, timeout=30)
    assert result.error is None and result.value is not None, result
    return result.value
