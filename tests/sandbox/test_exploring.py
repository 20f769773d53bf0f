"""explore and race: the best copy lives on, everything else is gone, whatever happens. (`no_leaks` looks.)"""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from sandbox_gym.errors import SandboxDied, SandboxError
from sandbox_gym.exploring import explore, race
from sandbox_gym.sandbox import Sandbox

SMALL: dict[str, Any] = {"memory": "256Mi", "disk": "64Mi", "pids": 64}


# ---- race ---------------------------------------------------------------------------------------------------------


def test_the_first_that_passes_is_kept(box: Sandbox) -> None:
    box.shell("echo broken > state")
    patches = ["echo worse > state", "sleep 60", "echo fixed > state", "exit 3"]
    with race(box, patches, "grep fixed state", parallel=4) as tried:
        assert tried and tried.winner is not None and tried.sandbox is not None
        assert (tried.winner.name, tried.winner.index, tried.winner.status) == (
            "echo fixed > state",
            2,
            "passed",
        )
        assert tried.winner.outputs[-1].stdout == "fixed\n" and tried.winner.duration > 0
        assert tried.sandbox.read_text("state") == "fixed\n"
        assert Sandbox.list() == [box, tried.sandbox]
        by_name = {trial.name: trial for trial in tried}
        assert by_name["sleep 60"].status == "stopped"
        assert next(iter(tried)) is tried.winner and len(tried) == 4
    assert tried.sandbox.status == "terminated"
    assert box.read_text("state") == "broken\n"


def test_none_passes_and_each_says_why(box: Sandbox) -> None:
    def breaks(copy: Sandbox) -> None:
        raise KeyError("mine")

    actions: dict[str, Any] = {
        "no": "echo no > f",
        "fails": ["echo one", "echo two; exit 3", "echo three"],
        "breaks": breaks,
    }
    tried = race(box, actions, "cat f; false")
    assert not tried and tried.winner is None and tried.sandbox is None
    no, fails, breaks_trial = tried
    assert (no.status, [output.stdout for output in no.outputs]) == ("failed", ["", "no\n"])
    assert [(output.stdout, output.exit_code) for output in fails.outputs] == [("one\n", 0), ("two\n", 3)]
    assert breaks_trial.status == "error" and isinstance(breaks_trial.error, KeyError)


def test_functions(box: Sandbox) -> None:
    box.run_code("x = 1")

    def double(copy: Sandbox) -> str:
        copy.run_code("x = 2 * x")
        return "doubled"

    def check(copy: Sandbox) -> bool:
        return copy.run_code("x").value == "2"

    with race(box, [double, "true"], check) as tried:
        assert tried.winner is not None and (tried.winner.name, tried.winner.value) == ("double", "doubled")
    assert box.run_code("x").value == "1"


def test_a_check_that_fails_to_run_is_no_verdict(box: Sandbox) -> None:
    def check(copy: Sandbox) -> bool:
        raise OSError("no tests here")

    (trial,) = race(box, ["true"], check)
    assert trial.status == "error" and str(trial.error) == "no tests here"


def test_time_is_over(box: Sandbox) -> None:
    started = time.monotonic()
    tried = race(box, ["echo begun; sleep 60", "sleep 61", "true"], "false", timeout=0.5, parallel=2)
    assert time.monotonic() - started < 5
    assert not tried
    first, _, third = tried
    assert first.status == "failed" and first.outputs[0].timed_out and first.outputs[0].stdout == "begun\n"
    assert third.status == "waiting" and third.outputs == ()


def test_a_function_that_hangs_holds_nobody(box: Sandbox) -> None:
    let_go, seen = threading.Event(), []

    def hangs(copy: Sandbox) -> None:
        let_go.wait(60)
        try:
            copy.shell("true")
        except SandboxError as error:
            seen.append(error)

    started = time.monotonic()
    with race(box, [hangs, "true"], "true", parallel=2) as tried:
        assert tried.winner is not None and tried.winner.name == "true"
        assert [trial.status for trial in tried] == ["passed", "stopped"]
        assert time.monotonic() - started < 5
    threads = [thread for thread in threading.enumerate() if thread.name == "contest"]
    let_go.set()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert [type(error) for error in seen] == [SandboxDied]


