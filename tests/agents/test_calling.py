"""Plain function calling: what a model reads of what it asked for."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import sandbox_gym
from sandbox_gym.agents import call_tool, function_tools
from sandbox_gym.errors import LimitExceeded, SandboxDied
from sandbox_gym.sandbox import Sandbox

NAMES = ["shell", "read_file", "write_file", "edit_file", "list_files", "run_code", "git"]


def test_definitions_are_what_chat_completions_take() -> None:
    tools = function_tools()
    assert [tool["function"]["name"] for tool in tools] == NAMES
    extra = [tool["function"]["name"] for tool in function_tools(checkpoints=True)[len(tools) :]]
    assert extra == ["checkpoint", "rewind"]
    assert json.loads(json.dumps(tools)) == tools
    for tool in tools:
        schema = tool["function"]["parameters"]
        assert tool["type"] == "function"
        assert set(schema["required"]) <= set(schema["properties"])
        assert schema["additionalProperties"] is False
        assert all(part["description"] for part in schema["properties"].values())
    tools[0]["function"]["parameters"]["properties"].clear()  # the caller's to change
    assert function_tools()[0]["function"]["parameters"]["properties"]


def test_each_tool_does_its_work(box: Sandbox) -> None:
    assert (
        call_tool(box, "shell", '{"command": "echo out; echo err >&2; exit 3"}') == "out\nerr\n[exit code 3]"
    )
    assert call_tool(box, "shell", {"command": "true", "cwd": None}) == "[no output]"
    assert call_tool(box, "shell", {"command": "pwd", "cwd": "/tmp"}) == "/tmp"
    assert call_tool(box, "run_code", {"code": "x = 20; print('é😀')"}) == "é😀"
    assert call_tool(box, "run_code", {"code": "x + 1"}) == "21"
    assert "ZeroDivisionError" in call_tool(box, "run_code", {"code": "1 / 0"})
    assert (
        call_tool(box, "write_file", {"path": "a/b.txt", "content": "one\ntwo\n"})
        == "Wrote 8 bytes to a/b.txt."
    )
    assert call_tool(box, "read_file", {"path": "a/b.txt"}) == "one\ntwo\n"
    assert (
        call_tool(box, "edit_file", {"path": "a/b.txt", "old": "two", "new": "2"})
        == "Edited a/b.txt at line 2."
    )
    assert box.read_text("a/b.txt") == "one\n2\n"
    assert "a/" in call_tool(box, "list_files", "")
    assert re.search(r"b\.txt  6$", call_tool(box, "list_files", {"path": "a", "recursive": True}))
    assert "Initialized" in call_tool(box, "git", {"args": ["init"]})
    call_tool(box, "git", {"args": ["add", "."]})
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    assert "b.txt" in call_tool(
        box, "git", {"args": [*identity, "commit", "-m", "first"]}
    )  # no editor, no prompt
    assert "first" in call_tool(box, "git", {"args": ["log", "--oneline"]})


@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        ("rm", {}, "there is no tool 'rm': there are shell"),
        ("rewind", {}, "there is no tool"),
        ("shell", "{", "no JSON"),
        ("shell", "[" * 100_000, "no JSON"),
        ("shell", "[]", "a JSON object"),
        ("shell", {}, "command is missing"),
        ("shell", {"command": "true", "user": "root"}, "there is no user"),
        ("shell", {"command": 3}, "of type string, not 3"),
        ("shell", {"command": "true", "timeout": True}, "of type number"),
        ("shell", {"command": "true", "timeout": -1}, "above 0"),
        ("shell", {"command": "true", "timeout": float("nan")}, "above 0"),
        ("shell", {"command": "a\0b"}, "ValueError"),
        ("read_file", {"path": "none"}, "FileNotFoundError"),
        ("read_file", {"path": "/tmp"}, "IsADirectoryError"),
        ("read_file", {"path": "a", "first_line": 0}, "1 or more"),
        ("git", {"args": ["status", 1]}, "of type string"),
        ("edit_file", {"path": "x", "old": "", "new": ""}, "old is empty"),
    ],
)
def test_what_a_model_can_mend_is_text(name: str, arguments: Any, told: str, box: Sandbox) -> None:
    text = call_tool(box, name, arguments)
    assert text.startswith("Error: ")
    assert told in text
    assert box.status == "running"


def test_an_edit_is_of_one_place(box: Sandbox) -> None:
    box.write_file("code.py", "a = 1\nb = 1\n")
    assert "2 times" in call_tool(box, "edit_file", {"path": "code.py", "old": "= 1", "new": "= 2"})
    assert "0 times" in call_tool(box, "edit_file", {"path": "code.py", "old": "c = 1", "new": "c = 2"})
    assert box.read_text("code.py") == "a = 1\nb = 1\n"
    box.write_file("data", b"\xff\x00")
    assert "no UTF-8 text but 2 bytes" in call_tool(
        box, "edit_file", {"path": "data", "old": "a", "new": "b"}
    )


def test_edits_at_once_are_all_there(box: Sandbox) -> None:
    places = [f"<{i}>" for i in range(40)]
    box.write_file("page", "".join(places))

    def edit(place: str) -> str:
        return call_tool(box, "edit_file", {"path": "page", "old": place, "new": place.strip("<>") + ";"})

    with ThreadPoolExecutor(8) as pool:
        assert all(text.startswith("Edited") for text in pool.map(edit, places))
    assert box.read_text("page") == "".join(f"{i};" for i in range(40))


def test_answers_are_bounded_and_say_what_is_missing(box: Sandbox) -> None:
    box.write_file("long", "".join(f"line {i}\n" for i in range(1, 10_001)))
    calls: list[tuple[str, dict[str, Any], str]] = [
        ("shell", {"command": "seq 1 1000000"}, "characters cut"),
        ("run_code", {"code": "print('x' * 3_000_000)"}, "characters cut"),
        ("read_file", {"path": "long"}, r"\[lines 1 to \d+ of 10000\]$"),
        ("list_files", {"path": "/usr/bin"}, "characters cut"),
    ]
    for name, arguments, note in calls:
        text = call_tool(box, name, arguments, max_output=1000)
        assert len(text) <= 1000
        assert re.search(note, text), text[-100:]
    text = call_tool(box, "read_file", {"path": "long", "first_line": 9_999})
    assert text == "line 9999\nline 10000\n[lines 9999 to 10000 of 10000]"
    assert call_tool(box, "read_file", {"path": "long", "first_line": 20_000}) == "[the file has 10000 lines]"
    box.write_file("one", "y" * 5000)
    assert len(call_tool(box, "read_file", {"path": "one"}, max_output=1000)) <= 1000
    box.shell("truncate -s 1G huge")
    assert "larger than" in call_tool(box, "read_file", {"path": "huge"})
    with pytest.raises(ValueError, match="256"):
        call_tool(box, "shell", {"command": "true"}, max_output=10)


def test_a_model_cannot_take_longer_than_it_may(box: Sandbox) -> None:
    started = time.monotonic()
    text = call_tool(box, "shell", {"command": "echo begun; sleep 60", "timeout": 600}, timeout=0.5)
    assert text == "begun\n[timed out after 0.5 s]"
    text = call_tool(box, "run_code", {"code": "while True: pass", "timeout": 0.3}, timeout=50)
    assert "[timed out after 0.3 s]" in text
    assert time.monotonic() - started < 20


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("import os; os._exit(1)", SandboxDied),
        ("import signal; signal.signal(2, signal.SIG_IGN)\nwhile True: pass", SandboxDied),
        ("kept = [bytearray(1 << 24) for _ in range(100)]", LimitExceeded),
    ],
)
def test_a_sandbox_that_is_gone_is_an_exception(code: str, error: type[Exception]) -> None:
    with Sandbox.create(memory="256Mi") as box:
        with pytest.raises(error):
            call_tool(box, "run_code", {"code": code}, timeout=5)
        with pytest.raises(SandboxDied):
            call_tool(box, "shell", {"command": "true"})


def test_lines_are_those_of_sed(box: Sandbox) -> None:
    text = "one\x0b\u2028\r\ntwo\r\nthree\n"
    box.write_file("odd", text.encode())
    assert call_tool(box, "read_file", {"path": "odd"}) == text
    assert call_tool(box, "read_file", {"path": "odd", "first_line": 3}) == "three\n[lines 3 to 3 of 3]"
    call_tool(box, "edit_file", {"path": "odd", "old": "two", "new": "2"})
    assert box.read_file("odd") == text.replace("two", "2").encode()


def test_what_cannot_be_kept_is_text(box: Sandbox) -> None:
    sandbox_gym.set_budget(memory="1Mi")
    try:
        text = call_tool(box, "checkpoint", {"label": "x"}, checkpoints=True)
    finally:
        sandbox_gym.set_budget(memory=None)
    assert text.startswith("Error: ")
    assert "budget" in text
    assert call_tool(box, "shell", {"command": "echo on"}) == "on"


def test_back_in_time(box: Sandbox) -> None:
    call: Callable[..., str] = lambda name, **arguments: call_tool(box, name, arguments, checkpoints=True)  # noqa: E731
    assert "has no checkpoint" in call("rewind")
    call("run_code", code="x = 1; open('kept', 'w').write('1')")
    assert "'before'" in call("checkpoint", label="before")
    call("run_code", code="x = 2; import os; os.remove('kept')")
    assert "has no checkpoint 'other'" in call("rewind", label="other")
    assert "'before'" in call("rewind", label="before")
    assert call("run_code", code="x, open('kept').read()") == "(1, '1')"
