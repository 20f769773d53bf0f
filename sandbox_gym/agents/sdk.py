"""The tools for the OpenAI Agents SDK."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from sandbox_gym.agents.calling import MAX_OUTPUT, TIMEOUT, call_tool
from sandbox_gym.agents.tools import Tool, catalogue
from sandbox_gym.errors import BackendUnavailable
from sandbox_gym.sandbox import Sandbox

if TYPE_CHECKING:
    from agents import FunctionTool


def sandbox_tools(
    sandbox: Sandbox, *, checkpoints: bool = False, timeout: float = TIMEOUT, max_output: int = MAX_OUTPUT
) -> list[FunctionTool]:
    """Tools for `Agent(tools=...)`, bound to a sandbox: shell, read_file, write_file, edit_file, list_files, run_code,
    git; with `checkpoints` also checkpoint and rewind. What they answer, and the options, are those of `call_tool`.

    Calls run in threads, so that agents on other sandboxes go on meanwhile. One that is cancelled ends by its timeout.
    Where the sandbox is gone, `Runner.run` raises the SDK's UserError, and its `__cause__` is the SandboxError.

    Raises BackendUnavailable where the SDK isn't installed.
    """
    try:
        from agents import FunctionTool
    except ModuleNotFoundError:
        raise BackendUnavailable(
            "the OpenAI Agents SDK is not installed: pip install 'sandbox-gym[agents]'"
        ) from None

    def bound(tool: Tool) -> FunctionTool:
        async def invoke(_: Any, arguments: str) -> str:
            options: dict[str, Any] = {
                "checkpoints": checkpoints,
                "timeout": timeout,
                "max_output": max_output,
            }
            return await asyncio.to_thread(call_tool, sandbox, tool.name, arguments, **options)

        # Not in strict mode, which has no optional arguments.
        return FunctionTool(tool.name, tool.description, tool.schema(), invoke, strict_json_schema=False)

    return [bound(tool) for tool in catalogue(checkpoints=checkpoints).values()]
