"""The OpenAI Agents SDK's own loop, with a model that follows a script: nothing leaves this process."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from agents import Agent, Model, ModelResponse, RunConfig, Runner, Usage, UserError
from openai.types.responses import (
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseOutputText,
)

from sandbox_gym.agents import sandbox_tools
from sandbox_gym.errors import SandboxDied
from sandbox_gym.sandbox import Sandbox

Calls = list[tuple[str, dict[str, Any]]]


class Scripted(Model):
    """A turn is a list of tool calls; after the last it says what it has been told."""

    def __init__(self, *turns: Calls) -> None:
        self._turns = list(turns)
        self.told: list[str] = []
        self.offered: list[str] = []

    async def get_response(self, *args: Any, **kwargs: Any) -> ModelResponse:
        names = ("system_instructions", "input", "model_settings", "tools")
        given = dict(zip(names, args)) | kwargs
        self.offered = [tool.name for tool in given["tools"]]
        items = given["input"]
        self.told = [item["output"] for item in items if item.get("type") == "function_call_output"]
        output: list[Any]
        if self._turns:
            output = [
                ResponseFunctionToolCall(
                    type="function_call",
                    call_id=f"{len(self.told)}-{i}",
                    name=name,
                    arguments=json.dumps(arguments),
                )
                for i, (name, arguments) in enumerate(self._turns.pop(0))
            ]
        else:
            text = ResponseOutputText(type="output_text", text=self.told[-1], annotations=[])
            output = [
                ResponseOutputMessage(
                    id="last", type="message", role="assistant", status="completed", content=[text]
                )
            ]
        return ModelResponse(output=output, usage=Usage(), response_id=None)

    def stream_response(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        raise AssertionError("these agents don't stream")


def agent(box: Sandbox, *turns: Calls, **options: Any) -> tuple[Agent[Any], Scripted]:
    model = Scripted(*turns)
    return Agent(name="worker", model=model, tools=[*sandbox_tools(box, **options)]), model


async def run(worker: Agent[Any]) -> str:
    result = await Runner.run(worker, "Repair it.", run_config=RunConfig(tracing_disabled=True))
    return str(result.final_output)


def test_an_agent_repairs_a_program(box: Sandbox) -> None:
    box.write_file("add.py", "def add(a, b):\n    return a - b\n")
    worker, model = agent(
        box,
        [("shell", {"command": "python3 -c 'from add import add; assert add(1, 2) == 3'"})],
        [("read_file", {"path": "add.py"}), ("list_files", {})],
        [("edit_file", {"path": "add.py", "old": "a * b", "new": "a + b"})],
        [("edit_file", {"path": "add.py", "old": "a - b", "new": "a + b"})],
        [("run_code", {"code": "exec(open('add.py').read()); add(1, 2)"})],
    )
    assert asyncio.run(run(worker)) == "3"
    assert model.offered == ["shell", "read_file", "write_file", "edit_file", "list_files", "run_code", "git"]
    assert "AssertionError" in model.told[0]
    assert "a - b" in model.told[1]
    assert "0 times" in model.told[3]
    assert box.read_text("add.py") == "def add(a, b):\n    return a + b\n"


def test_agents_run_side_by_side_on_copies(box: Sandbox) -> None:
    box.write_file("n", "0")
    copies = box.fork(3)
    try:
        workers = []
        for i, copy in enumerate(copies):
            waiting = "touch arrived; sleep 1; cat n"
            write = ("write_file", {"path": "n", "content": str(i)})
            workers.append(agent(copy, [write], [("shell", {"command": waiting})])[0])

        async def all_of_them() -> list[str]:
            return await asyncio.gather(*map(run, workers))

        started = time.monotonic()
        assert asyncio.run(all_of_them()) == ["0", "1", "2"]
        assert time.monotonic() - started < 2.9  # not one after the other
        assert box.read_text("n") == "0"
    finally:
        for copy in copies:
            copy.terminate()


def test_edits_of_one_turn_are_all_there(box: Sandbox) -> None:
    box.write_file("page", "".join(f"<{i}>" for i in range(12)))
    edits: Calls = [("edit_file", {"path": "page", "old": f"<{i}>", "new": f"{i};"}) for i in range(12)]
    worker, _ = agent(box, edits, [("read_file", {"path": "page"})])
    assert asyncio.run(run(worker)) == "".join(f"{i};" for i in range(12))


def test_the_loop_that_lost_its_sandbox_hears_of_it(box: Sandbox) -> None:
    worker, _ = agent(box, [("run_code", {"code": "import os; os._exit(1)"})])
    with pytest.raises(UserError) as caught:
        asyncio.run(run(worker))
    assert isinstance(caught.value.__cause__, SandboxDied)


def test_options_reach_the_tools(box: Sandbox) -> None:
    options: dict[str, Any] = {"checkpoints": True, "timeout": 0.5, "max_output": 256}
    turns: list[Calls] = [
        [("checkpoint", {"label": "first"})],
        [("shell", {"command": "touch made; sleep 60"})],
        [("rewind", {})],
        [("shell", {"command": "ls; seq 1000"})],
    ]
    worker, model = agent(box, *turns, **options)
    said = asyncio.run(run(worker))
    assert "timed out after 0.5 s" in model.told[1]
    assert "made" not in said
    assert len(said) <= 256


def test_a_sandbox_ended_from_outside_frees_an_agent_that_waits(box: Sandbox) -> None:
    worker, _ = agent(
        box, [("run_code", {"code": "print('begun', flush=True); import time; time.sleep(60)"})]
    )

    async def cut_short() -> None:
        running = asyncio.create_task(run(worker))
        while box._lock.acquire(blocking=False):  # until the call holds it
            box._lock.release()
            await asyncio.sleep(0.01)
        await asyncio.to_thread(box.terminate)
        await running

    started = time.monotonic()
    with pytest.raises(UserError, match="terminated"):
        asyncio.run(cut_short())
    assert time.monotonic() - started < 20
