"""The local web page on which duels are decided. Loopback only; a random token; nothing from other origins."""

from __future__ import annotations

import hmac
import http.server
import json
import os
import secrets
import threading
from collections.abc import Callable, Generator, Iterable
from http import HTTPStatus
from typing import Any

from sandbox_gym.duel import preferences
from sandbox_gym.duel.page import page
from sandbox_gym.duel.pairs import Duel

_MAX_BODY = 4096  # bytes
_PATIENCE = 30.0  # seconds that a connection may be silent


def serve(
    duels: Iterable[Duel],
    path: str | os.PathLike[str],
    *,
    n: int,
    on_ready: Callable[[str], object] = print,
    port: int = 0,
) -> int:
    """Shows duels on a page of this machine, and appends each choice to a JSONL file, until `n` are made, there are no
    more, or the page's reader quits. Returns how many were made.

    `on_ready` is given the page's address: whoever has it can choose. Raises what `duels` and the file do.
    """
    table = Table(duels, path, n)
    with _Server(table, port) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            on_ready(f"http://127.0.0.1:{server.server_port}/?token={server.token}")
            table.over.wait()
        finally:
            server.shutdown()
            thread.join()
            table.close()
    if table.failure is not None:
        raise table.failure
    return table.made


class Table:
    """The duel that lies on it, and what becomes of it. Thread-safe."""

    def __init__(self, duels: Iterable[Duel], path: str | os.PathLike[str], n: int) -> None:
        if n < 1:
            raise ValueError(f"n is 1 or more, not {n}")
        self.made = 0
        self.over = threading.Event()
        self.failure: Exception | None = None
        self._duels = iter(duels)
        self._path = path
        self._n = n
        self._lock = threading.Lock()
        self._duel: Duel | None = None

    def show(self) -> dict[str, Any]:
        """The present duel for the page; {"done": True} when there is none."""
        with self._lock:
            return self._show()

    def choose(self, number: Any, choice: Any) -> dict[str, Any] | None:
        """Stores a choice; the next duel. None where another than the present duel is meant: a second click, an old
        page. Raises ValueError for what is no choice.
        """
        with self._lock:
            if choice not in preferences.CHOICES:
                raise ValueError(f"a choice is one of {', '.join(preferences.CHOICES)}")
            if number != self.made or self._duel is None or self.over.is_set():
                return None
            try:
                preferences.append(self._path, self._duel, choice)
            except OSError as error:
                self.failure = error
                raise
            self.made += 1
            self._duel = None
            return self._show()

    def close(self) -> None:
        """Closes the duels, where they are a generator."""
        with self._lock:  # not while it makes one
            if isinstance(self._duels, Generator):
                self._duels.close()

    def _show(self) -> dict[str, Any]:
        if self._duel is None and self.made < self._n and self.failure is None:
            try:
                self._duel = next(self._duels, None)
            except Exception as error:  # serve raises it
                self.failure = error
        if self._duel is None:
            problem = None if self.failure is None else str(self.failure)
            return {"done": True, "made": self.made, "problem": problem}
        duel = self._duel
        return {"number": self.made, "of": self._n, "prefix": duel.prefix, "a": duel.a, "b": duel.b}


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, table: Table, port: int) -> None:
        self.table = table
        self.token = secrets.token_urlsafe(32)
        super().__init__(("127.0.0.1", port), _Handler)
        self.hosts = {f"{name}:{self.server_port}" for name in ("127.0.0.1", "localhost")}


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Server
    timeout = _PATIENCE
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "sandbox-gym", ""

    def do_GET(self) -> None:
        if self.path.partition("?")[0] == "/choice":
            self._say(HTTPStatus.METHOD_NOT_ALLOWED, "a choice is made by POST")
        elif self.path.startswith("/?token="):
            if not self._allowed(self.path.removeprefix("/?token=")):
                return
            nonce = secrets.token_urlsafe(16)
            self._send(HTTPStatus.OK, "text/html; charset=utf-8", page(nonce).encode(), nonce)
        elif self._allowed(self.headers.get("X-Token", "")):
            if self.path == "/duel":
                self._answer(self.server.table.show())
            else:
                self._say(HTTPStatus.NOT_FOUND, "there is no such page")

    def do_POST(self) -> None:
        if not self._allowed(self.headers.get("X-Token", "")):
            return
        if self.path == "/quit":
            self._answer({"done": True, "made": self.server.table.made})
        elif self.path != "/choice":
            self._say(HTTPStatus.NOT_FOUND, "there is no such page")
        else:
            self._choose()

    def _choose(self) -> None:
        try:
            size = int(self.headers.get("Content-Length", ""))
            if not 0 <= size <= _MAX_BODY:
                raise ValueError(f"a choice has at most {_MAX_BODY} bytes")
            wish = json.loads(self.rfile.read(size))
            if not isinstance(wish, dict):
                raise ValueError("a choice is a JSON object")
            following = self.server.table.choose(wish.get("number"), wish.get("choice"))
        except (ValueError, RecursionError) as error:
            self._say(HTTPStatus.BAD_REQUEST, str(error))
        except OSError as error:
            self._say(HTTPStatus.INTERNAL_SERVER_ERROR, f"it could not be stored: {error}")
            self.server.table.over.set()
        else:
            if following is None:
                self._say(HTTPStatus.CONFLICT, "that duel is decided: load the page again")
            else:
                self._answer(following)

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

    def _answer(self, value: dict[str, Any]) -> None:
        try:
            self._send(HTTPStatus.OK, "application/json", json.dumps(value).encode())
        finally:  # whether or not the page is there to hear it
            if value.get("done"):
                self.server.table.over.set()

    def _say(self, status: HTTPStatus, text: str) -> None:
        self.close_connection = True  # what it may still send is not read
        self._send(status, "text/plain; charset=utf-8", text.encode())

    def _send(self, status: HTTPStatus, kind: str, body: bytes, nonce: str = "") -> None:
        own = f"'nonce-{nonce}'" if nonce else "'none'"
        policy = f"default-src 'none'; script-src {own}; style-src {own}; connect-src 'self'; base-uri 'none'"
        self.send_response(status)
        for name, value in (
            ("Content-Type", kind),
            ("Content-Length", str(len(body))),
            ("Content-Security-Policy", f"{policy}; form-action 'none'; frame-ancestors 'none'"),
            ("Cache-Control", "no-store"),
            ("Referrer-Policy", "no-referrer"),
            ("X-Content-Type-Options", "nosniff"),
        ):
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Nothing: the address holds the token."""
