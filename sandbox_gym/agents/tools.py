"""The tools themselves: each a name, a JSON schema, and what it does in a sandbox."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sandbox_gym._text import cut, show
from sandbox_gym.errors import LimitExceeded
from sandbox_gym.sandbox import Sandbox

_MAX_FILE = 16 << 20  # bytes that read_file and edit_file look at
_MAX_LISTED = 10_000


class Refused(Exception):
    """What the model asked for can't be done as it was asked; the message is for the model."""


@dataclass(frozen=True)
class Bounds:
    """`timeout`: seconds that a call may take; `most`: characters that it may answer."""

    timeout: float
    most: int


Arguments = Mapping[str, Any]
Run = Callable[[Sandbox, Arguments, Bounds], str]


@dataclass(frozen=True)
class Tool:
    """`parameters`: name to JSON schema; `required`: those that a call must give."""

    name: str
    description: str
    parameters: Mapping[str, Mapping[str, Any]]
    required: Sequence[str]
    run: Run

    def schema(self) -> dict[str, Any]:
        """The arguments, as a JSON schema."""
        return {
            "type": "object",
            "properties": {name: dict(schema) for name, schema in self.parameters.items()},
            "required": list(self.required),
            "additionalProperties": False,
        }


def _text(description: str) -> dict[str, Any]:
    return {"type": "string", "description": description}


_TIMEOUT = {
    "type": "number",
    "exclusiveMinimum": 0,
    "description": "Seconds after which it is stopped; longer than the default is not possible.",
}
_PATH = "Absolute, or relative to the working directory, /workspace."
_CWD = _text("Folder to run in; the default is /workspace.")


def _seconds(arguments: Arguments, bounds: Bounds) -> float:
    return float(min(arguments.get("timeout", bounds.timeout), bounds.timeout))


def _shell(box: Sandbox, arguments: Arguments, bounds: Bounds) -> str:
    timeout = _seconds(arguments, bounds)
    result = box.shell(arguments["command"], timeout, cwd=arguments.get("cwd"))
    return show(result, timeout=timeout, most=bounds.most) or "[no output]"


def _run_code(box: Sandbox, arguments: Arguments, bounds: Bounds) -> str:
    timeout = _seconds(arguments, bounds)
    result = box.run_code(arguments["code"], timeout)
    text = show(result, timeout=timeout, most=bounds.most - 64)
    if result.artifacts:
        text += f"\n[{len(result.artifacts)} figures or tables drawn]"
    return text or "[no output]"


def _git(box: Sandbox, arguments: Arguments, bounds: Bounds) -> str:
    environment = {"GIT_TERMINAL_PROMPT": "0", "GIT_PAGER": "cat", "GIT_EDITOR": "true"}
    argv = ["git", *arguments["args"]]
    result = box.exec(argv, bounds.timeout, cwd=arguments.get("cwd"), env=environment)
    return show(result, timeout=bounds.timeout, most=bounds.most) or "[no output]"


def _content(box: Sandbox, path: str) -> str:
    try:
        data = box.read_file(path, max_bytes=_MAX_FILE)
    except LimitExceeded:
        raise Refused(f"{path} is larger than {_MAX_FILE} bytes: look at parts of it with shell") from None
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise Refused(
            f"{path} is no UTF-8 text but {len(data)} bytes of data: look at it with shell"
        ) from None


def _read_file(box: Sandbox, arguments: Arguments, bounds: Bounds) -> str:
    lines = list(io.StringIO(_content(box, arguments["path"]), newline="\n"))  # as sed and git count them
    first = arguments.get("first_line", 1) - 1
    wanted = lines[first:]
    if not wanted:
        return f"[the file has {len(lines)} lines]" if lines else "[the file is empty]"
    shown, size = 0, 0
    while shown < len(wanted) and size + len(wanted[shown]) <= bounds.most - 64:
        size += len(wanted[shown])
        shown += 1
    text = "".join(wanted[:shown]) or cut(wanted[0], bounds.most - 64)
    last = first + max(1, shown)
    rest = len(lines) - last
    return f"{text.rstrip(chr(10))}\n[lines {first + 1} to {last} of {len(lines)}]" if rest or first else text


def _write_file(box: Sandbox, arguments: Arguments, _: Bounds) -> str:
    data = arguments["content"].encode("utf-8", "surrogatepass")
    box.write_file(arguments["path"], data)
    return f"Wrote {len(data)} bytes to {arguments['path']}."


