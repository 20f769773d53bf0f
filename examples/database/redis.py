"""A Redis server, and as much of a client as the example needs."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from typing import Any

_PORT = 6379  # the sandbox has a loopback of its own: it is free
_PATIENCE = 10.0  # seconds


class Server:
    """Keeps its data in memory and logs each write to a file, which it never syncs."""

    def __init__(self) -> None:
        if shutil.which("redis-server") is None:
            raise FileNotFoundError(
                "there is no redis-server: apt-get install redis-server, or scripts/setup.sh"
            )
        options = {"bind": "127.0.0.1", "port": _PORT, "save": "", "appendonly": "yes", "appendfsync": "no"}
        argv = [
            "redis-server",
            *(word for name, value in options.items() for word in (f"--{name}", str(value))),
        ]
        self._process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

    def connect(self) -> Client:
        """Raises ConnectionError."""
        deadline = time.monotonic() + _PATIENCE
        while True:
            try:
                client = Client(socket.create_connection(("127.0.0.1", _PORT), timeout=_PATIENCE))
                client("PING")
                return client
            except (ConnectionError, RedisError):  # not up yet, or still reading its log
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise
                time.sleep(0.005)

    def kill(self) -> None:
        """What it has in memory is lost."""
        self._process.kill()
        self._process.wait()


class RedisError(Exception):
    """What the server answered instead of a value."""


class Client:
    """One connection. `client("SET", "key", 1)` sends a command and returns its answer."""

    def __init__(self, connection: socket.socket) -> None:
        self._stream = connection.makefile("rwb")

    def __call__(self, *words: object) -> Any:
        """Raises RedisError, ConnectionError, TimeoutError."""
        blocks = [str(word).encode() for word in words]
        self._stream.write(b"*%d\r\n" % len(blocks))
        for block in blocks:
            self._stream.write(b"$%d\r\n%b\r\n" % (len(block), block))
        self._stream.flush()
        return self._answer()

    def _answer(self) -> Any:
        line = self._stream.readline()
        if not line:
            raise ConnectionError("Redis closed the connection")
        kind, rest = line[:1], line[1:-2].decode()
        if kind == b"-":
            raise RedisError(rest)
        if kind == b":":
            return int(rest)
        if kind == b"$":
            return None if rest == "-1" else self._stream.read(int(rest) + 2)[:-2].decode()
        if kind == b"*":
            return [self._answer() for _ in range(int(rest))]
        return rest
