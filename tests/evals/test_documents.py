"""docs/tasks.md: its blocks run in their order, as a reader would run them; its tables name what there is."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sandbox_gym.evals import Attempt
from sandbox_gym.tasks import Task
from tests.test_readme import run

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/tasks.md").read_text()


def test_its_blocks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The commands beside this Python, and this folder's package in them.
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    said = ""
    for language, code in re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
        if language == "jsonl":
            (tmp_path / "tasks.jsonl").write_text(code)
        elif language == "python" and not (tmp_path / "policies.py").exists():
            (tmp_path / "policies.py").write_text(code)
        elif language == "python":
            run(code, tmp_path)
        elif language == "sh":
            said = _shell(code, tmp_path)
        else:
            assert (language, _timeless(code)) == ("text", _timeless(said))
    assert "taken from before, 4 were run now" in said
    assert len((tmp_path / "eval-output/results.jsonl").read_text().splitlines()) == 8


def _shell(code: str, folder: Path) -> str:
    """What its commands print."""
    result = subprocess.run(
        ["bash", "-e"],
        input=code,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def _timeless(text: str) -> str:
    return re.sub(r"in [\d.]+ s$", "in a while", text, flags=re.MULTILINE)


def test_its_table_has_each_field_with_its_default() -> None:
    rows = re.findall(r"^\| `(\w+)` \| *(?:`(.*?)`|[^`|]*) *\| .* \|$", PAGE, re.MULTILINE)
    fields = dataclasses.fields(Task)
    assert [name for name, _ in rows][: len(fields)] == [field.name for field in fields]
    plain = {name: json.loads(default) for name, default in rows if default}
    assert plain == {name: json.loads(json.dumps(getattr(Task("a", "b"), name))) for name in plain}
    assert {field.name for field in fields} - set(plain) == {"id", "check", "protected"}


def test_its_table_has_each_column_of_the_results() -> None:
    table = PAGE.partition("| column |")[2].partition("\n\n")[0]
    named = re.findall(r"`(\w+)`", "".join(re.findall(r"^\|(.*?)\|", table, re.MULTILINE)))
    assert named == [field.name for field in dataclasses.fields(Attempt)]
