"""Servers on this machine's loopback, for sandboxes to reach, or not."""

from __future__ import annotations

import contextlib
import http.server
import socket
import threading
from collections.abc import Iterator


class _Pages(http.server.BaseHTTPRequestHandler):
    """Says what it was asked; `/away` leads to a host that no rule names."""

    def do_GET(self) -> None:
        answer = f"GET {self.headers['Host']}{self.path}".encode()
        away = self.path == "/away"
        self.send_response(302 if away else 200)
        if away:
            self.send_header("Location", "http://elsewhere.test/")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:
        pass


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that ends in the middle is no fault of the server's."""


@contextlib.contextmanager
def web() -> Iterator[str]:
    """`address:port` of an HTTP server."""
    with _Server(("127.0.0.1", 0), _Pages) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@contextlib.contextmanager
def echo() -> Iterator[str]:
    """`address:port` of a server that greets, then sends back all it gets."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer(sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError):
            sock.sendall(b"hello\n")
            while block := sock.recv(1 << 16):
                sock.sendall(block)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = listener.accept()
                threading.Thread(target=answer, args=(sock,), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()
