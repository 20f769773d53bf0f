"""As root, as criu has to be: elsewhere what an example branches can't be captured."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.geteuid() != 0:
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="criu is root's"))


def run_example(*arguments: str) -> str:
    """What `python -m examples...` prints, as a user runs it."""
    result = subprocess.run(
        [sys.executable, "-m", *arguments], capture_output=True, text=True, check=False, cwd=ROOT, timeout=100
    )
    assert result.returncode == 0, result.stderr
    return result.stdout