def _edit_file(box: Sandbox, arguments: Arguments, _: Bounds) -> str:
    path, old, new = arguments["path"], arguments["old"], arguments["new"]
    if not old:
        raise Refused("old is empty: write_file makes new files")
    with box._awake():  # else two edits at once would each write over the other's
        text = _content(box, path)
        found = text.count(old)
        if found != 1:
            hint = "read the file again" if not found else "give more of the lines around it"
            raise Refused(f"old is there {found} times in {path}, not once: {hint}; nothing was changed")
        box.write_file(path, text.replace(old, new))
    line = text[: text.index(old)].count("\n") + 1
    return f"Edited {path} at line {line}."


def _list_files(box: Sandbox, arguments: Arguments, bounds: Bounds) -> str:
    path, recursive = arguments.get("path", "."), arguments.get("recursive", False)
    found = box.list_files(path, recursive=recursive, max_entries=_MAX_LISTED)
    ends = {"dir": "/", "link": "@", "other": "?"}
    rows = [f"{info.path}{ends.get(info.kind) or f'  {info.size}'}" for info in found]
    return cut("\n".join(rows), bounds.most) or "[the folder is empty]"


def _checkpoint(box: Sandbox, arguments: Arguments, _: Bounds) -> str:
    box.checkpoint(arguments["label"])
    return f"Checkpoint {arguments['label']!r} holds memory and disk as they are now."


def _rewind(box: Sandbox, arguments: Arguments, _: Bounds) -> str:
    label = arguments.get("label")
    try:
        box.rewind(label)
    except KeyError as error:
        raise Refused(str(error.args[0])) from None
    return (
        f"Memory and disk are as they were at {f'checkpoint {label!r}' if label else 'the last checkpoint'}."
    )


_ALL = (
    Tool(
        "shell",
        "Runs a command line in bash and returns its output and exit code. Each call is a new shell in the working "
        "directory; files and background processes stay, variables and cd do not.",
        {"command": _text("The command line."), "timeout": _TIMEOUT, "cwd": _CWD},
        ["command"],
        _shell,
    ),
    Tool(
        "read_file",
        "Returns a text file, or as much of it as fits, from a line on.",
        {
            "path": _text(_PATH),
            "first_line": {
                "type": "integer",
                "minimum": 1,
                "description": "1 is the first, and the default.",
            },
        },
        ["path"],
        _read_file,
    ),
    Tool(
        "write_file",
        "Makes a file, or replaces all that is in it. Folders that are missing are made.",
        {"path": _text(_PATH), "content": _text("All of the new content.")},
        ["path", "content"],
        _write_file,
    ),
    Tool(
        "edit_file",
        "Replaces one piece of a text file by another. The piece must be in the file exactly once.",
        {
            "path": _text(_PATH),
            "old": _text("The piece, letter by letter, spaces and line ends included."),
            "new": _text("What stands there afterwards."),
        },
        ["path", "old", "new"],
        _edit_file,
    ),
    Tool(
        "list_files",
        "Lists a folder: folders end in /, links in @, after files stands their size in bytes.",
        {
            "path": _text(_PATH + " The default is that directory itself."),
            "recursive": {
                "type": "boolean",
                "description": "Also what is in its folders; the default is false.",
            },
        },
        [],
        _list_files,
    ),
    Tool(
        "run_code",
        "Runs Python in an interpreter that keeps its variables from call to call. Returns what was printed, then the "
        "value of the last expression or the traceback.",
        {"code": _text("Python source."), "timeout": _TIMEOUT},
        ["code"],
        _run_code,
    ),
    Tool(
        "git",
        "Runs git and returns its output. It never opens a pager, an editor or a prompt.",
        {
            "args": {
                "type": "array",
                "items": {"type": "string"},
                "description": 'What follows "git" on a command line, such as ["diff", "--stat"].',
            },
            "cwd": _CWD,
        },
        ["args"],
        _git,
    ),
)
_TIMELINE = (
    Tool(
        "checkpoint",
        "Keeps memory, processes and disk as they are now, under a label to rewind to. Do it before anything risky.",
        {"label": _text("A name for this moment; the latest of equal ones counts.")},
        ["label"],
        _checkpoint,
    ),
    Tool(
        "rewind",
        "Puts memory, processes and disk back to a checkpoint. Works after the sandbox was killed, too.",
        {"label": _text("Of the checkpoint; the default is the last one.")},
        [],
        _rewind,
    ),
)


def catalogue(*, checkpoints: bool) -> dict[str, Tool]:
    """All tools by name; with `checkpoints`, those that go back in time too."""
    return {tool.name: tool for tool in (*_ALL, *(_TIMELINE if checkpoints else ()))}
