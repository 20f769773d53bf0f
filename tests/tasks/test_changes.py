"""What is carried over while a sandbox goes on, stalls, or puts one thing in the place of another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from sandbox_gym.sandbox import Sandbox
from sandbox_gym.tasks import Prepared, Task, changes
from sandbox_gym.tasks.changes import Changes
from sandbox_gym.tasks.grader import Grader
from tests.conftest import kill_guest
from tests.tasks.conftest import DOUBLE

Prepare = Callable[[Task], Prepared]

# Each file named `gone...` goes, or becomes a folder, just before the guest's own process would read it.
_GOES = """
import os, sandbox_gym_guest.agent as a
real = a._HANDLERS[a.Op.READ]
def read(path, offset, size):
    if os.path.basename(path).startswith("gone"):
        os.unlink(path)
        if path.endswith("folder"):
            os.mkdir(path)
    return real(path, offset, size)
a._HANDLERS[a.Op.READ] = read
"""


def test_files_that_come_and_go_are_no_harm(double: Prepared) -> None:
    with double.start() as box:
        assert box.shell(f"{double.task.solution}; mkdir cache").ok
        loop = "while :; do for i in 1 2 3 4 5 6 7 8 9; do echo x > cache/f$i; done; rm -r cache; mkdir cache; done"
        running = box.start(["sh", "-c", loop])
        for _ in range(5):
            found = double.grade(box)
            assert (found.score, found.flags) == (1.0, ()), found
        assert running.poll() is None


def test_a_file_that_goes_before_it_is_read_is_not_there(prepared: Prepare) -> None:
    task = replace(DOUBLE, id="goes", files={**DOUBLE.files, "gone": "first"}, solution="")
    with prepared(task).start() as box:
        assert box.shell(f"{DOUBLE.solution}; echo second > gone; touch gone-too gone-folder").ok
        assert box.run_code(_GOES).ok
        found = changes.collect(box, task, _before(task, prepared))
    assert list(found.files) == ["/workspace/calc.py"]
    assert [info.path for info in found.deleted] == ["/workspace/gone"]
    assert found.left_out == {}


def _before(task: Task, prepared: Prepare) -> changes.Listing:
    with prepared(task).start() as box:
        return changes.listing(box, task.roots)


def test_the_folder_that_is_not_there_is_an_empty_one(double: Prepared) -> None:
    with double.start() as box:
        assert box.shell("cd /; rm -r /workspace").ok
        found = double.grade(box)
    assert (found.score, found.flags, found.carried) == (0.0, (), ("/workspace/calc.py",))


def test_no_program_of_the_agent_s_reads_a_link(double: Prepared) -> None:
    with double.start() as box:
        links = "for i in 1 2 3 4 5 6; do ln -s /workspace/calc.py in$i; ln -s /etc out$i; done"
        broken = 'for f in $(type -ap readlink); do rm "$f"; printf "#!/bin/sh\\nexit 1\\n" > "$f"; chmod +x "$f"; done'
        assert box.shell(f"{double.task.solution}; {links}; {broken}").ok
        assert box.exec(["readlink", "in1"]).exit_code == 1
        found = double.grade(box)
    assert found.score == 1.0, found
    assert len(found.carried) == 7
    assert len(found.left_out) == 6


def test_every_link_counts(double: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "MAX_FILES", 5)
    with double.start() as box:
        assert box.shell("for i in 1 2 3 4 5 6; do ln -s /etc out$i; done").ok
        assert "more than 5 files" in double.grade(box).flags[0]


def test_a_sandbox_that_answers_without_end_is_read_no_longer(
    double: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changes, "MAX_SECONDS", 0.5)
    monkeypatch.setattr(changes, "_LEAST_SECONDS", 0.1)
    endless = "a._HANDLERS[a.Op.READ] = lambda path, offset, size: {'data': b'x', 'end': False}"
    with double.start() as box:
        assert box.shell(double.task.solution).ok
        assert box.run_code(f"import sandbox_gym_guest.agent as a\n{endless}").ok
        found = double.grade(box)
        assert (found.score, found.reason) == (0.0, "its workspace can't be read")
        assert "took longer than" in found.flags[0]
        assert box.status == "running"


class _Killed(Grader):
    """The first sandboxes of its checks are killed from outside, as the host does when it is short of memory."""

    kills = 1

    def _fresh(self) -> Sandbox:
        box = super()._fresh()
        if self.kills:
            self.kills -= 1
            kill_guest(box)
        return box


def test_a_check_whose_sandbox_is_killed_runs_again(double: Prepared) -> None:
    grader = _Killed(double.task, double.snapshot, double._grader._before)
    with double.start() as box:
        assert box.shell(double.task.solution).ok
        found = grader.grade(box)
        assert (found.score, found.flags, grader.kills) == (1.0, (), 0), found
        grader.kills = 2
        found = grader.grade(box)
    assert (found.score, grader.kills) == (0.0, 0)
    assert "the check's sandbox broke: SandboxDied" in found.reason


UTIL = replace(
    DOUBLE,
    id="util",
    files={"calc.py": "from util.plus import plus\n", "util/plus.py": "def plus(x):\n    return x\n"},
    hidden={
        "check.sh": "set -e\npython -B check.py\n",
        "check.py": "import calc\nassert calc.double(2) == 4\n",
    },
    setup=("python -m compileall -q util && test -d util/__pycache__", "mkdir util/old.egg-info"),
    check="bash check.sh",
    solution="printf 'def double(x): return x + x' > calc.py",
)
MOVES = {
    "linked back": "mkdir lib; mv util lib/util; ln -s lib/util util; sed -i 's/x$/x + x/' util/plus.py;"
    "printf 'import util.plus as u, os\\nassert os.path.islink(\"util\")\\ndouble = u.plus' > calc.py",
    "a file now": "rm -r util; echo x=1 > util; printf 'def double(x): return x + x' > util.py;"
    "printf 'from util import double' > calc.py",
    "gone": "rm -r util;"
    "printf 'import os\\nassert not os.path.exists(\"util\")\\ndef double(x): return x + x' > calc.py",
}


@pytest.mark.parametrize("name", MOVES)
def test_a_folder_goes_with_what_python_has_left_in_it(name: str, prepared: Prepare) -> None:
    with prepared(UTIL).start() as box:
        assert box.shell(MOVES[name]).ok
        found = prepared(UTIL).grade(box)
    assert found.score == 1.0, found
    assert not [path for path in found.left_out if path.startswith("/workspace/util")]


def test_a_folder_with_protected_files_stays(prepared: Prepare) -> None:
    task = replace(UTIL, id="kept", files={**UTIL.files, "util/test_plus.py": ""})
    with prepared(task).start() as box:
        assert box.shell(f"{task.solution}; rm -r util; touch util").ok
        found = changes.collect(box, task, _before(task, prepared))
        assert prepared(task).grade(box).score == 1.0
    left = {path.removeprefix("/workspace/"): why for path, why in found.left_out.items()}
    assert left["util"] == "protected files lie below"
    assert left["util/test_plus.py"] == "protected"
    assert any("__pycache__" in path for path in left)
    assert Changes.paths(found) == ("/workspace/calc.py", "/workspace/util/plus.py")
