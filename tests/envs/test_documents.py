"""docs/envs.md and docs/agents.md are run as the README is: each block of Python by itself, and the commands."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_readme import ROOT, blocks, commands, run

DOCUMENTS = {name: (ROOT / "docs" / name).read_text() for name in ("envs.md", "agents.md")}
BLOCKS = [code for text in DOCUMENTS.values() for code in blocks("python", text)]


@pytest.mark.parametrize("code", BLOCKS, ids=lambda code: code.splitlines()[-1])
def test_python(code: str, tmp_path: Path) -> None:
    run(code, tmp_path, "-W", "error")


def test_commands_in_their_order(tmp_path: Path) -> None:
    found = commands(DOCUMENTS["agents.md"])
    assert [command.split()[1] for command in found] == ["template", "mcp"]
    for command in found:
        program, *arguments = shlex.split(command)
        assert program == "sandbox-gym"
        result = subprocess.run(
            [sys.executable, "-m", "sandbox_gym", *arguments],
            stdin=subprocess.DEVNULL,  # an MCP client that goes at once
            capture_output=True,
            text=True,
            check=False,
            cwd=ROOT,
            env={**os.environ, "SANDBOX_GYM_HOME": str(tmp_path)},
        )
        assert (result.returncode, result.stderr) == (0, "")
