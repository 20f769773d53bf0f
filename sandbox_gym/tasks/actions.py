"""What an agent's text asks for: a tool call in JSON, or else a command line."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sandbox_gym.api import CodeResult, ExecResult
from sandbox_gym.errors import SandboxTimeout
from sandbox_gym.sandbox import Sandbox

SUBMIT = "submit"
_MAX_READ = 1 << 20  # bytes
TOOLS: Mapping[str, tuple[str, ...]] = {
    "shell": ("command",),
    "read": ("path",),
    "write": ("path", "content"),
    "edit": ("path", "old", "new"),
    "run_code": ("code",),
    "git": ("args",),
    SUBMIT: (),
}
"""The tools, and the arguments that each takes: text, all of them needed."""


class BadCall(Exception):
    """The text is a tool call that can't be made. The agent is told why."""


@dataclass(frozen=True)
class Call:
    tool: str
    args: Mapping[str, str]


@dataclass(frozen=True)
class Did:
    """What a call has given. `output` is for the agent; `facts` go into the info of a step."""

    output: str
    facts: dict[str, Any]


def parse(text: str) -> Call:
    """`{"tool": "read", "path": "a.py"}`, `submit`, or a command line, which is any other text. Raises BadCall."""
    stripped = text.strip()
    if stripped == SUBMIT:
        return Call(SUBMIT, {})
    call = _object(stripped)
    if call is None or "tool" not in call:
        return Call("shell", {"command": text})
    tool = call.pop("tool")
    if not isinstance(tool, str) or tool not in TOOLS:
        raise BadCall(f"there is no tool {tool!r:.80}: there are {', '.join(TOOLS)}")
    args = call.pop("args") if set(call) == {"args"} and isinstance(call["args"], dict) else call
    if set(args) != set(TOOLS[tool]) or not all(isinstance(value, str) for value in args.values()):
        wanted = ", ".join(TOOLS[tool]) or "no arguments"
        raise BadCall(f"{tool} takes {wanted}, as text; not {', '.join(map(str, args)) or 'nothing'}")
    return Call(tool, args)


def _object(text: str) -> dict[str, Any] | None:
    if not text.startswith("{"):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def act(box: Sandbox, call: Call, *, cwd: str, timeout: float) -> Did:
    """Does what a call asks for, but for `submit`. What goes wrong inside is told, not raised.

    Raises SandboxTimeout, SandboxDied, LimitExceeded: the call has ended the sandbox.
    """
    try:
        os.fsencode("".join(call.args.values()))
        if "\0" in "".join(
            value for name, value in call.args.items() if name not in ("content", "old", "new")
        ):
            raise ValueError("a null character in it")
        return _ACTS[call.tool](box, call.args, cwd, timeout)
    except (OSError, ValueError, BadCall) as error:
        if box.status == "dead":
            raise
        return Did(f"[{call.tool} failed: {error}]", {"ok": False, "timed_out": False})


def _shell(box: Sandbox, args: Mapping[str, str], cwd: str, timeout: float) -> Did:
    return _ran(box.shell(args["command"], timeout, cwd=cwd), timeout)


def _git(box: Sandbox, args: Mapping[str, str], cwd: str, timeout: float) -> Did:
    return _ran(box.exec(["git", *shlex.split(args["args"])], timeout, cwd=cwd), timeout)


def _run_code(box: Sandbox, args: Mapping[str, str], cwd: str, timeout: float) -> Did:
    result = box.run_code(args["code"], timeout)
    if box.status == "dead":
        raise SandboxTimeout(f"sandbox {box.name}: {result.error or 'the code ended it'}")
    return _ran(result, timeout)


def _read(box: Sandbox, args: Mapping[str, str], cwd: str, timeout: float) -> Did:
    data = box.read_file(os.path.join(cwd, args["path"]), max_bytes=_MAX_READ)
    return Did(data.decode("utf-8", "replace"), _FINE.copy())


def _write(box: Sandbox, args: Mapping[str, str], cwd: str, timeout: float) -> Did:
    box.write_file(os.path.join(cwd, args["path"]), args["content"])
    return Did(f"[wrote {args['path']}]", _FINE.copy())


def _edit(box: Sandbox, args: Mapping[str, str], cwd: str, timeout: float) -> Did:
    path = os.path.join(cwd, args["path"])
    text = box.read_file(path, max_bytes=_MAX_READ).decode()
    count = text.count(args["old"]) if args["old"] else 0
    if count != 1:
        raise BadCall(f"{args['path']} has the old text {count} times: give it so that it is there once")
    box.write_file(path, text.replace(args["old"], args["new"]))
    return Did(f"[edited {args['path']}]", _FINE.copy())


_FINE: dict[str, Any] = {"ok": True, "timed_out": False}
_ACTS: dict[str, Callable[[Sandbox, Mapping[str, str], str, float], Did]] = {
    "shell": _shell,
    "read": _read,
    "write": _write,
    "edit": _edit,
    "run_code": _run_code,
    "git": _git,
}


def _ran(result: ExecResult | CodeResult, timeout: float) -> Did:
    parts = [result.stdout, result.stderr]
    facts: dict[str, Any] = {"ok": result.ok, "timed_out": result.timed_out}
    if isinstance(result, ExecResult):
        facts["exit_code"] = result.exit_code
        if result.limit:
            parts.append(f"[killed at the limit of {result.limit}]")
        elif result.exit_code and not result.timed_out:
            parts.append(f"[exit code {result.exit_code}]")
    else:
        facts["error"] = result.error.type if result.error else None
        parts += [result.value or "", result.error.traceback or str(result.error) if result.error else ""]
    if result.timed_out:
        parts.append(f"[timed out after {timeout:g} s]")
    return Did("\n".join(part.rstrip("\n") for part in parts if part), facts)
