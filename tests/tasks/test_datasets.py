"""Where tasks come from, and what is said of records that are wrong."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sandbox_gym.errors import TaskError
from sandbox_gym.tasks import Prepared, Task
from sandbox_gym.tasks.datasets import load
from tests.tasks.conftest import DOUBLE

Prepare = Callable[[Task], Prepared]
ROW = {"id": "a", "setup": "touch x", "check": "test -e x"}


def test_jsonl_json_and_rows(tmp_path: Path) -> None:
    expected = [Task.from_json(ROW), replace(DOUBLE, id="b")]
    rows = [task.to_json() for task in expected]
    lines = tmp_path / "tasks.jsonl"
    lines.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    array = tmp_path / "tasks.json"
    array.write_text(json.dumps(rows))
    assert load(lines) == load(str(array)) == load(rows) == load(iter(expected)) == expected
    assert load(rows[0]) == load(expected[0]) == expected[:1]


def test_folders(tmp_path: Path) -> None:
    folder = tmp_path / "first"
    (folder / "files/src").mkdir(parents=True)
    (folder / "hidden").mkdir()
    (folder / "files/src/a.py").write_text("a = 1\n")
    (folder / "hidden/b.bin").write_bytes(b"\xff")
    (folder / "task.json").write_text(json.dumps({"check": "true", "files": {"c": "d"}}))
    (tmp_path / "second.json").write_text(json.dumps(ROW))
    (tmp_path / "notes.txt").write_text("not a task")
    first, second = load(tmp_path)
    assert (first.id, first.files, first.hidden) == (
        "first",
        {"c": "d", "src/a.py": "a = 1\n"},
        {"b.bin": b"\xff"},
    )
    assert second == Task.from_json(ROW)
    assert load(folder) == [first]


def test_a_folder_that_repo_repair_wrote_to(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text(json.dumps(ROW))
    (tmp_path / "tasks.solutions.jsonl").write_text('{"id": "a", "package": "webcolors"}')
    assert load(tmp_path) == [Task.from_json(ROW)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"id": "a", "check": "true"}\n{"id": "b"}', r"tasks.jsonl:2: field 'check': missing"),
        (
            '\n{"id": "a", "check": "true", "setpu": 1}',
            r"tasks.jsonl:2: field 'setpu': unknown; did you mean 'setup'",
        ),
        ("{", r"tasks.jsonl:1: no JSON"),
        ("[]", r"tasks.jsonl:1: a record is an object, not list"),
        ('{"id": "a", "check": "true"}\n' * 2, "field 'id': 'a' is there twice"),
    ],
)
def test_a_wrong_record_is_named(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(text)
    with pytest.raises(TaskError, match=said):
        load(path)


def test_what_is_no_data_set(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such data set"):
        load(tmp_path / "no.jsonl")
    with pytest.raises(TaskError, match="there is no task in it"):
        load(tmp_path)
    (tmp_path / "a.csv").touch()
    with pytest.raises(TaskError, match=r"ends with \.jsonl or \.json"):
        load(tmp_path / "a.csv")
    with pytest.raises(TaskError, match="row 1: a record is an object, not int"):
        load([ROW, 3])


# ---- SWE-bench ---------------------------------------------------------------------------------------------------

BEFORE = "def double(x):\n    return x\n\n\ndef half(x):\n    return x / 2\n"
TEST = "from calc import half\n\n\ndef test_half():\n    assert half(4) == 2\n"
TEST_PATCH = """diff --git a/tests/test_calc.py b/tests/test_calc.py
--- a/tests/test_calc.py
+++ b/tests/test_calc.py
@@ -1,5 +1,9 @@
-from calc import half
+from calc import double, half


 def test_half():
     assert half(4) == 2
+
+
+def test_double():
+    assert double(2) == 4
"""
FIX = """diff --git a/calc.py b/calc.py
--- a/calc.py
+++ b/calc.py
@@ -1,5 +1,5 @@
 def double(x):
-    return x
+    return 2 * x


 def half(x):
