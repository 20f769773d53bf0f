"""Names, lists, time to live, idleness, and the cap on live sandboxes."""

# ruff: noqa: PT012  (until it raises)
from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable

import pytest

from sandbox_gym.errors import SandboxDied, SandboxError
from sandbox_gym.sandbox import Sandbox


def until(condition: Callable[[], bool], seconds: float = 3.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_names_are_unique_among_the_living() -> None:
    with Sandbox.create("mine") as box:
        assert box.name == "mine" and Sandbox.get("mine") is box and Sandbox.get(box.id) is box
        with pytest.raises(SandboxError, match="mine"):
            Sandbox.create("mine")
        assert box in Sandbox.list()
    assert box not in Sandbox.list() and box.status == "terminated"
    with pytest.raises(KeyError, match="mine"):
        Sandbox.get("mine")
    with Sandbox.create("mine") as again:
        assert again.id != box.id


def test_terminate_is_idempotent_and_final() -> None:
    box = Sandbox.create()
    box.terminate()
    box.terminate()
    for call in (
        lambda: box.run_code("1"),
        lambda: box.shell("true"),
        box.snapshot,
        lambda: box.read_file("/etc/passwd"),
    ):
        with pytest.raises(SandboxDied, match=f"{box.name} is terminated"):
            call()
    assert "terminated" in repr(box)


def test_terminate_ends_a_call_in_another_thread(box: Sandbox) -> None:
    outcome: list[object] = []
    begun = threading.Event()

    def call() -> None:
        begun.set()
        try:
            outcome.append(box.run_code("import time; time.sleep(60)", timeout=60))
        except SandboxError as error:
            outcome.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    begun.wait()
    started = time.monotonic()
    box.terminate()
    thread.join(5)
    assert (
        time.monotonic() - started < 2 and isinstance(outcome[0], SandboxDied) and box.name in str(outcome[0])
    )
    assert box.status == "terminated"


def test_time_to_live() -> None:
    box = Sandbox.create(ttl=0.6)
    assert box.run_code("1").ok
    (copy,) = box.fork(1)
    assert box.run_code("1").ok
    started = time.monotonic()
    with pytest.raises(SandboxDied, match=f"{box.name}.*time to live"):
        while time.monotonic() - started < 3:
            box.run_code("1")
    assert time.monotonic() - started < 1.5
    with pytest.raises(SandboxDied, match="time to live"):
        copy.run_code("import time; time.sleep(5)")


def test_an_idle_sandbox_ends() -> None:
    box = Sandbox.create(idle_timeout=0.2)
    for _ in range(5):
        assert box.run_code("import time; time.sleep(0.1)").ok  # used: not idle
    assert box.run_code("import time; time.sleep(0.4)").ok  # at work: not idle
    assert until(lambda: box.status == "dead")
    with pytest.raises(SandboxDied, match=r"idle for 0\.2 s"):
        box.run_code("1")


def test_an_idle_sandbox_that_is_not_ephemeral_rests_and_wakes() -> None:
    with Sandbox.create("rester", idle_timeout=0.15, ephemeral=False) as box:
        box.run_code("x = 1; open('f', 'w').write('disk')")
        for _ in range(3):
            assert until(lambda: box.status == "stopped")
            assert box in Sandbox.list() and Sandbox.get("rester") is box
            with pytest.raises(SandboxError, match="rester"):
                Sandbox.create("rester")
            assert box.run_code("x += 1; x, open('f').read()").ok
            assert box.status == "running"
        assert box.run_code("x").value == "4"
        assert box.shell("cat f").stdout == "disk"
        row = next(row for row in box._backend.list() if row["id"] == box.id)
        assert row["name"] == "rester"
        assert until(lambda: box.status == "stopped")
    assert box.status == "terminated"


def test_what_still_runs_in_it_is_not_idle() -> None:
    with Sandbox.create(idle_timeout=0.1, ephemeral=False) as box:
        box.shell("sleep 60 &")
        assert not until(lambda: box.status == "stopped", 0.5)
        box.shell("kill $(pidof sleep || pgrep sleep)")
        assert until(lambda: box.status == "stopped")


def test_rewind_keeps_watching_for_idleness() -> None:
    box = Sandbox.create(idle_timeout=0.3)
    box.checkpoint()
    with pytest.raises(SandboxDied):
        box.run_code("import os; os._exit(1)")
    box.rewind()
    assert box.run_code("1").ok
    assert until(lambda: box.status == "dead")
    box.terminate()


def test_the_context_manager_terminates_on_errors_too() -> None:
    with pytest.raises(ZeroDivisionError), Sandbox.create() as box:
        1 / 0  # noqa: B018
    assert box.status == "terminated"


def test_the_cap_on_live_sandboxes(client: Callable[..., subprocess.Popen[str]]) -> None:
    code = """
from sandbox_gym.errors import LimitExceeded
boxes = [Sandbox.create() for _ in range(5)]
def refused(call):
    try:
        call()
    except LimitExceeded as error:
        assert "cap of 5" in str(error) and "SANDBOX_GYM_MAX_SANDBOXES" in str(error), error
        return True
assert refused(Sandbox.create)
assert refused(lambda: boxes[0].fork(1))
boxes[0].run_code("x = 1")
boxes[0].checkpoint()
boxes[0].run_code("x = 2")
boxes[0].rewind()  # in place: makes none more
assert boxes[0].run_code("x").value == "1"
boxes[4].terminate()
assert refused(lambda: boxes[0].fork(2))
(copy,) = boxes[0].fork(1)
assert copy.run_code("x").value == "1"
print("good")
"""
    out, err = client(code, SANDBOX_GYM_MAX_SANDBOXES="5").communicate(timeout=30)
    assert out == "good\n", err


@pytest.mark.parametrize("arguments", [{"backend": "nope"}, {"image": "/no/such"}, {"mounts": ["/no/such"]}])
def test_arguments_that_are_wrong_are_told(arguments: dict[str, object]) -> None:
    with pytest.raises((ValueError, FileNotFoundError)):
        Sandbox.create(**arguments)  # type: ignore[arg-type]
