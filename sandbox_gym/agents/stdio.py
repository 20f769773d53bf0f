"""MCP's messages over stdin and stdout, one a line.

The mcp package's own transport is silent about a line that is no message, so that whoever sent it waits for ever; and
it reads in a thread that Python waits for at its end, so that Ctrl-C ends nothing while stdin is open.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import CancelledError
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, BinaryIO

import anyio
import anyio.to_thread
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp import types
from mcp.shared.message import SessionMessage

Reading = MemoryObjectReceiveStream["SessionMessage | Exception"]
Writing = MemoryObjectSendStream[SessionMessage]


@asynccontextmanager
async def messages() -> AsyncIterator[tuple[Reading, Writing]]:
    """What an mcp server reads until stdin ends, and what it writes to; for asyncio. A line that is no message is
    answered here.
    """
    arriving, reading = anyio.create_memory_object_stream["SessionMessage | Exception"](0)
    writing, leaving = anyio.create_memory_object_stream[SessionMessage](0)
    loop = asyncio.get_running_loop()

    def write(data: bytes) -> None:
        sink.write(data)
        sink.flush()

    async def deliver(line: bytes) -> None:
        item = parse(line)
        if isinstance(item, types.JSONRPCError):
            await writing.send(SessionMessage(item))
        else:
            await arriving.send(SessionMessage(item))

    def take(source: BinaryIO) -> None:
        with suppress(OSError):  # a terminal that has gone
            for line in source:
                if line.strip() and not _run(deliver(line), loop):
                    return
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(arriving.close)

    with _claimed() as (source, sink):
        async with arriving, reading, writing, leaving, anyio.create_task_group() as tasks:
            tasks.start_soon(_put, leaving, write)
            threading.Thread(target=take, args=(source,), name="stdin", daemon=True).start()
            yield reading, writing


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


def _run(work: Coroutine[Any, Any, None], loop: asyncio.AbstractEventLoop) -> bool:
    """In the loop's thread, from another. False: the server has ended, or does."""
    try:
        asyncio.run_coroutine_threadsafe(work, loop).result()
    except (RuntimeError, CancelledError, anyio.BrokenResourceError, anyio.ClosedResourceError):
        work.close()  # a closed loop has not begun it
        return False
    return True


async def _put(leaving: MemoryObjectReceiveStream[SessionMessage], write: Callable[[bytes], Any]) -> None:
    """In ASCII, where half a character that a client sent as its id can stand."""
    async for item in leaving:
        message = item.message.model_dump(mode="json", by_alias=True, exclude_unset=True)
        await anyio.to_thread.run_sync(write, json.dumps(message).encode() + b"\n", abandon_on_cancel=True)


@contextmanager
def _claimed() -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Stdin and stdout, which meanwhile are nothing, and stderr, to the rest of this process and to its children."""
    wires = [os.dup(number) for number in (0, 1)]  # not closed: the thread may still wait there
    nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    try:
        yield os.fdopen(wires[0], "rb", closefd=False), os.fdopen(wires[1], "wb", closefd=False)
    finally:
        for number, wire in enumerate(wires):
            os.dup2(wire, number)