"""


@pytest.fixture
def row(tmp_path: Path) -> dict[str, Any]:
    """As SWE-bench has them, of a repository below `tmp_path` whose later commit is the fix."""
    repo = tmp_path / "owner__calc"
    (repo / "tests").mkdir(parents=True)

    def git(*args: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "init.defaultBranch=main"]
        return subprocess.run(
            ["git", *who, *args], cwd=repo, check=True, capture_output=True, text=True, timeout=60
        ).stdout.strip()

    git("init", "-q")
    (repo / "calc.py").write_text(BEFORE)
    (repo / "tests/test_calc.py").write_text(TEST)
    git("add", "-A")
    git("commit", "-qm", "Before")
    base = git("rev-parse", "HEAD")
    (repo / "calc.py").write_text(BEFORE.replace("return x\n", "return 2 * x  # LATER\n"))
    git("commit", "-qam", "Later")
    git("tag", "fixed")
    return {
        "instance_id": "owner__calc-1",
        "repo": "owner/calc",
        "base_commit": base,
        "problem_statement": "double(2) is 2",
        "hints_text": "",
        "version": "1.0",
        "patch": FIX,
        "test_patch": TEST_PATCH,
        "FAIL_TO_PASS": '["tests/test_calc.py::test_double"]',
        "PASS_TO_PASS": ["tests/test_calc.py::test_half"],
    }


def test_swe_bench_rows_run_as_they_are(row: dict[str, Any], tmp_path: Path, prepared: Prepare) -> None:
    (task,) = load([row], repos=tmp_path)
    assert (task.id, task.prompt, task.fail_to_pass) == (
        "owner__calc-1",
        "double(2) is 2",
        ("tests/test_calc.py::test_double",),
    )
    ready = prepared(task)  # which proves it by its own patch
    assert ready.untouched.score == 0.0
    assert ready.untouched.tests == {
        "tests.test_calc::test_double": "failed",
        "tests.test_calc::test_half": "passed",
    }
    with ready.start() as box:
        seen = box.shell(
            "git log --all --oneline | wc -l; git grep -c LATER $(git rev-list --all); git tag; cat tests/*"
        )
        assert seen.stdout == f"1\n{TEST}"
        assert box.shell("sed -i 's/return x$/return x + x/' calc.py").ok
        assert ready.grade(box).score == 1.0
        assert box.shell("sed -i 's|x / 2|x|' calc.py").ok
        assert ready.grade(box).reason.startswith("1 tests that passed before do not")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"FAIL_TO_PASS": "nonsense"}, "row 0: field 'FAIL_TO_PASS': text that is no JSON list"),
        ({"FAIL_TO_PASS": [1]}, "field 'FAIL_TO_PASS': a list of tests"),
        ({"repo": "owner/other"}, r"field 'repo': 'owner/other' is not in the folder.*owner__other"),
        ({"repo": "../calc"}, "field 'repo'.*is no repository's name"),
        ({"instance_id": 1}, "field 'id': text is wanted"),
    ],
)
def test_a_wrong_row_of_swe_bench(
    change: dict[str, Any], said: str, row: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(TaskError, match=said):
        load([{**row, **change}], repos=tmp_path)
    del row["test_patch"]
    with pytest.raises(TaskError, match="field 'test_patch': missing"):
        load([row], repos=tmp_path)


# ---- terminal-bench ----------------------------------------------------------------------------------------------

YAML = """instruction: |-
  Write the sum of numbers.txt to sum.txt.
  It lies in /app.
author_email: a@b.c
difficulty: easy
tags:
  - text
parser_name: pytest
max_agent_timeout_sec: 360
max_test_timeout_sec: 60
"""
OUTPUTS = (
    "import pathlib\n\ndef test_sum():\n    assert pathlib.Path('/app/sum.txt').read_text().strip() == '6'\n"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """As terminal-bench has them."""
    folder = tmp_path / "sum-numbers"
    (folder / "tests").mkdir(parents=True)
    (folder / "task.yaml").write_text(YAML)
    (folder / "run-tests.sh").write_text("#!/bin/bash\npython -m pytest $TEST_DIR/test_outputs.py -rA\n")
    (folder / "tests/test_outputs.py").write_text(OUTPUTS)
    (folder / "solution.sh").write_text(
        "#!/bin/bash\npaste -sd+ numbers.txt | bc > sum.txt || echo 6 > sum.txt\n"
    )
    (folder / "docker-compose.yaml").write_text("services: {}\n")
    (folder / "numbers.txt").write_text("1\n2\n3\n")
    return folder


def test_terminal_bench_folders_run_as_they_are(folder: Path, prepared: Prepare) -> None:
    (task,) = load(folder.parent)
    assert (task.id, task.prompt) == (
        "sum-numbers",
        "Write the sum of numbers.txt to sum.txt.\nIt lies in /app.",
    )
    assert (task.files, task.check_timeout, task.workdir) == ({"numbers.txt": "1\n2\n3\n"}, 60.0, "/app")
    with prepared(task).start() as box:
        assert box.shell("ls /app /tests", cwd="/app").stdout == "/app:\nnumbers.txt\n"
        assert prepared(task).grade(box).score == 0.0
        assert box.shell("echo 6 > sum.txt", cwd="/app").ok
        assert prepared(task).grade(box).score == 1.0


def test_a_wrong_folder_of_terminal_bench(folder: Path) -> None:
    (folder / "Dockerfile").write_text("FROM scratch\n")
    (task,) = load(folder)
    assert (task.image, task.files) == (str(folder / "Dockerfile"), {})
    (folder / "task.yaml").write_text(YAML.replace("60", "soon"))
    with pytest.raises(TaskError, match=r"task.yaml: field 'max_test_timeout_sec': seconds"):
        load(folder)
    (folder / "task.yaml").write_text("instruction: [")
    with pytest.raises(TaskError, match=r"task.yaml: no YAML"):
        load(folder)
    (folder / "task.yaml").write_text("difficulty: easy")
    with pytest.raises(TaskError, match="field 'instruction'"):
        load(folder)
    (folder / "task.yaml").write_text(YAML)
    (folder / "run-tests.sh").unlink()
    with pytest.raises(TaskError, match=r"run-tests.sh: it is missing"):
        load(folder)
