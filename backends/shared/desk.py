"""Where a supervisor takes its client's requests: one JSON message each way, on connections that stay open."""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable
from typing import Any

from sandbox_gym.errors import SandboxError

from . import protocol
from .loop import Loop

Reply = Callable[..., bool]
"""`reply(message, fds=None)`: False when the client's thread is gone; what was made for it must go too."""
Handler = Callable[[dict[str, Any], Reply], None]


class Desk:
    """`handlers`: an object whose `_do_<op>` answer requests, at once or later; `kind_of`: the error's class that the
    client raises for an exception that is no SandboxError, "" for an unforeseen one.
    """

    def __init__(self, loop: Loop, handlers: object, kind_of: Callable[[Exception], str]) -> None:
        self._loop = loop
        self._handlers = handlers
        self._kind_of = kind_of

    def accept(self, connection: socket.socket) -> None:
        def handle() -> None:
            try:
                request, fds = protocol.receive(connection)
            except (EOFError, OSError):
                self._loop.unwatch(connection.fileno())
                connection.close()
                return
            try:
                request["fds"] = fds
                self._serve(connection, request)
            finally:
                for fd in fds:
                    os.close(fd)

        self._loop.watch(connection.fileno(), handle)

    def _serve(self, connection: socket.socket, request: dict[str, Any]) -> None:
        def reply(message: dict[str, Any], fds: list[int] | None = None) -> bool:
            try:
                protocol.send(connection, message, fds)
            except OSError:
                return False
            return True

        op = request.get("op")
        try:
            handler: Handler = getattr(self._handlers, f"_do_{op}")
            handler(request, reply)
        except SandboxError as error:
            reply({"error": type(error).__name__, "message": str(error)})
        except Exception as error:  # one bad request must not end every sandbox
            kind = self._kind_of(error)
            if kind:
                reply({"error": kind, "message": str(error)})
                return
            where = traceback.format_exc(limit=-3)
            reply({"error": "SandboxError", "message": f"the supervisor failed at {op}: {error}\n{where}"})
