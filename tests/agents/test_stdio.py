"""The MCP server line by line: every request has an answer, whatever it is, and Ctrl-C ends it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import sandbox_gym
from tests.conftest import descendants

ROOT = Path(sandbox_gym.__file__).parent.parent
HELLO = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}


class Wire:
    def __init__(self) -> None:
        command = [sys.executable, "-m", "sandbox_gym", "mcp"]
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        self.process = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, **pipes
        )

    def say(self, line: str | bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write((line.encode() if isinstance(line, str) else line) + b"\n")
        self.process.stdin.flush()

    def ask(self, line: str | bytes) -> Any:
        """The next answer."""
        assert self.process.stdout is not None
        self.say(line)
        return json.loads(self.process.stdout.readline())


def message(**fields: Any) -> str:
    return json.dumps({"jsonrpc": "2.0", **fields})


def call(id: int, name: str, **arguments: Any) -> str:
    return message(id=id, method="tools/call", params={"name": name, "arguments": arguments})


@pytest.fixture
def wire() -> Iterator[Wire]:
    """A server that is ready."""
    made = Wire()
    with made.process as process:
        try:
            assert made.ask(message(id=0, method="initialize", params=HELLO))["id"] == 0
            made.say(message(method="notifications/initialized"))
            yield made
        finally:
            process.kill()


@pytest.mark.parametrize("busy", [False, True])
def test_ctrl_c_ends_it_and_its_sandbox_while_stdin_is_open(wire: Wire, busy: bool) -> None:
    if busy:
        wire.say(call(1, "shell", command="sleep 60"))
    assert wire.ask(message(id=2, method="ping"))["id"] == 2  # comes after the call has begun
    below = descendants(wire.process.pid)
    assert below
    wire.process.send_signal(signal.SIGINT)
    assert wire.process.wait(10) == 130
    deadline = time.monotonic() + 5
    while any(os.path.exists(f"/proc/{pid}/exe") for pid in below) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(os.path.exists(f"/proc/{pid}/exe") for pid in below)  # a zombie has none
    assert wire.process.stderr is not None
    assert wire.process.stderr.read() == b""


def test_ctrl_c_ends_it_while_nobody_reads_its_answer(wire: Wire) -> None:
    assert wire.process.stdout is not None
    wire.say(message(id=1, method="x" * 300_000))  # which the answer repeats: more than a pipe holds
    assert os.read(wire.process.stdout.fileno(), 1) == b"{"
    wire.process.send_signal(signal.SIGINT)
    assert wire.process.wait(10) == 130


def test_it_ends_with_who_read_its_answers(wire: Wire) -> None:
    assert wire.process.stdout is not None and wire.process.stderr is not None
    wire.process.stdout.close()
    wire.say(message(id=1, method="ping"))
    assert wire.process.wait(10) == 0
    assert wire.process.stderr.read() == b""


def test_every_line_that_asks_has_an_answer(wire: Wire) -> None:
    wrong: list[tuple[str | bytes, int | str | None, int]] = [
        ("{", None, -32700),
        (b"\xff\xfe", None, -32700),
        ("[" * 100_000, None, -32700),
        ("7", None, -32600),
        ("[]", None, -32600),
        (message(id=3, method="tools/call", params=7), 3, -32600),
        (message(id="x", method=7), "x", -32600),
        (json.dumps({"id": 4, "method": "ping"}), 4, -32600),
        (message(id=1.5, method="ping"), None, -32600),
        (message(id=None, method="ping"), None, -32600),
        (message(id=5, result=7), None, -32600),
        (message(id=6, method="tools/call", params={"name": 7}), 6, -32602),
        (message(id=7, method="half \ud800"), 7, -32601),
    ]
    wire.say("\n  ")
    for line, id, code in wrong:
        answer = wire.ask(line)
        assert (answer["id"], answer["error"]["code"]) == (id, code), line
    assert wire.ask(message(id="\ud800", method="ping")) == {"jsonrpc": "2.0", "id": "\ud800", "result": {}}


def test_half_a_character_is_an_error_that_the_model_reads(wire: Wire) -> None:
    for line in (
        call(1, "shell", command="echo \ud800"),
        call(1, "shell", **{"\ud800": "x"}),
        call(1, "\ud800"),
    ):
        result = wire.ask(line)["result"]
        assert result["isError"], line
        assert "\\ud800" in result["content"][0]["text"]
    assert not wire.ask(call(2, "shell", command="true"))["result"]["isError"]


def test_what_was_asked_before_the_end_of_stdin_ends_with_it(wire: Wire) -> None:
    wire.say(call(1, "shell", command="sleep 60"))
    assert wire.ask(message(id=2, method="ping"))["id"] == 2
    assert wire.process.stdin is not None
    wire.process.stdin.close()
    assert wire.process.wait(20) == 0
