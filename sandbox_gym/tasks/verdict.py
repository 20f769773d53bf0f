"""What a check's exit code and output say: the score, and a record of how it came about."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from sandbox_gym.tasks import guard
from sandbox_gym.tasks.task import Task

_MAX_OUTPUT = 16_384  # characters kept of each stream
_MAX_TESTS = 20_000
MAX_REPORT = 32 << 20  # bytes of JUnit XML


@dataclass(frozen=True)
class Verdict:
    """The record of a reward. `score`: 0 to 1. `reason`: in a few words. `flags`: signs of tampering, with which the
    score is 0. `tests`: each test's id and "passed", "failed" or "skipped". `carried`: the agent's changes that the
    check saw; `left_out`: those that it did not, each with the reason. `duration`: seconds of the check.
    """

    score: float
    reason: str
    flags: tuple[str, ...] = ()
    check: str = ""
    exit_code: int | None = None
    stdout: str = ""
    stderr: str = ""
    tests: Mapping[str, str] = field(default_factory=dict, hash=False)
    carried: tuple[str, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict, hash=False)
    duration: float = 0.0

    @property
    def solved(self) -> bool:
        return self.score >= 1.0

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "flags": list(self.flags), "carried": list(self.carried)}


class Unclear(Exception):
    """The check has said nothing that can be read as a verdict: the message says what was expected."""


@dataclass(frozen=True)
class Outcome:
    """What a check did. `report`: its JUnit XML, or None; `written_to`: a hidden program that changed."""

    exit_code: int
    stdout: str
    stderr: str
    cut: bool  # stdout was longer than what is kept of it
    timed_out: bool
    duration: float
    report: bytes | None = None
    written_to: str = ""


@dataclass(frozen=True)
class Judged:
    score: float
    reason: str
    flags: tuple[str, ...] = ()
    tests: Mapping[str, str] = field(default_factory=dict, hash=False)


def judge(task: Task, outcome: Outcome) -> Judged:
    """Raises Unclear."""
    if outcome.timed_out:
        raise Unclear(f"it did not end within {task.check_timeout:g} s")
    tampered = _tampering(outcome)
    if tampered:
        return Judged(0.0, "tampered with", (tampered,))
    if task.scoring == "json":
        return _json(outcome)
    if task.scoring == "junit":
        return _junit(task, outcome)
    if outcome.exit_code in (126, 127):
        raise Unclear(f"it ended with {outcome.exit_code}: a program was not there, or could not be run")
    passed = outcome.exit_code == 0
    return Judged(float(passed), "passed" if passed else f"the check ended with {outcome.exit_code}")


def _tampering(outcome: Outcome) -> str:
    """The guard's mark counts whatever the exit code, which a pipe of shells may hide: a forged one is a loss."""
    for line in reversed(outcome.stderr.splitlines() + outcome.stdout.splitlines()):
        if line.startswith(guard.MARK):
            return line.removeprefix(guard.MARK).strip()[:500]
    if outcome.written_to:
        return f"{outcome.written_to} was written to"
    return f"ended with {guard.TAMPERED}" if outcome.exit_code == guard.TAMPERED else ""


def shorten(text: str, most: int = _MAX_OUTPUT) -> str:
    """The beginning and the end of what was printed; `most` is 128 or more."""
    if len(text) <= most:
        return text
    half = (most - 64) // 2  # the note takes no more
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters cut ...]\n{text[-half:]}"


# ---- JSON --------------------------------------------------------------------------------------------------------


def _json(outcome: Outcome) -> Judged:
    found = [score for line in outcome.stdout.splitlines() if (score := _score_in(line)) is not None]
    if len(found) > 1:
        return Judged(0.0, "tampered with", (f"{len(found)} lines claim to be the score",))
    if outcome.cut:
        raise Unclear("it printed more than is kept, so whether one line alone is the score can't be told")
    if not found:
        raise Unclear('no line that it printed is a JSON object with a number as its "score"')
    if outcome.exit_code != 0:
        return Judged(0.0, f"the check ended with {outcome.exit_code}")
    if not 0 <= found[0] <= 1:
        raise Unclear(f"its score is {found[0]}, which is not from 0 to 1")
    return Judged(found[0], f"the check said {found[0]:g}")


def _score_in(line: str) -> float | None:
    if not line.lstrip().startswith("{"):
        return None
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    score = value.get("score") if isinstance(value, dict) else None
    if isinstance(score, bool) or not isinstance(score, (int, float)) or not math.isfinite(score):
        return None
    return float(score)


# ---- JUnit XML ---------------------------------------------------------------------------------------------------


def _junit(task: Task, outcome: Outcome) -> Judged:
    tests = _tests(outcome.report)
    bad = sorted(name for name, result in tests.items() if result == "failed")
    if (outcome.exit_code == 0) != (not bad):
        flag = f"the report has {len(bad)} failures, and the check ended with {outcome.exit_code}"
        return Judged(0.0, "report and exit code disagree", (flag,), tests)
    wanted = task.fail_to_pass or (() if task.pass_to_pass else tuple(tests))
    if not wanted and not task.pass_to_pass:
        raise Unclear("its report has no tests")
    passed = {name for name, result in tests.items() if result == "passed"}
    broken = [name for name in task.pass_to_pass if not _in(name, passed)]
    if broken:
        return Judged(0.0, f"{len(broken)} tests that passed before do not: {broken[0][:200]}", (), tests)
    done = sum(_in(name, passed) for name in wanted)
    score = done / len(wanted) if wanted else 1.0
    return Judged(score, f"{done} of {len(wanted)} tests passed", (), tests)


def _in(wanted: str, names: set[str]) -> bool:
    return wanted in names or _dotted(wanted) in names


def _dotted(test: str) -> str:
    """pytest's `tests/test_a.py::Group::test_b[1]` as its report has it: `tests.test_a.Group::test_b[1]`."""
    head, bracket, rest = test.partition("[")  # what is in brackets may hold anything
    path, *names = head.split("::")
    if not names:
        return test
    module = path.removesuffix(".py").strip("./").replace("/", ".")
    return f"{'.'.join([module, *names[:-1]])}::{names[-1]}{bracket}{rest}"


def _tests(report: bytes | None) -> dict[str, str]:
    """Each test by `classname::name`, or by its name where it has no class. Raises Unclear."""
    if report is None:
        raise Unclear("it wrote no JUnit XML to $SANDBOX_JUNIT")
    try:
        text = report.decode()
        if "<!" in text.replace("<![CDATA[", ""):  # a document type: its entities grow without bound
            raise Unclear("its JUnit XML has a document type, or comments")
        root = ET.fromstring(text)
    except (ET.ParseError, ValueError) as error:
        raise Unclear(f"what it wrote to $SANDBOX_JUNIT is no XML: {error}") from None
    tests: dict[str, str] = {}
    for case in root.iter("testcase"):
        place, name = case.get("classname", ""), case.get("name", "")
        key = f"{place}::{name}" if place else name
        kinds = {child.tag for child in case}
        result = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        if tests.get(key) != "failed":  # a test and its teardown may both be there: the worse counts
            tests[key] = result
        if len(tests) > _MAX_TESTS:
            raise Unclear(f"its report has more than {_MAX_TESTS} tests")
    return tests
