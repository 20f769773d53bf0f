"""Plain function calling: tool definitions for a request, and the answer to a call that a model made."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sandbox_gym import _records
from sandbox_gym._text import cut
from sandbox_gym.agents.tools import Bounds, Refused, Tool, catalogue
from sandbox_gym.errors import LimitExceeded, SandboxDied, SandboxError, SnapshotError
from sandbox_gym.sandbox import Sandbox

TIMEOUT = 120.0  # seconds
MAX_OUTPUT = 16_384  # characters
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "array": (list, tuple),
}


def function_tools(*, checkpoints: bool = False) -> list[dict[str, Any]]:
    """The tools as the `tools` of a chat completion request: `{"type": "function", "function": {...}}` each.

    `checkpoints`: with tools that keep a moment and go back to it.
    """
    return [
        {
            "type": "function",
            "function": {"name": tool.name, "description": tool.description, "parameters": tool.schema()},
        }
        for tool in catalogue(checkpoints=checkpoints).values()
    ]


def call_tool(
    sandbox: Sandbox,
    name: str,
    arguments: str | Mapping[str, Any],
    *,
    checkpoints: bool = False,
    timeout: float = TIMEOUT,
    max_output: int = MAX_OUTPUT,
) -> str:
    """Does what a model asked for, and returns the text to answer it with. Thread-safe.

    `arguments`: the model's JSON, or what is in it. `timeout`: seconds that the call may take; a model can ask for
    less. `max_output`: characters of the answer; what is past that is cut out of its middle, and the answer says so.

    Whatever the model can mend or live with is text: a tool or an argument that isn't there, a file that is missing, an
    exit code, an exception, a time-out, a state of which no checkpoint can be taken.

    Raises:
        SandboxDied, LimitExceeded, SandboxTimeout: the sandbox is gone, and with it the episode.

    """
    options: dict[str, Any] = {"checkpoints": checkpoints, "timeout": timeout, "max_output": max_output}
    return answer(sandbox, name, arguments, **options)[0]


def answer(
    sandbox: Sandbox,
    name: str,
    arguments: str | Mapping[str, Any],
    *,
    checkpoints: bool,
    timeout: float = TIMEOUT,
    max_output: int = MAX_OUTPUT,
) -> tuple[str, bool]:
    """`call_tool`'s text, and whether the call was refused."""
    _records.check_seconds("timeout", timeout)
    if max_output < 256:
        raise ValueError(f"max_output is 256 characters or more, not {max_output}")
    refused = True
    try:
        tool = _find(catalogue(checkpoints=checkpoints), name)
        text = tool.run(sandbox, _check(tool, _parse(arguments)), Bounds(timeout, max_output))
        refused = False
    except (LimitExceeded, SnapshotError) as error:
        if sandbox.status != "running":
            raise
        text = f"Error: {error}"
    except SandboxError:
        raise
    except Refused as error:
        text = f"Error: {error}"
    except (
        OSError,
        ValueError,
    ) as error:  # a missing file; a NUL in a path, half of a character in a command
        text = f"Error: {type(error).__name__}: {error}"
    if sandbox.status == "dead":
        raise SandboxDied(f"sandbox {sandbox.name}: {name} ended it, and with it the episode: {text}")
    return cut(text, max_output), refused


def _find(tools: Mapping[str, Tool], name: str) -> Tool:
    if name not in tools:
        raise Refused(f"there is no tool {name!r:.100}: there are {', '.join(tools)}")
    return tools[name]


def _parse(arguments: str | Mapping[str, Any]) -> dict[str, Any]:
    """Optional arguments that a model gives as null are left out."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise Refused(f"the arguments are no JSON: {error}") from None
    if not isinstance(arguments, Mapping):
        raise Refused(f"the arguments are a JSON object, not a {type(arguments).__name__}")
    return {str(key): value for key, value in arguments.items() if value is not None}


def _check(tool: Tool, arguments: dict[str, Any]) -> dict[str, Any]:
    missing = [name for name in tool.required if name not in arguments]
    unknown = [name for name in arguments if name not in tool.parameters]
    if missing or unknown:
        told = [f"{', '.join(missing)} is missing"] if missing else []
        told += [f"there is no {', '.join(unknown)}"] if unknown else []
        raise Refused(f"{tool.name} takes {', '.join(tool.parameters)}: {'; '.join(told)}")
    for name, value in arguments.items():
        _check_value(f"{tool.name}'s {name}", value, tool.parameters[name])
    return arguments


def _check_value(what: str, value: Any, schema: Mapping[str, Any]) -> None:
    kind: str = schema["type"]
    fits = isinstance(value, _TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))
    if not fits:
        raise Refused(f"{what} is of type {kind}, not {value!r:.100}")
    if "minimum" in schema and not value >= schema["minimum"]:
        raise Refused(f"{what} is {schema['minimum']} or more, not {value}")
    if "exclusiveMinimum" in schema and not value > schema["exclusiveMinimum"]:
        raise Refused(f"{what} is above {schema['exclusiveMinimum']}, not {value}")
    if kind == "array":
        for item in value:
            _check_value(f"each of {what}", item, schema["items"])