def test_a_copy_that_dies_is_an_error_and_the_others_go_on(box: Sandbox) -> None:
    def dies(copy: Sandbox) -> None:
        copy.run_code("import os; os._exit(1)")

    with race(box, [dies, "true"], "true", parallel=1) as tried:
        assert [(trial.name, trial.status) for trial in tried] == [("true", "passed"), ("dies", "error")]
        assert isinstance(list(tried)[1].error, SandboxDied)


@pytest.mark.parametrize("raised", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_whatever_a_function_raises_the_others_go_on(box: Sandbox, raised: BaseException) -> None:
    def leaves(copy: Sandbox) -> None:
        raise raised

    with race(box, [leaves, "touch ok"], "test -e ok", parallel=1) as tried:
        assert [(trial.name, trial.status) for trial in tried] == [
            ("touch ok", "passed"),
            ("leaves", "error"),
        ]
        assert list(tried)[1].error is raised
        assert Sandbox.list() == [box, tried.sandbox]
    (trial,) = race(box, ["true"], leaves)  # type: ignore[arg-type]
    assert trial.error is raised


def test_never_more_copies_than_may_live(box: Sandbox) -> None:
    most, lock = [0], threading.Lock()

    def count(copy: Sandbox) -> None:
        with lock:
            most[0] = max(most[0], len(Sandbox.list()) - 1)

    assert not race(box, [count] * 12, "false", parallel=3)
    assert 1 <= most[0] <= 3


# ---- explore ------------------------------------------------------------------------------------------------------


def test_the_fastest_is_kept() -> None:
    variants = {
        "slow": "sleep 0.6; echo slow > out",
        "fast": "echo fast > out",
        "fails": ["true", "exit 2", "true"],
    }
    with explore(variants, parallel=3, **SMALL) as tried:
        assert tried.winner is not None and tried.sandbox is not None
        assert [(trial.name, trial.status) for trial in tried] == [
            ("fast", "passed"),
            ("slow", "passed"),
            ("fails", "failed"),
        ]
        assert tried.sandbox.read_text("out") == "fast\n"
        assert Sandbox.list() == [tried.sandbox]
        assert [output.exit_code for output in list(tried)[2].outputs] == [0, 2]


def test_each_is_fresh() -> None:
    tried = explore(["test ! -e left && touch left && false"] * 3, parallel=1, **SMALL)
    assert [trial.outputs[0].exit_code for trial in tried] == [1, 1, 1]


def test_what_cannot_be_made_raises() -> None:
    with pytest.raises(ValueError, match="cpus"):
        explore(["true", "true"], cpus=-1)
    with pytest.raises(FileNotFoundError):
        explore(["true"], mounts=["/nothing/here"])


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda box: explore("true"), TypeError),
        (lambda box: explore([]), ValueError),
        (lambda box: explore([[]]), TypeError),
        (lambda box: explore([7]), TypeError),  # type: ignore[list-item]
        (lambda box: explore(["true"], timeout=0), ValueError),
        (lambda box: explore(["true"], parallel=0), ValueError),
        (lambda box: race(box, {}, "true"), ValueError),
        (lambda box: race(box, ["true"], 7), TypeError),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_such_call(box: Sandbox, call: Callable[[Sandbox], Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        call(box)


PROGRAM = """
import threading, signal
from sandbox_gym.exploring import explore, race
from sandbox_gym.backends import lookup

def interrupt(*ignored):
    begun.wait()
    os.kill(os.getpid(), signal.SIGINT)

begun = threading.Event()
threading.Thread(target=interrupt).start()
box = Sandbox.create()

def action(copy):
    begun.set()
    copy.shell("sleep 60")

try:
    CALL
except KeyboardInterrupt:
    rows = [row["id"] for row in lookup.get("native").list() if row["state"] == "running"]
    print(rows == [box.id], flush=True)
"""


@pytest.mark.parametrize(
    "call",
    [
        "race(box, [action, 'sleep 60'], 'true', parallel=2)",
        "begun.set(); explore(['sleep 60', 'sleep 61'], parallel=2)",
    ],
)
def test_ctrl_c_leaves_nothing(client: Callable[..., subprocess.Popen[str]], call: str) -> None:
    out, err = client(PROGRAM.replace("CALL", call)).communicate(timeout=60)
    assert out == "True\n", err
