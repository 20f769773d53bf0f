"""B 3. Each episode's agent has tools that are bound to its own copy: in the OpenAI Agents SDK, and in a plain loop of
function calls. The client is shared between threads.

The models here follow a script, so that the example needs no network; a real one goes in their place.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from agents import Agent, Model, ModelResponse, RunConfig, Runner, Usage
from openai.types.responses import ResponseFunctionToolCall, ResponseOutputMessage, ResponseOutputText

from sandbox_gym import Sandbox
from sandbox_gym.agents import call_tool, function_tools, sandbox_tools

Call = tuple[str, dict[str, Any]]
TESTS = "from median import median\nassert median([3, 1, 2]) == 2\nassert median([5]) == 5\nprint('passed')\n"
BROKEN = "def median(numbers):\n    return numbers[len(numbers) // 2]\n"
REPAIR: list[Call] = [
    ("list_files", {}),
    ("shell", {"command": "python3 test_median.py", "timeout": 20}),
    ("read_file", {"path": "median.py"}),
    ("edit_file", {"path": "median.py", "old": "numbers[len", "new": "sorted(numbers)[len"}),
    ("shell", {"command": "python3 test_median.py", "timeout": 20}),
    ("git", {"args": ["diff", "--stat"]}),
]


class Scripted(Model):
    """A model of the SDK's own kind: makes its calls one by one, then says what it was told last but one."""

    def __init__(self, calls: list[Call]) -> None:
        self._calls = list(calls)

    async def get_response(self, *args: Any, **kwargs: Any) -> ModelResponse:
        items = kwargs["input"] if "input" in kwargs else args[1]
        told = [item["output"] for item in items if item.get("type") == "function_call_output"]
        output: ResponseFunctionToolCall | ResponseOutputMessage
        if self._calls:
            name, arguments = self._calls.pop(0)
            output = ResponseFunctionToolCall(
                type="function_call", call_id=str(len(told)), name=name, arguments=json.dumps(arguments)
            )
        else:
            text = ResponseOutputText(type="output_text", text=told[-2], annotations=[])
            output = ResponseOutputMessage(
                id="last", type="message", role="assistant", status="completed", content=[text]
            )
        return ModelResponse(output=[output], usage=Usage(), response_id=None)

    def stream_response(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        raise NotImplementedError


async def with_the_sdk(copy: Sandbox) -> str:
    agent = Agent(name="engineer", model=Scripted(REPAIR), tools=[*sandbox_tools(copy)])
    run = await Runner.run(agent, "Make the tests pass.", run_config=RunConfig(tracing_disabled=True))
    return str(run.final_output)


def with_a_plain_loop(copy: Sandbox) -> str:
    tools = function_tools()  # what a chat completion request takes as its tools
    assert {tool["function"]["name"] for tool in tools} >= {name for name, _ in REPAIR}
    told = [call_tool(copy, name, json.dumps(arguments)) for name, arguments in REPAIR]
    return told[-2]


async def side_by_side(copies: list[Sandbox]) -> list[str]:
    return list(await asyncio.gather(*map(with_the_sdk, copies)))


def main() -> None:
    with Sandbox.create(name="task-base") as base:
        base.write_file("median.py", BROKEN)
        base.write_file("test_median.py", TESTS)
        base.shell("git init -q && git add -A && git -c user.name=a -c user.email=a@a commit -qm base")
        episodes = base.fork(6, prefix="ep-")
        try:
            print("Agents SDK:", asyncio.run(side_by_side(episodes[:3])))
            with ThreadPoolExecutor() as pool:
                print("plain loop:", list(pool.map(with_a_plain_loop, episodes[3:])))
            print("the base is as it was:", base.read_text("median.py") == BROKEN)
        finally:
            for episode in episodes:
                episode.terminate()


if __name__ == "__main__":
    main()
