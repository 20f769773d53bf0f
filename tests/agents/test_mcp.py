"""The MCP server as a client meets it: the mcp package's own client, the real process, its stdin and stdout."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from mcp import ClientSession, StdioServerParameters, stdio_client, types

import sandbox_gym
from sandbox_gym.cli import main
from tests.conftest import descendants

ROOT = Path(sandbox_gym.__file__).parent.parent


@asynccontextmanager
async def session(*options: str) -> AsyncIterator[ClientSession]:
    home = {"PYTHONPATH": str(ROOT)}
    arguments = ["-m", "sandbox_gym", "mcp", *options]
    server = StdioServerParameters(command=sys.executable, args=arguments, env=home, cwd=str(ROOT))
    async with stdio_client(server) as (reading, writing), ClientSession(reading, writing) as client:
        await client.initialize()
        yield client


async def call(client: ClientSession, name: str, **arguments: Any) -> tuple[str, bool]:
    result = await client.call_tool(name, arguments)
    assert isinstance(result, types.CallToolResult)
    (content,) = result.content
    assert isinstance(content, types.TextContent)
    return content.text, bool(result.is_error)


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Within a minute, and with no process left a moment later."""
    before = descendants(os.getpid())
    asyncio.run(asyncio.wait_for(work(), 60))
    deadline = time.monotonic() + 5
    while descendants(os.getpid()) - before and time.monotonic() < deadline:
        time.sleep(0.02)
    assert descendants(os.getpid()) <= before


def test_a_client_works_in_the_sandbox_and_goes_back() -> None:
    async def work() -> None:
        async with session() as client:
            tools = (await client.list_tools()).tools
            names = [tool.name for tool in tools]
            assert names[:2] == ["shell", "read_file"]
            assert names[-2:] == ["checkpoint", "rewind"]
            assert tools[0].input_schema["required"] == ["command"]
            assert await call(client, "run_code", code="x = 1; print('on its own stdout')") == (
                "on its own stdout",
                False,
            )
            assert await call(client, "write_file", path="kept", content="1") == (
                "Wrote 1 bytes to kept.",
                False,
            )
            await call(client, "checkpoint", label="before")
            await call(client, "run_code", code="x = 2; import os; os.remove('kept')")
            assert (await call(client, "read_file", path="kept"))[1]
            await call(client, "rewind", label="before")
            assert await call(client, "run_code", code="x, open('kept').read()") == ("(1, '1')", False)
            assert (await call(client, "shell", command="exit 3")) == ("[exit code 3]", False)
            assert (await call(client, "shell"))[1]
            assert (await call(client, "rm"))[1]

    run(work)


def test_a_sandbox_that_died_is_an_error_that_rewind_mends() -> None:
    async def work() -> None:
        async with session() as client:
            await call(client, "checkpoint", label="alive")
            text, failed = await call(client, "run_code", code="import os; os._exit(1)")
            assert failed
            assert "gone" in text
            assert (await call(client, "shell", command="true"))[1]
            assert not (await call(client, "rewind"))[1]
            assert await call(client, "shell", command="echo back") == ("back", False)

    run(work)


def test_it_ends_with_a_client_that_does_not_wait() -> None:
    async def work() -> None:
        async with session() as client:
            waiting = asyncio.create_task(call(client, "shell", command="sleep 50"))
            await client.send_ping()  # its answer comes after the call has begun
            waiting.cancel()

    started = time.monotonic()
    run(work)
    assert time.monotonic() - started < 20


def test_what_cannot_start_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mcp", "--template", "none-of-that-name"]) == 1
    assert "`sandbox-gym template build none-of-that-name` makes one" in capsys.readouterr().err
    assert main(["mcp", "--allow", "not a host"]) == 1
    assert capsys.readouterr().err
