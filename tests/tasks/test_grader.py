"""What counts, what does not, and what is an error and no reward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from sandbox_gym.errors import GraderError, SandboxDied, TaskError
from sandbox_gym.tasks import Prepared, Task, Verdict
from sandbox_gym.tasks.verdict import Judged, Outcome, Unclear, judge
from tests.tasks.conftest import DOUBLE

Prepare = Callable[[Task], Prepared]
SOLVE = DOUBLE.solution


def grade(prepared: Prepared, program: str) -> Verdict:
    with prepared.start() as box:
        assert box.shell(program, cwd=prepared.task.workdir).ok
        return prepared.grade(box)


def test_a_solution_is_rewarded_and_the_record_says_why(double: Prepared) -> None:
    found = grade(double, SOLVE)
    assert (found.score, found.solved, found.flags) == (1.0, True, ())
    assert (found.check, found.exit_code, found.carried) == ("python check.py", 0, ("/workspace/calc.py",))
    wrong = grade(double, "echo 'def double(x): return 5' > calc.py")
    assert (wrong.score, wrong.exit_code) == (0.0, 1)
    assert "AssertionError" in wrong.stderr
    assert wrong.to_json()["reason"] == "the check ended with 1"


def test_a_sandbox_can_be_graded_again_and_again(double: Prepared) -> None:
    with double.start() as box:
        assert double.grade(box).score == 0.0
        assert box.shell(SOLVE).ok
        assert double.grade(box).score == 1.0
        assert box.shell("cat check.py").exit_code == 1  # what is hidden was never here
        box.terminate()
        with pytest.raises(SandboxDied, match="grade it before"):
            double.grade(box)


def test_what_is_carried(prepared: Prepare) -> None:
    tree = """
set -e
test "$(cat new/deep/a)" = a; test -x run; ./run; test -d empty; test "$(readlink link)" = new/deep/a
test "$(cat link)" = a; test ! -e gone; test ! -e folder; test "$(cat kind/inner)" = x; test "$(cat /data/more)" = m
test "$(cat tests/kept)" = kept; test -e tests/a; test ! -e tests/b; test ! -e /etc/mine; test ! -L out
"""
    task = replace(
        DOUBLE,
        id="tree",
        carry=("/data",),
        files={"gone": "", "folder/a": "", "folder/b/c": "", "kind": "", "tests/kept": "kept", "tests/a": ""},
        hidden={"check.sh": tree},
        check="bash check.sh",
        solution="",
    )
    found = grade(
        prepared(task),
        """mkdir -p new/deep empty; printf a > new/deep/a; printf '#!/bin/sh\\n' > run; chmod +x run
        ln -s "$PWD/new/deep/a" link; rm -r gone folder; rm kind; mkdir kind; printf x > kind/inner
        printf m > /data/more; printf changed > tests/kept; rm tests/a; touch tests/b /etc/mine; ln -s /etc out""",
    )
    assert found.score == 1.0, found.stderr
    assert found.left_out == {
        "/workspace/out": "a link that leads out of the workspace",
        "/workspace/tests/a": "protected",
        "/workspace/tests/b": "protected",
        "/workspace/tests/kept": "protected",
    }


RESOLVES = """import socket, sys
def known(name):
    try:
        return bool(socket.gethostbyname(name))
    except OSError:
        return False
