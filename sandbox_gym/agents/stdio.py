"""MCP's messages over stdin and stdout, one a line.

The mcp package's own transport is silent about a line that is no message, so that whoever sent it waits for ever; and
its threads are waited for by Python at its end, so that Ctrl-C ends nothing while stdin is open.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import CancelledError
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, BinaryIO, TypeVar

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp import types
from mcp.shared.message import SessionMessage

_T = TypeVar("_T")
Reading = MemoryObjectReceiveStream["SessionMessage | Exception"]
Writing = MemoryObjectSendStream[SessionMessage]


@asynccontextmanager
async def messages() -> AsyncIterator[tuple[Reading, Writing]]:
    """What an mcp server reads until stdin ends, and what it writes to; for asyncio. A line that is no message is
    answered here. Ctrl-C cancels the block that this is around, which then raises KeyboardInterrupt.
    """
    arriving, reading = anyio.create_memory_object_stream["SessionMessage | Exception"](0)
    writing, leaving = anyio.create_memory_object_stream[SessionMessage](0)
    loop = asyncio.get_running_loop()

    async def deliver(line: bytes) -> None:
        item = parse(line)
        if isinstance(item, types.JSONRPCError):
            await writing.send(SessionMessage(item))
        else:
            await arriving.send(SessionMessage(item))

    def take(source: BinaryIO) -> None:
        with suppress(OSError):  # a terminal that has gone
            for line in source:
                if line.strip() and not _ran(deliver(line), loop):
                    return
        _tell(arriving.close, loop)

    def give(sink: BinaryIO) -> None:
        """In ASCII, where half a character that a client sent as its id can stand."""
        try:
            while (sent := _ran(leaving.receive(), loop)) is not None:
                message = sent[0].message.model_dump(mode="json", by_alias=True, exclude_unset=True)
                sink.write(json.dumps(message).encode() + b"\n")
                sink.flush()
        except OSError:  # nobody reads
            _tell(stop, loop)
        _tell(given.set, loop)

    def stop() -> None:
        leaving.close()
        scope.cancel()

    given = anyio.Event()
    with _claimed() as wires, _interrupted_by(stop, loop), anyio.CancelScope() as scope:
        for work, wire in zip((take, give), wires):
            threading.Thread(target=work, args=(wire,), name="stdio", daemon=True).start()
        async with arriving, reading, writing, leaving:
            yield reading, writing
            writing.close()
            await given.wait()


def parse(line: bytes) -> types.JSONRPCMessage:
    """The message, or the error to answer with. Half a character ("\\ud800") is let through, for the tool to refuse."""
    try:
        value = json.loads(line.decode("utf-8", "replace"))
    except (ValueError, RecursionError) as error:
        return _refusal(None, types.PARSE_ERROR, f"this line is no JSON: {error}")
    try:
        message = types.jsonrpc_message_adapter.validate_python(value, by_name=False)
    except ValueError:
        return _refusal(value, types.INVALID_REQUEST, "this is no message of JSON-RPC 2.0")
    if isinstance(message, types.JSONRPCNotification) and "id" in value:  # it waits for an answer
        return _refusal(None, types.INVALID_REQUEST, "a request's id is a string or an integer")
    return message


def _refusal(request: Any, code: int, text: str) -> types.JSONRPCError:
    """With the request's id where it has one. An answer's id is of a request of ours: it is not given back."""
    asked = isinstance(request, dict) and not {"result", "error"} & request.keys()
    id = request.get("id") if asked else None
    if type(id) not in (str, int):
        id = None
    return types.JSONRPCError(jsonrpc="2.0", id=id, error=types.ErrorData(code=code, message=text))


def _ran(work: Coroutine[Any, Any, _T], loop: asyncio.AbstractEventLoop) -> tuple[_T] | None:
    """What it returned in the loop's thread, from another. None: the server has ended, or does."""
    try:
        return (asyncio.run_coroutine_threadsafe(work, loop).result(),)
    except (
        RuntimeError,
        CancelledError,
        anyio.EndOfStream,
        anyio.BrokenResourceError,
        anyio.ClosedResourceError,
    ):
        work.close()  # a closed loop has not begun it
        return None


def _tell(act: Callable[[], object], loop: asyncio.AbstractEventLoop) -> None:
    with suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(act)


@contextmanager
def _interrupted_by(stop: Callable[[], object], loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Asyncio's own handler does not wake a loop that is about to wait, and cancels only once."""
    seen: list[bool] = []

    def interrupt() -> None:
        seen.append(True)
        stop()

    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # a shell's background job
        loop.add_signal_handler(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
    if seen:
        raise KeyboardInterrupt


@contextmanager
def _claimed() -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Stdin and stdout, which meanwhile are nothing, and stderr, to the rest of this process and to its children."""
    wires = [os.dup(number) for number in (0, 1)]  # not closed: a thread may still wait there
    nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    try:
        yield os.fdopen(wires[0], "rb", closefd=False), os.fdopen(wires[1], "wb", closefd=False)
    finally:
        for number, wire in enumerate(wires):
            os.dup2(wire, number)
