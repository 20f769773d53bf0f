"""The example of an agent's tools runs as it is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def test_it_runs() -> None:
    command = [sys.executable, "-m", "examples.users.b3_tools"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=100)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        "Agents SDK: ['passed', 'passed', 'passed']",
        "plain loop: ['passed', 'passed', 'passed']",
        "the base is as it was: True",
    ]
