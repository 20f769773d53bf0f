"""An MCP server over stdio: a fresh sandbox, its tools, and the way back in time; it ends with its client.

`sandbox-gym mcp` serves it.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import sandbox_gym
from sandbox_gym.agents.calling import TIMEOUT, answer
from sandbox_gym.agents.tools import catalogue
from sandbox_gym.errors import BackendUnavailable, SandboxError
from sandbox_gym.network import Allow
from sandbox_gym.sandbox import Sandbox

if TYPE_CHECKING:
    from mcp.server.lowlevel import Server

_INSTRUCTIONS = (
    "A Linux sandbox of your own, with a shell and a Python that keeps its variables. Nothing outside it can be "
    "reached or harmed. checkpoint keeps a moment, memory and disk; rewind goes back to it."
)


def make_server(sandbox: Sandbox, *, timeout: float = TIMEOUT) -> Server[Any]:
    """The server of a sandbox's tools, to be run over any transport. It doesn't end the sandbox.

    A call whose sandbox is gone is an error that the model reads, since it can rewind.

    Raises BackendUnavailable where the mcp package isn't installed.
    """
    try:
        import anyio.to_thread
        from mcp import types
        from mcp.server.lowlevel import Server
    except ModuleNotFoundError:
        raise BackendUnavailable(
            "the mcp package is not installed: pip install 'sandbox-gym[agents]'"
        ) from None

    async def list_tools(*_: Any) -> types.ListToolsResult:
        tools = catalogue(checkpoints=True).values()
        return types.ListToolsResult(
            tools=[
                types.Tool(name=tool.name, description=tool.description, input_schema=tool.schema())
                for tool in tools
            ]
        )

    async def call(_: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        options: dict[str, Any] = {"checkpoints": True, "timeout": timeout}
        work = partial(answer, sandbox, params.name, params.arguments or {}, **options)
        try:
            # Abandoned when the client goes: the sandbox's end ends the call.
            text, failed = await anyio.to_thread.run_sync(work, abandon_on_cancel=True)
        except SandboxError as error:
            text, failed = f"Error: {error}", True
        content = types.TextContent(type="text", text=text.encode("utf-8", "backslashreplace").decode())
        return types.CallToolResult(content=[content], is_error=failed)

    return Server(
        "sandbox-gym",
        version=sandbox_gym.__version__,
        instructions=_INSTRUCTIONS,
        on_list_tools=list_tools,
        on_call_tool=call,
    )


def serve(options: argparse.Namespace) -> int:
    """Serves over stdin and stdout until the client closes them, or Ctrl-C. `options`: image, template, allow. The exit
    status: 130 after Ctrl-C.
    """
    try:
        import anyio

        with Sandbox.create(
            image=sandbox_gym.Template.get(options.template) if options.template else options.image,
            network=Allow(options.allow) if options.allow else None,
        ) as sandbox:
            anyio.run(_serve, make_server(sandbox))
    except ModuleNotFoundError as error:
        print(f"MCP needs {error.name}: pip install 'sandbox-gym[agents]'", file=sys.stderr)
        return 1
    except (SandboxError, OSError, KeyError, ValueError) as error:
        print(error.args[0] if error.args else error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


async def _serve(server: Server[Any]) -> None:
    from sandbox_gym.agents.stdio import messages

    async with messages() as (reading, writing):
        await server.run(reading, writing, server.create_initialization_options())