print(*[known(name) for name in ("set-up.example", "agent.example")])
"""


def test_the_network_of_set_up_agent_and_check(prepared: Prepare) -> None:
    """Names are answered inside: nothing is asked outside for it."""
    task = replace(
        DOUBLE,
        id="network",
        setup_network=("set-up.example",),
        network=("agent.example",),
        setup=("python known.py > set-up",),
        files={**DOUBLE.files, "known.py": RESOLVES},
        hidden={
            "check.sh": 'test "$(cat set-up)" = "True False" && test "$(python known.py)" = "False False"'
        },
        check="bash check.sh",
        solution="",
    )
    with prepared(task).start() as box:
        for _ in range(2):
            box.checkpoint()
            assert box.shell("python known.py").stdout == "False True\n"
            box.rewind()  # brings back what the agent may reach, and not what the set-up might
        assert prepared(task).grade(box).solved


# ---- scoring -----------------------------------------------------------------------------------------------------


def outcome(stdout: str = "", exit_code: int = 0, report: str | None = None, cut: bool = False) -> Outcome:
    return Outcome(exit_code, stdout, "", cut, False, 0.1, None if report is None else report.encode())


JSON = Task(id="j", check="x", scoring="json")
JUNIT = Task(id="x", check="x", scoring="junit")


def test_json() -> None:
    assert judge(JSON, outcome('so\n{"score": 0.25, "why": "half of half"}\n')).score == 0.25
    assert judge(JSON, outcome('{"score": 1}', exit_code=1)).score == 0.0
    assert judge(JSON, outcome('{"score": 1}\n{"score": 1}')).flags
    for text in (
        "",
        "1.0",
        '{"score": "1"}',
        '{"score": NaN}',
        '{"score": 2}',
        '{"score": true}',
        "{" * 100_000,
    ):
        with pytest.raises(Unclear):
            judge(JSON, outcome(text))
    with pytest.raises(Unclear, match="more than is kept"):
        judge(JSON, outcome('{"score": 1}', cut=True))


REPORT = """<testsuites><testsuite>
<testcase classname="tests.test_a" name="test_one"/>
<testcase classname="tests.test_a.TestB" name="test_two[x::y/z.py]"/>
<testcase classname="tests.test_a" name="test_three"><skipped/></testcase>
{}</testsuite></testsuites>"""
FAILING = '<testcase classname="tests.test_a" name="test_bad"><failure/></testcase>'


def test_junit() -> None:
    assert judge(JUNIT, outcome(report=REPORT.format(""))).score == 2 / 3
    found = judge(JUNIT, outcome(report=REPORT.format(FAILING), exit_code=1))
    assert (found.score, found.tests["tests.test_a::test_bad"]) == (0.5, "failed")
    named = replace(
        JUNIT, fail_to_pass=("tests/test_a.py::TestB::test_two[x::y/z.py]", "tests/test_a.py::test_bad")
    )
    assert judge(named, outcome(report=REPORT.format(FAILING), exit_code=1)).score == 0.5
    kept = replace(named, pass_to_pass=("tests/test_a.py::test_three",))
    assert judge(kept, outcome(report=REPORT.format(FAILING), exit_code=1)).score == 0.0
    assert (
        judge(
            replace(JUNIT, pass_to_pass=("tests/test_a.py::test_one",)), outcome(report=REPORT.format(""))
        ).score
        == 1
    )


def test_a_report_that_the_exit_code_denies_is_flagged() -> None:
    assert judge(JUNIT, outcome(report=REPORT.format(""), exit_code=1)).flags
    assert judge(JUNIT, outcome(report=REPORT.format(FAILING), exit_code=0)).flags


@pytest.mark.parametrize(
    "report",
    [
        None,
        "",
        "<a",
        "<testsuites/>",
        '<!DOCTYPE a [<!ENTITY b "c">]><testsuites><testcase name="&b;"/></testsuites>',
    ],
)
def test_no_report_is_no_verdict(report: str | None) -> None:
    with pytest.raises(Unclear):
        judge(JUNIT, outcome(report=report))


def test_exit_code() -> None:
    assert judge(DOUBLE, outcome()) == Judged(1.0, "passed")
    assert judge(DOUBLE, outcome(exit_code=3)).score == 0.0
    for code in (126, 127):
        with pytest.raises(Unclear):
            judge(DOUBLE, outcome(exit_code=code))


SKIPPED = {"test_no.py": "import pytest\n@pytest.mark.skip\ndef test_a(): pass\n"}

# ---- errors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"check": "no-such-program"}, "ended with 127"),
        ({"check": "sleep 60", "check_timeout": 0.5}, "did not end within 0.5 s"),
        ({"check": "echo no score", "scoring": "json"}, "no line that it printed"),
        ({"check": "true", "scoring": "junit"}, "no JUnit XML"),
        (
            {"check": "python -m pytest -q test_no.py", "hidden": SKIPPED},
            "flags the untouched state: no test ran",
        ),
        ({"check": "false", "solution": "true"}, "its own solution scores 0"),
        ({"test_patch": "--- a/no\n+++ b/no\n@@ -1 +1 @@\n-a\n+b\n"}, "'test_patch' does not apply"),
    ],
)
def test_a_check_that_can_not_judge_is_an_error(change: dict[str, object], said: str) -> None:
    task = replace(DOUBLE, **{"solution": "", "id": "broken", **change})  # type: ignore[arg-type]
    with pytest.raises(GraderError, match=said):
        Prepared(task)


def test_a_check_may_be_proven_by_a_solution(prepared: Prepare) -> None:
    """Where there is nothing yet to be judged, and the check says so by breaking down."""
    task = replace(
        DOUBLE,
        id="create",
        files={},
        hidden={"check.py": "import json, calc\nprint(json.dumps({'score': calc.double(2) / 4}))"},
        scoring="json",
        solution="printf 'def double(x): return 2 * x' > calc.py",
    )
    ready = prepared(task)
    assert grade(ready, "true").score == 0.0
    assert grade(ready, "printf 'def double(x): return x' > calc.py").score == 0.5
    with pytest.raises(GraderError, match="give the task a solution"):
        Prepared(replace(task, solution=""))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"setup": ("true", "echo why; exit 3")}, "field 'setup': line 2, .*ended with 3\nwhy"),
        ({"repo": "/no/such", "base_commit": "a"}, "field 'repo'"),
        ({"base_commit": "a", "setup": ("git init -q .",)}, "field 'base_commit'"),
    ],
)
def test_a_set_up_that_fails_is_an_error(change: dict[str, object], said: str) -> None:
    with pytest.raises(TaskError, match=said):
        Prepared(replace(DOUBLE, id="broken", **change))  # type: ignore[arg-type]


def test_an_agent_that_ends_its_sandbox_has_no_accident(double: Prepared) -> None:
    """Else it could throw away every attempt that it thinks is lost."""
    with double.start() as box:
        with pytest.raises(SandboxDied):
            box.run_code("import os; os._exit(1)")
        found = double.grade(box)
    assert (found.score, found.reason) == (0.0, "its workspace can't be read")
    assert found.flags
