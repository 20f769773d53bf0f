"""The process that serves what sandboxes may reach: their proxy, their name server, their straight connections.

It is of the host's network namespace and nobody's rights; the sockets that it listens on were made inside the
sandboxes'. What a guest sends is read here alone, by `conversation`; the supervisor only says which sandbox has which
rules. It ends when the supervisor does.
"""

from __future__ import annotations

import asyncio
import contextlib
import encodings.idna  # noqa: F401  (getaddrinfo's: where its file lies may not be readable later)
import errno
import gc
import os
import resource
import socket
import sys
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NoReturn

from sandbox_gym.backends.shared import protocol
from sandbox_gym.guest import syscalls
from sandbox_gym.network import Allow

from . import names
from .conversation import Conversation
from .network import INSIDE, Place, stand_ins

MOST_CONNECTIONS = 64  # of a sandbox at once; more wait in the kernel's queue, and then for their sender
_MOST_IN_ALL = 2048  # of all sandboxes at once
_MOST_RECORDS = 1000
_PAGE = 40  # records in one message, which may be 1400 bytes each
_MOST_WORDS = 300  # characters of a host or reason in a record
_LOOK_UPS, _ALL_LOOK_UPS = 4, 32  # of names at once: of a sandbox, of all
_QUERIES = 32  # datagrams of one sandbox at a turn
_MOST_BYTES = 1 << 30  # of this process's memory
_NOBODY = 65534
_SHORT_OF_FILES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


@dataclass
class Door:
    """A listening socket of a sandbox: see `network.Listener`."""

    kind: str
    rule: int
    port: int
    sock: socket.socket


@dataclass(eq=False)
class Box:
    """A sandbox as it is seen here."""

    allow: Allow
    place: Place
    doors: list[Door] = field(default_factory=list)
    records: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_MOST_RECORDS))
    recorded: int = 0
    connections: set[Conversation] = field(default_factory=set)
    look_ups: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_LOOK_UPS))
    pausing: bool = False

    def __post_init__(self) -> None:
        self.addresses = {
            rule.host: address for rule, address in zip(self.allow.rules, stand_ins(self.allow, self.place))
        }

    def record(self, kind: str, host: str, port: int, reason: str, *, allowed: bool) -> dict[str, Any]:
        """Keeps one; its bytes, and how it went on, are filled in later."""
        self.recorded += 1
        row = {
            "n": self.recorded,
            "time": time.time(),
            "kind": kind,
            "host": host[:_MOST_WORDS],
            "port": port,
        }
        row |= {"verdict": "allowed" if allowed else "denied", "reason": reason[:_MOST_WORDS]}
        row |= {"sent": 0, "received": 0}
        self.records.append(row)
        return row

    def find(self, name: str) -> str | None:
        """The address that a name has inside."""
        rule = self.allow.knows(name)
        return self.addresses[rule.host] if rule is not None else None

    async def look_up(self, name: str, port: int) -> list[str]:
        """The addresses that it truly has. Raises OSError."""
        async with self.look_ups:
            return await asyncio.get_running_loop().run_in_executor(None, names.look_up, name, port)


