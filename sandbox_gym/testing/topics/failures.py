"""How things end: guests that crash, hang or lie, sandboxes that are terminated, lives that are over."""

from __future__ import annotations

import threading
import time

from sandbox_gym.errors import ProtocolError, SandboxDied, SandboxError, SandboxTimeout
from sandbox_gym.testing.subject import PATIENCE, Subject, check, expect, output, raises, until, value

# Finds the guest's end of the wire, as any code in it can.
_WIRE = """
import sys, time
frame = sys._getframe()
while type(frame.f_locals.get('self')).__name__ != 'Agent':
    frame = frame.f_back
wire = frame.f_locals['self'].connection.sock
"""


@check("failure")
def guest_ends(subject: Subject) -> None:
    """A guest that ends by itself is SandboxDied, now and at every later call; others go on."""
    box, other = subject.create(), subject.create()
    with raises(SandboxDied, "the end of the guest"):
        box.run_code("import os; os._exit(3)")
    expect(box.status, "dead", "status")
    for name, call in (("run_code", lambda: box.run_code("1")), ("snapshot", box.snapshot)):
        with raises(SandboxDied, f"{name} after its end"):
            call()
    expect(value(other, "6 * 7"), "42", "another sandbox")


@check("failure")
def guest_kills_all(subject: Subject) -> None:
    """`kill -9 -1` inside ends what runs there, at most the sandbox, and no call hangs."""
    box, other = subject.create(), subject.create()
    started = time.monotonic()
    try:
        box.shell("sleep 98771 & kill -9 -1; wait", timeout=PATIENCE)
        expect(value(box, "6 * 7"), "42", "a cell after")
    except SandboxDied:
        expect(box.status, "dead", "status")
    assert time.monotonic() - started < PATIENCE, "the call hung"
    expect(value(other, "6 * 7"), "42", "another sandbox")


@check("failure")
def stubborn_cells_end_the_sandbox(subject: Subject) -> None:
    """A cell that ignores its interrupt takes the sandbox with it, soon, and later calls say so."""
    box = subject.create()
    code = "import time\nwhile True:\n    try:\n        while True: time.sleep(0.01)\n    except BaseException: pass"
    started = time.monotonic()
    result = box.run_code(code, timeout=1.0)
    assert result.timed_out and result.error is not None, result
    assert time.monotonic() - started < PATIENCE / 2, "it took too long"
    expect(box.status, "dead", "status")
    with raises(SandboxDied, "a call after"):
        box.run_code("1")


@check("failure")
def lying_guests_are_ended(subject: Subject) -> None:
    """A guest that writes garbage to the wire, or floods it, is ended by the call, and harms no other."""
    other = subject.create()
    for lie in (
        "wire.sendall(bytes(range(256)) * 16); time.sleep(60)",
        "while True: wire.sendall(b'\\xff' * 65536)",
    ):
        box = subject.create()
        with raises((ProtocolError, SandboxDied, SandboxTimeout), lie):
            result = box.run_code(_WIRE + lie, timeout=5.0)
            if result.timed_out:  # it was interrupted before; what it has said is no answer to the next call
                box.run_code("1", timeout=5.0)
        expect(box.status, "dead", "status")
    expect(value(other, "6 * 7"), "42", "another sandbox")


@check("failure")
def terminate_is_final(subject: Subject) -> None:
    """It may be called again, and every call after it is SandboxDied."""
    box = subject.create()
    box.checkpoint("one")
    box.terminate()
    box.terminate()
    expect(box.status, "terminated", "status")
    for name, call in (
        ("run_code", lambda: box.run_code("1")),
        ("shell", lambda: box.shell("true")),
        ("read_file", lambda: box.read_file("/etc/passwd")),
        ("snapshot", box.snapshot),
        ("network_log", box.network_log),
        ("rewind", lambda: _rewind(box)),
    ):
        with raises(SandboxDied, f"{name} after terminate"):
            call()


def _rewind(box: object) -> None:
    """Its checkpoints have gone with it, and that is told as its end or as there being none."""
    try:
        box.rewind("one")  # type: ignore[attr-defined]
    except KeyError as error:
        raise SandboxDied(str(error)) from None


@check("failure")
def terminate_ends_a_call(subject: Subject) -> None:
    """A call that waits in another thread ends with SandboxDied."""
    box = subject.create()
    outcome: list[object] = []

    def wait() -> None:
        try:
            outcome.append(box.shell("echo > /tmp/begun; sleep 98772", timeout=4 * PATIENCE))
        except SandboxError as error:
            outcome.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    box.terminate()
    thread.join(PATIENCE)
    assert outcome and isinstance(outcome[0], SandboxDied), f"it ended with {outcome}"
    expect(box.status, "terminated", "status")


@check("lifetime")
def ttl(subject: Subject) -> None:
    """A sandbox ends when its time to live is over."""
    box = subject.create(ttl=1.5)
    expect(box.status, "running", "status at first")

    def over() -> bool:
        try:
            box.run_code("1")
        except SandboxDied:
            return True
        return False

    until(over, "it has ended", 30.0)
    assert box.status in ("dead", "terminated"), box.status


@check("lifetime")
def idle(subject: Subject) -> None:
    """An idle sandbox ends; one that is not ephemeral has its state at the next call."""
    first, second = subject.create(idle_timeout=1.0), subject.create(idle_timeout=1.0, ephemeral=False)
    value(second, "x = 1")
    output(second, "echo kept > kept")
    until(lambda: first.status == "dead", "the ephemeral one is over", 30.0)
    with raises(SandboxDied, "a call after"):
        first.run_code("1")
    until(lambda: second.status == "stopped", "the other is put to rest", 30.0)
    expect((value(second, "x"), second.read_text("kept")), ("1", "kept\n"), "the other's state")
