"""Web pages of this machine's own: loopback only, a random token, nothing from other origins, nothing loaded from afar.

A page is one text, and asks for more with the token in a header: by GET what it shows, by POST what it does.
"""

from __future__ import annotations

import hmac
import http.server
import json
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qsl

_MAX_BODY = 4096  # bytes
_MAX_FIELDS = 16  # of a query
_PATIENCE = 30.0  # seconds that a connection may be silent
_OWN_POLICY = (
    "default-src 'none'; script-src {own}; style-src {own}; img-src blob:; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)

Read = Callable[[dict[str, str]], "dict[str, Any] | bytes"]  # of a query's fields: JSON, or a PNG
Write = Callable[[dict[str, Any]], dict[str, Any]]


class Refusal(Exception):
    """What a read or a write raises to answer with a status and a text of its own. ValueError is BAD_REQUEST."""

    def __init__(self, status: HTTPStatus, text: str) -> None:
        super().__init__(text)
        self.status = status


class Pages(http.server.ThreadingHTTPServer):
    """`page`: the page's text, of a nonce that allows its own script and style. `reads`: by path, the answer to a
    query's fields; `writes`: to a JSON object. `sent` is told each answer (or Refusal) of these, once it is out.

    Raises OSError for a port that can't be had, OverflowError for a number that is none.
    """

    daemon_threads = True

    def __init__(
        self,
        page: Callable[[str], str],
        reads: Mapping[str, Read],
        writes: Mapping[str, Write],
        *,
        port: int = 0,
        sent: Callable[[Any], object] = lambda answer: None,
    ) -> None:
        self.page, self.reads, self.writes, self.sent = page, reads, writes, sent
        self.token = secrets.token_urlsafe(32)
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except OSError as error:
            raise OSError(
                f"port {port} can't be had ({error.strerror}): give another (--port), or 0 for any that is free"
            ) from error
        self.connections: set[socket.socket] = set()
        self.hosts = {f"{name}:{self.server_port}" for name in ("127.0.0.1", "localhost")}

    @property
    def address(self) -> str:
        """Whoever has it can see and do what the page can."""
        return f"http://127.0.0.1:{self.server_port}/?token={self.token}"

    @contextmanager
    def served(self) -> Iterator[None]:
        """Answers, in threads of its own, until this is left."""
        with self:
            thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
            thread.start()
            try:
                yield
            finally:
                self.shutdown()
                thread.join()
                for connection in list(self.connections):  # which pages keep open
                    with suppress(OSError):
                        connection.shutdown(socket.SHUT_RDWR)


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Pages
    timeout = _PATIENCE
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "sandbox-gym", ""

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        if self.path.startswith("/?token="):
            if self._allowed(self.path.removeprefix("/?token=")):
                nonce = secrets.token_urlsafe(16)
                self._send(HTTPStatus.OK, "text/html; charset=utf-8", self.server.page(nonce).encode(), nonce)
        elif self._allowed(self.headers.get("X-Token", "")):
            read = self._found(path, self.server.reads, self.server.writes)
            if read is not None:
                self._answer(lambda: read(dict(parse_qsl(query, max_num_fields=_MAX_FIELDS))))

    def do_POST(self) -> None:
        if self._allowed(self.headers.get("X-Token", "")):
            write = self._found(self.path, self.server.writes, self.server.reads)
            if write is not None:
                self._answer(lambda: write(self._body()))

    def _found(self, path: str, these: Mapping[str, Any], others: Mapping[str, Any]) -> Any:
        if path in these:
            return these[path]
        if path in others:
            self._say(HTTPStatus.METHOD_NOT_ALLOWED, f"not by {self.command}")
        else:
            self._say(HTTPStatus.NOT_FOUND, "there is no such page")
        return None

    def _body(self) -> dict[str, Any]:
        size = int(self.headers.get("Content-Length", ""))
        if not 0 <= size <= _MAX_BODY:
            raise ValueError(f"a request has at most {_MAX_BODY} bytes")
        wish = json.loads(self.rfile.read(size))
        if not isinstance(wish, dict):
            raise ValueError("a request is a JSON object")
        return wish

    def _allowed(self, token: str) -> bool:
        """Else refused: a wrong token; a foreign name for this machine (DNS rebinding); another page's request."""
        host, origin = self.headers.get("Host"), self.headers.get("Origin")
        if host not in self.server.hosts or origin not in (None, f"http://{host}"):
            self._say(HTTPStatus.FORBIDDEN, "not from here")
            return False
        if not hmac.compare_digest(token.encode(), self.server.token.encode()):
            self._say(HTTPStatus.FORBIDDEN, "the token is missing or wrong: use the address that was printed")
            return False
        return True

    def _answer(self, ask: Callable[[], Any]) -> None:
        try:
            answer = ask()
        except Refusal as refusal:
            answer = refusal
        except (ValueError, RecursionError) as error:
            answer = Refusal(HTTPStatus.BAD_REQUEST, str(error))
        try:
            if isinstance(answer, Refusal):
                self._say(answer.status, str(answer))
            elif isinstance(answer, bytes):
                self._send(HTTPStatus.OK, "image/png", answer)
            else:
                self._send(HTTPStatus.OK, "application/json", json.dumps(answer).encode())
        finally:  # whether or not the page is there to hear it
            self.server.sent(answer)

    def _say(self, status: HTTPStatus, text: str) -> None:
        self.close_connection = True  # what it may still send is not read
        self._send(status, "text/plain; charset=utf-8", text.encode("utf-8", "backslashreplace"))

    def _send(self, status: HTTPStatus, kind: str, body: bytes, nonce: str = "") -> None:
        self.send_response(status)
        for name, value in (
            ("Content-Type", kind),
            ("Content-Length", str(len(body))),
            ("Content-Security-Policy", _OWN_POLICY.format(own=f"'nonce-{nonce}'" if nonce else "'none'")),
            ("Cache-Control", "no-store"),
            ("Referrer-Policy", "no-referrer"),
            ("X-Content-Type-Options", "nosniff"),
        ):
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def handle(self) -> None:
        self.server.connections.add(self.connection)
        try:
            super().handle()
        except ConnectionError:  # a page that goes away amid its answer
            self.close_connection = True
        finally:
            self.server.connections.discard(self.connection)

    def log_message(self, *_: Any) -> None:
        """Nothing: the address holds the token."""
