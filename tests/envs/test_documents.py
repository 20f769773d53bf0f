"""The Python of docs/envs.md and docs/agents.md runs as it stands, in names that a reader would have."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import pytest

from sandbox_gym import Sandbox

DOCS = Path(__file__).resolve().parent.parent.parent / "docs"
BLOCKS = [
    (name, code)
    for name in ("envs.md", "agents.md")
    for code in re.findall(r"^```python\n(.*?)^```$", (DOCS / name).read_text(), re.MULTILINE | re.DOTALL)
]


@pytest.mark.parametrize(("name", "code"), BLOCKS, ids=[code.splitlines()[0] for _, code in BLOCKS])
def test_it_runs(name: str, code: str) -> None:
    call = SimpleNamespace(function=SimpleNamespace(name="shell", arguments='{"command": "echo told"}'))
    with Sandbox.create() as box:
        names: dict[str, Any] = {"gym": gymnasium, "Sandbox": Sandbox, "box": box, "copy": box}
        names |= {"call": call, "request": {}}
        exec(code, names)
        if name == "agents.md":
            assert names["text"] == "told"
            assert len(names["request"]["tools"]) == len(names["agent"].tools)
        for branch in names.get("branches", []):
            branch.env.close()
        if "env" in names:
            names["env"].close()
        if names["copy"] is not box:
            names["copy"].terminate()
