"""A package's own tests as a task's check, run as any task is graded."""

from __future__ import annotations

import itertools
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence

from sandbox_gym.errors import SandboxError
from sandbox_gym.tasks import Prepared, Task, Verdict

from .packages import Package, Source

_TIMEOUT = 120.0  # seconds of a check: a quiet machine needs five at the most
_MAX_SECONDS = 15  # of processor time: some edits make a loop endless, also on a busy machine
# One commit, the same for every attempt, and no name of anyone who is there.
_COMMIT = (
    "export GIT_AUTHOR_DATE='2020-01-01T00:00:00Z' GIT_COMMITTER_DATE='2020-01-01T00:00:00Z'; "
    "git init -q -b main && git config user.name agent && git config user.email agent@localhost && git add -A && "
    "git commit -q -m '{title}'"
)
_MOST_REPORTED = 3  # failing tests that a report tells of
_MOST_LINES = 14  # of each one's code, and of what came
_MOST_PRINTED = 24
_HEADER = re.compile(r"_{3,} (.+?) _{3,}")
_PLACE = re.compile(r"\S+\.py:\d+: .*")
_ADDRESS = re.compile(r"0x[0-9a-fA-F]{6,}")


def task(source: Source, id: str, **fields: object) -> Task:
    """A task over these files, judged by the package's tests."""
    package = source.package
    place = "" if package.source == "." else f"PYTHONPATH={package.source} "
    # What is installed beside pytest would differ from machine to machine.
    pytest = f"{place}PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 python -m pytest -q --tb=long -c /dev/null --rootdir=."
    record: dict[str, object] = {
        "id": id,
        "check": f"ulimit -t {_MAX_SECONDS}; {pytest} {package.tests}",
        "files": {path: _content(data) for path, data in source.shown.items()},
        "hidden": {path: _content(data) for path, data in source.tests.items()},
        "check_timeout": _TIMEOUT,
        "setup": (_COMMIT.format(title=package.title),),
        "scoring": "junit",
        **fields,
    }
    return Task(**record)  # type: ignore[arg-type]  # the record checks its fields itself


def _content(data: bytes) -> str | bytes:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


def prepare(source: Source, *, backend: str = "native") -> tuple[Prepared, list[str]]:
    """The unharmed package, ready for attempts, and its tests that passed twice, sorted.

    Raises SandboxError where it can make no tasks here: its tests don't run, or Python has it installed.
    """
    package = source.package
    prepared = Prepared(task(source, package.name), backend=backend)
    try:
        _check_absent(prepared, package)
        with prepared.start() as box:
            again = prepared.grade(box)
        stable = sorted(passed(prepared.untouched.tests) & passed(again.tests))
        if not stable:
            raise SandboxError(
                f"none of the tests of {package.title} passes here: leave it out with --packages.\n"
                f"{again.stdout[-1000:]}"
            )
    except BaseException:
        prepared.close()
        raise
    return prepared, stable


def _check_absent(prepared: Prepared, package: Package) -> None:
    """An agent would find the package whole, beside the broken one."""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package.name!r}) is not None)"
    with prepared.start() as box:
        if not box.exec(["python", "-I", "-c", code], 30.0, cwd="/").ok:
            raise SandboxError(
                f"{package.name} is installed in this Python, where an agent would read it whole: make tasks of others "
                "with --packages, or in an environment without it"
            )


def passed(tests: Mapping[str, str]) -> set[str]:
    return {test for test, result in tests.items() if result == "passed"}


def report(package: Package, verdict: Verdict, failed: Sequence[str]) -> str:
    """What goes wrong, as a user would tell it: what was tried and what came, and nothing of where the bug is."""
    shown: list[str] = []
    for header, lines in _sections(verdict.stdout):
        name = header.rpartition(".")[2]
        if len(shown) < _MOST_REPORTED and any(test.rpartition("::")[2] == name for test in failed):
            told = _told(lines)
            if told and told not in shown:
                shown.append(told)
    cases = "\n\n".join(f"```\n{told}\n```" for told in shown)
    more = f" ({len(failed)} checks of ours fail.)" if len(failed) > len(shown) else ""
    return (
        f"{package.title} misbehaves since its last change.{more} What we see:\n\n{cases}\n\n"
        f"Find the cause in the package and mend it: its source is in `{_root(package)}`, in a git repository of one "
        "commit. Your change will be judged by the package's own tests, which are not here; tests that you add or "
        "change don't count.\n"
    )


def _root(package: Package) -> str:
    return package.name if package.source == "." else f"{package.source}/{package.name}"


def _sections(output: str) -> list[tuple[str, list[str]]]:
    """Each failure in pytest's output: the test's name in its header, and its lines."""
    found: list[tuple[str, list[str]]] = []
    for line in output.splitlines():
        header = _HEADER.fullmatch(line)
        if header:
            found.append((header[1], []))
        elif line.startswith("==="):
            found.append(("", []))
        elif found:
            found[-1][1].append(line)
    return [(header, lines) for header, lines in found if header]


def _told(lines: Sequence[str]) -> str:
    """What the test did, with which arguments, what came of it: not the frames below, which lead to the bug."""
    own = list(itertools.takewhile(lambda line: not _PLACE.fullmatch(line), lines))
    given = [line for line in own if re.match(r"\w+ = ", line) and not line.startswith("self = ")]
    code = [line[4:] for line in own if line.startswith(("    ", ">   "))]
    begin = next((place for place, line in enumerate(code) if line.lstrip().startswith("def ")), -1)
    came = [line[1:] for line in lines if line.startswith("E  ") and set(line[1:]) - set(" ^~")]
    place = next((place for place, line in enumerate(lines) if "Captured stdout call" in line), len(lines))
    said = itertools.takewhile(lambda line: not re.match(r"-{3,} Captured", line), lines[place + 1 :])
    if not came:
        return ""
    parts = (
        given,
        code[begin + 1 :][-_MOST_LINES:],
        came[:_MOST_LINES],
        itertools.islice(said, _MOST_PRINTED),
    )
    text = "\n".join(textwrap.dedent("\n".join(part)).strip("\n") for part in parts).strip("\n")
    short = "\n".join(line[:300] for line in text.split("\n"))
    return _ADDRESS.sub("0x...", short).replace(sys.base_prefix, "/usr")