class Proxy:
    def __init__(self, control: socket.socket, place: Place) -> None:
        self._control = control
        self._place = place
        self._loop = asyncio.get_running_loop()
        self._boxes: dict[int, Box] = {}
        self._over: asyncio.Future[None] = self._loop.create_future()

    async def run(self) -> None:
        self._loop.set_default_executor(ThreadPoolExecutor(_ALL_LOOK_UPS))
        self._loop.add_reader(self._control, self._hear)
        while not self._over.done():
            await asyncio.wait([self._over], timeout=1.0)
            now = self._loop.time()
            for box in self._boxes.values():
                for connection in box.connections:
                    connection.expire(now)

    # ---- the supervisor's orders ----------------------------------------------------------------------------------

    def _hear(self) -> None:
        try:
            message, fds = protocol.receive(self._control)
        except (EOFError, OSError):
            self._loop.remove_reader(self._control)
            self._over.set_result(None)
            return
        getattr(self, f"_do_{message['op']}")(message, fds)

    def _do_open(self, message: dict[str, Any], fds: list[int]) -> None:
        box = self._boxes.get(message["key"])
        if box is None:
            box = self._boxes[message["key"]] = Box(Allow.from_json(message["allow"]), self._place)
        for (kind, rule, port), fd in zip(message["listeners"], fds, strict=True):
            door = Door(kind, rule, port, socket.socket(fileno=fd))
            door.sock.setblocking(False)
            box.doors.append(door)
            self._watch(box, door)

    def _do_close(self, message: dict[str, Any], fds: list[int]) -> None:
        box = self._boxes.pop(message["key"], None)
        if box is not None:
            for door in box.doors:
                self._loop.remove_reader(door.sock)
                door.sock.close()
            for connection in box.connections:
                connection.end()

    def _do_inherit(self, message: dict[str, Any], fds: list[int]) -> None:
        heir, box = self._boxes.get(message["key"]), self._boxes.get(message["of"])
        if heir is not None and box is not None:
            later = [{**row, "n": box.recorded + row["n"]} for row in heir.records]
            heir.records = deque([dict(row) for row in box.records] + later, _MOST_RECORDS)
            heir.recorded += box.recorded

    def _do_records(self, message: dict[str, Any], fds: list[int]) -> None:
        box = self._boxes.get(message["key"])
        rows = [row for row in box.records if row["n"] > message["after"]] if box is not None else []
        reply = {"ticket": message["ticket"], "records": rows[:_PAGE], "more": len(rows) > _PAGE}
        with contextlib.suppress(OSError):  # it takes no answers, and will hear of this process's end
            protocol.send(self._control, reply)

    # ---- what sandboxes ask ---------------------------------------------------------------------------------------

    def _watch(self, box: Box, door: Door) -> None:
        if door.kind == "dns":
            self._loop.add_reader(door.sock, self._answer, box, door)
        elif not box.pausing:
            self._loop.add_reader(door.sock, self._accept, box, door)

    def _answer(self, box: Box, door: Door) -> None:
        for _ in range(_QUERIES):
            try:
                query, sender = door.sock.recvfrom(4096)
                reply, refused = names.answer(query, box.find)
                if refused is not None:
                    box.record("dns", refused, 53, "no rule allows this name", allowed=False)
                if reply is not None:
                    door.sock.sendto(reply, sender)
            except OSError:  # none is left; or the sender is gone, or has no room
                return

    def _accept(self, box: Box, door: Door) -> None:
        try:
            if sum(len(box.connections) for box in self._boxes.values()) >= _MOST_IN_ALL:
                raise OSError(errno.EMFILE, "too many connections of all sandboxes")
            sock, _ = door.sock.accept()
        except OSError as error:
            if error.errno in _SHORT_OF_FILES:  # it stays ready, and would be asked for ever
                self._pause(box)
                self._loop.call_later(0.2, self._resume, box)
            return
        sock.setblocking(False)
        connection = Conversation(box, door, sock)
        box.connections.add(connection)
        task = self._loop.create_task(connection.run())
        connection.task = task
        task.add_done_callback(lambda _: self._ended(box, connection))
        if len(box.connections) >= MOST_CONNECTIONS:
            if not box.pausing:
                text = f"{MOST_CONNECTIONS} connections are open: more have to wait"
                box.record("proxy", "", 0, text, allowed=False)
            self._pause(box)

    def _ended(self, box: Box, connection: Conversation) -> None:
        box.connections.discard(connection)
        if box.pausing and len(box.connections) < MOST_CONNECTIONS:
            self._resume(box)

    def _pause(self, box: Box) -> None:
        box.pausing = True
        for door in box.doors:
            if door.kind != "dns":
                self._loop.remove_reader(door.sock)

    def _resume(self, box: Box) -> None:
        if len(box.connections) >= MOST_CONNECTIONS:  # one that ends will
            return
        box.pausing = False
        for door in box.doors:
            if door.sock.fileno() >= 0:  # not closed meanwhile
                self._watch(box, door)


def serve(control: socket.socket, place: Place) -> NoReturn:
    """In a process forked from the supervisor: never returns."""
    gc.freeze()  # the supervisor's garbage would close descriptors under numbers that are this process's by then
    try:
        os.setsid()
        for name in os.listdir("/proc/self/fd"):  # guests notice their end by sockets that must close with it
            if int(name) not in (1, 2, control.fileno()):
                with contextlib.suppress(OSError):
                    os.close(int(name))
        control.setblocking(False)
        _give_up_rights()
        asyncio.run(_run(control, place))
    except BaseException as error:
        print(f"the proxy failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(0)


async def _run(control: socket.socket, place: Place = INSIDE) -> None:
    await Proxy(control, place).run()


def _give_up_rights() -> None:
    """It reads what guests write: nobody's rights, no capability, bounded memory."""
    resource.setrlimit(resource.RLIMIT_DATA, (_MOST_BYTES, _MOST_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):  # an ordinary user's: there is nobody else to become
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    syscalls.capset(set())
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
