"""One connection of a sandbox, from its first byte to its end: what it asks for, the verdict, bytes both ways."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
import socket
from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING, Any

from sandbox_gym.network import Rule, as_address

from . import names, sniffing
from .sniffing import Head, Refused

if TYPE_CHECKING:
    from .proxy import Box, Door

_BLOCK = 64 << 10  # bytes in one direction at a time
_PIPE = 1 << 20  # the same, where nothing is looked at any more
_MOVE, _NONBLOCK = 1, 2  # SPLICE_F_
_BEGINNING = 20.0  # seconds until it is known where it goes
_REACHING = 20.0  # to look up a name and to connect
_SILENCE = 300.0  # with no byte in either direction
_LEFT = 5.0  # the same, once who asked has ended its side
_MOST_ADDRESSES = 4  # of a name that are tried
_TO_REACH = 5.0  # seconds for each
_CHUNK = re.compile(rb"[0-9a-fA-F]{1,8}")


class _Over(Exception):
    """The sandbox has nothing more to say."""


class _Unreachable(Refused):
    """By the network, not by a rule."""


class Conversation:
    def __init__(self, box: Box, door: Door, sock: socket.socket) -> None:
        self._box = box
        self._door = door
        self._sock = sock
        self._other: socket.socket | None = None
        self._ahead = b""  # read, and not used yet
        self._loop = asyncio.get_running_loop()
        self._deadline = self._loop.time() + _BEGINNING
        self._silence = _SILENCE
        self._record: dict[str, Any] | None = None
        self._answered = False  # it has got bytes already: no refusal of ours may follow
        self.task: asyncio.Task[None] | None = None

    def end(self) -> None:
        if self.task is not None:
            self.task.cancel()

    def expire(self, now: float) -> None:
        if now > self._deadline:
            self.end()

    async def run(self) -> None:
        try:
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await (self._as_proxy() if self._door.kind == "proxy" else self._straight())
        except Refused as refused:
            if isinstance(refused, _Unreachable):  # allowed all the same
                assert self._record is not None
                self._record["reason"] = str(refused)[:300]
            else:
                self._deny(str(refused))
            await self._tell(refused)
        except (_Over, OSError, asyncio.CancelledError):
            pass
        finally:
            self._sock.close()
            if self._other is not None:
                self._other.close()

    # ---- the ways in ----------------------------------------------------------------------------------------------

    async def _as_proxy(self) -> None:
        head = await self._head()
        if head.method == b"CONNECT":
            host, port = sniffing.authority(head.target, None)
            rule = self._judge("connect", host, port)
            await self._reach(rule, host, port)
            await self._loop.sock_sendall(self._sock, head.version + b" 200 OK\r\n\r\n")
            self._answered = True
            if rule.port is None and port == 80:
                await self._request(await self._head(), rule, host)
            else:
                await self._tunnel(rule, host)
            return
        target, path = sniffing.absolute(head.target)
        host, port = sniffing.authority(target, 80)
        if head.host() != (host, port):
            self._record = self._box.record("http", host, port, "", allowed=False)
            raise Refused(f"the Host field names another: {head.host()[0]}:{head.host()[1]}")
        rule = self._judge("http", host, port)
        if rule.port is None and port != 80:
            raise Refused(f"{host}:{port} is open to TLS only, by CONNECT", 403)
        await self._reach(rule, host, port)
        await self._exchange(head, path)

    async def _straight(self) -> None:
        rule = self._box.allow.rules[self._door.rule]
        port = self._door.port
        if rule.port is None and port == 80:
            await self._request(await self._head(), rule, None)
            return
        if rule.host.startswith("*."):  # its address stands for many names
            opening, host = await self._opening(rule, None)
            if as_address(host) or not rule.covers(host):
                self._record = self._box.record("tcp", rule.host, port, "", allowed=False)
                raise Refused("only TLS tells which of these names is meant")
            self._ahead = opening
        else:
            host = rule.host
        await self._reach(self._judge("tcp", host, port), host, port)
        await self._tunnel(rule, host)

    async def _request(self, head: Head, rule: Rule, host: str | None) -> None:
        """HTTP as to the server itself, on port 80. `host`: it has been reached by a tunnel."""
        named, port = head.host()
        if port != 80 or not (named == host if host else rule.covers(named)):
            if self._record is None:
                self._record = self._box.record("http", rule.host, 80, "", allowed=False)
            raise Refused(f"the Host field names another: {named}:{port}")
        if not head.target.startswith(b"/") and head.target != b"*":
            raise Refused("a target that is no path")
        if self._other is None:
            await self._reach(self._judge("http", named, port), named, port)
        await self._exchange(head, head.target)

    # ---- verdicts -------------------------------------------------------------------------------------------------

    def _judge(self, kind: str, host: str, port: int) -> Rule:
        """The rule that lets it through. Raises Refused."""
        rule = self._box.allow.find(host, port)
        self._record = self._box.record(kind, host, port, "", allowed=rule is not None)
        if rule is None:
            raise Refused(f"no rule allows {host}:{port}", 403)
        return rule

    def _deny(self, reason: str) -> None:
        if self._record is None:
            port = self._door.port
            rules = self._box.allow.rules
            host = rules[self._door.rule].host if self._door.kind == "tcp" else ""
            self._record = self._box.record(self._door.kind, host, port, "", allowed=False)
        self._record["verdict"], self._record["reason"] = "denied", reason[:300]

    async def _tell(self, refused: Refused) -> None:
        speaks_http = self._door.kind == "proxy" or self._door.port == 80
        if not speaks_http or self._answered:
            return
        body = f"sandbox_gym: {refused}\n".encode()
        head = f"HTTP/1.1 {refused.status} Refused\r\nContent-Type: text/plain\r\nConnection: close\r\n"
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await self._loop.sock_sendall(
                self._sock, f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
            )
            self._sock.shutdown(socket.SHUT_WR)
            self._deadline = self._loop.time() + 1.0
            while await self._loop.sock_recv(
                self._sock, _BLOCK
            ):  # what it still sends would reset the answer
                pass

    async def _reach(self, rule: Rule, host: str, port: int) -> None:
        """Connects to what the rule leads to. Raises Refused, OSError."""
        self._deadline = self._loop.time() + _REACHING
        assert self._record is not None
        if rule.to is not None:
            addresses, port = [rule.to[0]], rule.to[1]
        else:
            try:
                found = await self._box.look_up(host, port)
            except (OSError, UnicodeError) as error:
                raise _Unreachable(f"it could not be looked up: {error}", 502) from None
            addresses, other = names.public(found)
            if not addresses:
                raise Refused(f"{host} resolves to {other}, which is no public address", 403)
        failure: BaseException | str = "no address"
        for address in addresses[:_MOST_ADDRESSES]:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            self._other = socket.socket(family, socket.SOCK_STREAM)
            try:
                self._other.setblocking(False)
                self._other.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                await asyncio.wait_for(self._loop.sock_connect(self._other, (address, port)), _TO_REACH)
            except (OSError, asyncio.TimeoutError) as error:
                failure = error if str(error) else "no answer in time"
                self._other.close()
            else:
                self._touch()
                return
        raise _Unreachable(f"it could not be reached: {failure}", 502)

    # ---- bytes ----------------------------------------------------------------------------------------------------

    async def _tunnel(self, rule: Rule, host: str) -> None:
        assert self._other is not None
        other = self._other

        async def up() -> None:
            opening, _ = await self._opening(rule, host)
            await self._send_on(opening)
            await self._pump(self._sock, other, "sent")

        await _all(up(), self._pump(other, self._sock, "received"))

    async def _opening(self, rule: Rule, host: str | None) -> tuple[bytes, str]:
        """What the sandbox says first, and whom that names, if anyone: `host`, or (None) one that the rule covers. TLS,
        where the rule names no port. Raises Refused.
        """
        strict = rule.port is None
        block = self._ahead
        self._ahead = b""
        while True:
            if block and not sniffing.is_tls(block):
                if strict:
                    raise Refused(f"no TLS on port {self._door.port if self._door.rule >= 0 else 443}")
                return block, ""
            name = sniffing.server_name(block)
            if name is not None:
                break
            if len(block) > sniffing.MOST_HEAD + 1024:
                raise Refused("too long a ClientHello")
            more = await self._loop.sock_recv(self._sock, _BLOCK)
            if not more:
                raise _Over
            block += more
        of_address = as_address(rule.host) is not None
        matches = name == host if host is not None else bool(name) and rule.covers(name)
        if not (matches or of_address or (not name and not strict)):
            raise Refused(f"TLS names another server: {name or 'none'}")
        return block, name

    async def _exchange(self, head: Head, target: bytes) -> None:
        """One request and its answer, after which the connection ends: another request could name another host."""
        assert self._other is not None
        length = head.body()
        await self._send_on(head.forwarded(target))
        body = self._fixed(length) if length is not None else self._chunked()
        await _until(self._pump(self._other, self._sock, "received"), self._ask(body))

    async def _ask(self, body: Awaitable[None]) -> None:
        """What follows the body is not answered, but the end is seen, lest a server that keeps connections holds one
        for nobody.
        """
        await body
        while await self._loop.sock_recv(self._sock, _BLOCK):
            pass
        self._silence = _LEFT
        self._touch()

    async def _fixed(self, length: int) -> None:
        while length:
            block = await self._some(length)
            length -= len(block)
            await self._send_on(block)

    async def _chunked(self) -> None:
        while True:
            line = await self._line()
            if not _CHUNK.fullmatch(line):
                raise Refused("a malformed chunk")
            size = int(line, 16)
            await self._send_on(line + b"\r\n")
            await self._fixed(size)
            if await self._line():
                raise Refused("a malformed chunk, or fields after the last")
            await self._send_on(b"\r\n")
            if not size:
                return

    async def _head(self) -> Head:
        block, self._ahead = self._ahead, b""
        while (end := block.find(b"\r\n\r\n")) < 0:
            if len(block) > sniffing.MOST_HEAD:
                raise Refused("too long a head", 431)
            more = await self._loop.sock_recv(self._sock, 16 << 10)
            if not more:
                raise _Over
            block += more
        self._ahead = block[end + 4 :]
        return sniffing.head(block[:end])

    async def _line(self) -> bytes:
        line = b""
        while not line.endswith(b"\r\n"):
            if len(line) > 64:
                raise Refused("a malformed chunk")
            line += await self._some(1)
        return line[:-2]

    async def _some(self, most: int) -> bytes:
        """At least one byte of the sandbox's. Raises _Over at its end."""
        if not self._ahead:
            self._ahead = await self._loop.sock_recv(self._sock, _BLOCK)
            self._touch()
        if not self._ahead:
            raise _Over
        block, self._ahead = self._ahead[:most], self._ahead[most:]
        return block

    async def _send_on(self, block: bytes) -> None:
        assert self._other is not None and self._record is not None
        await self._loop.sock_sendall(self._other, block)
        self._record["sent"] += len(block)
        self._touch()

    async def _pump(self, source: socket.socket, target: socket.socket, direction: str) -> None:
        """All bytes, to the end, which is passed on. By way of a pipe: they never come into this process."""
        assert self._record is not None
        out, into = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            with contextlib.suppress(
                OSError
            ):  # this user's pipes hold as much as they may: then it is a smaller one
                fcntl.fcntl(into, fcntl.F_SETPIPE_SZ, _PIPE)
            while count := await self._splice(source, into, source, _PIPE):
                self._record[direction] += count
                while count:
                    count -= await self._splice(out, target, target, count)
                self._answered = True
                self._touch()
        finally:
            os.close(out)
            os.close(into)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    async def _splice(self, source: Any, target: Any, sock: socket.socket, most: int) -> int:
        """One splice(2), as soon as `sock`, the one of both that is no pipe, lets it. 0: the end."""
        inlet, outlet = (end if isinstance(end, int) else end.fileno() for end in (source, target))
        while True:
            try:
                return os.splice(inlet, outlet, most, flags=_NONBLOCK | _MOVE)
            except BlockingIOError:
                ready = self._loop.create_future()
                add, remove = (
                    (self._loop.add_reader, self._loop.remove_reader)
                    if sock is source
                    else (self._loop.add_writer, self._loop.remove_writer)
                )
                add(sock.fileno(), _set, ready)
                try:
                    await ready
                finally:
                    remove(sock.fileno())

    def _touch(self) -> None:
        self._deadline = self._loop.time() + self._silence


def _set(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


async def _all(*parts: Awaitable[None]) -> None:
    """Until all have ended, or one has failed."""
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        await asyncio.gather(*tasks)
    finally:
        await _stop(tasks)


async def _until(main: Awaitable[None], side: Awaitable[None]) -> None:
    """Until the first has ended, or either has failed."""
    tasks = [asyncio.ensure_future(main), asyncio.ensure_future(side)]
    try:
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()
        await tasks[0]
    finally:
        await _stop(tasks)


async def _stop(tasks: Sequence[asyncio.Future[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
