"""Processes and shells that live on between calls: their streams, terminals, signals, bounds, and their end."""

# ruff: noqa: E501  (programs for the guest are text)
from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from sandbox_gym.errors import LimitExceeded, ProtocolError, SandboxDied, SnapshotError
from sandbox_gym.sandbox import Sandbox
from tests.sandbox.watching import CHATTY, MIB, alive, forget_after, read_until

# ---- starting and ending --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "code"), [("exit 0", 0), ("exit 7", 7), ("kill -TERM $$", 143), ("kill -9 $$", 137)]
)
@pytest.mark.parametrize("pty", [False, True])
def test_exit_codes(box: Sandbox, line: str, code: int, pty: bool) -> None:
    process = box.start(["sh", "-c", f"sleep 0.05; {line}"], pty=pty)
    assert process.poll() is None and process.info().exit_code is None
    assert process.wait(10) == process.wait(10) == process.poll() == process.info().exit_code == code


@pytest.mark.parametrize(
    ("argv", "code", "text"),
    [
        (["no-such-program"], 127, "no-such-program: No such file"),
        (["/etc/passwd"], 126, "Permission denied"),
    ],
)
@pytest.mark.parametrize("pty", [False, True])
def test_a_program_that_can_t_be_started_has_ended(
    box: Sandbox, argv: list[str], code: int, text: str, pty: bool
) -> None:
    process = box.start(argv, pty=pty)
    assert process.poll() == process.wait(1) == code and process.pid == 0
    assert text in process.read_text(stream="stdout" if pty else "stderr")
    process.kill()
    with pytest.raises(BrokenPipeError):
        process.write("x")
    assert box.start(["true"], cwd="/no/such").wait(5) == 127


@pytest.mark.parametrize("argv", [[], "ls", ["a\0b"], [b"ls"], ["\ud800"]])
def test_an_argv_that_is_none(box: Sandbox, argv: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        box.start(argv)
    assert box.processes() == []


def test_where_and_with_what_it_runs(box: Sandbox) -> None:
    process = box.start(["sh", "-c", "pwd; echo $A-$HOME; cat"], cwd="/tmp", env={"A": "1 2"})
    assert read_until(process, b"root\n") == b"/tmp\n1 2-/root\n"
    assert process.wait(0.05) is None
    process.close_stdin()
    assert process.wait(10) == 0


def test_wait_returns_none_when_time_is_up(box: Sandbox) -> None:
    process, started = box.start(["sleep", "60"]), time.monotonic()
    assert process.wait(0.1) is None
    assert 0.1 <= time.monotonic() - started < 2
    with pytest.raises(ValueError, match="timeout"):
        process.wait(0)


def test_another_thread_s_calls_go_between_the_parts_of_a_wait(box: Sandbox) -> None:
    process = box.start(["sh", "-c", "read line; exit $line"])
    codes: list[int | None] = []
    waiter = threading.Thread(target=lambda: codes.append(process.wait(20)))
    waiter.start()
    started = time.monotonic()
    for _ in range(3):
        assert box.run_code("1").ok
    assert time.monotonic() - started < 5
    process.write("5\n")
    waiter.join()
    assert codes == [5]


def test_handles_and_listings(box: Sandbox) -> None:
    first, second = box.start(["sleep", "60"]), box.start(["true", "x" * 1000, *map(str, range(50))])
    assert [p.id for p in box.processes()] == [first.id, second.id]
    same = box.process(first.id)
    assert (same.id, same.pid, same.argv, same.pty) == (first.id, first.pid, ("sleep", "60"), False)
    assert box.shell(f"cat /proc/{first.pid}/comm").stdout == "sleep\n"
    assert len(second.argv) == 16 and second.argv[1] == "x" * 256
    same.kill()
    assert first.poll() == 137
    with pytest.raises(KeyError, match=box.name):
        box.process("nothing")


def test_a_sandbox_s_end_is_theirs(box: Sandbox) -> None:
    process = box.start(["sleep", "60"])
    box.terminate()
    with pytest.raises(SandboxDied):
        process.poll()


# ---- output ---------------------------------------------------------------------------------------------------------


def test_each_read_has_what_is_new(box: Sandbox) -> None:
    process = box.start(["sh", "-c", "echo out; echo err >&2; read x; echo more; read x"])
    assert process.read(10) == b"out\n"
    assert process.read_text(10, "stderr") == "err\n"
    assert process.read() == process.read(0.05) == process.read(0, "stderr") == b""
    process.write("go\n")
    assert process.read(10) == b"more\n"
    process.close_stdin()
    started = time.monotonic()
    assert process.read(30) == b""  # ends with the stream, not with the time
    assert time.monotonic() - started < 10
    with pytest.raises(ValueError, match="stream"):
        process.read(stream="stdin")  # type: ignore[arg-type]


def test_what_it_printed_can_be_read_after_its_end(box: Sandbox) -> None:
    process = box.start(["sh", "-c", "echo out; echo err >&2"])
    assert process.wait(10) == 0
    assert (process.read(), process.read(stream="stderr")) == (b"out\n", b"err\n")


def test_the_newest_mebibyte_is_kept(box: Sandbox) -> None:
    program = "import sys; b = bytes(65536); [sys.stdout.buffer.write(b) for _ in range(160)]; sys.stdout.buffer.write(b'end')"
    process = box.start(["python3", "-c", program])
    assert process.wait(30) == 0
    assert box.shell("true").ok  # the last of it is out of the pipe
    data = process.read()
    assert len(data) == MIB and data.endswith(b"\0end")
    assert process.info().stdout_cut == 9 * MIB + 3 and process.info().stderr_cut == 0


@pytest.mark.parametrize("meanwhile", ["idle", "cell", "waiting cell", "command", "session"])
def test_a_full_pipe_never_stops_it(box: Sandbox, meanwhile: str) -> None:
    """40 MiB on each stream that nobody reads, whatever the sandbox does in the meantime."""
    process = box.start(["python3", "-c", CHATTY])
    wait = "while [ ! -e done ]; do sleep 0.01; done"
    if meanwhile == "idle":
        deadline = time.monotonic() + 30
        while not any(entry.path.endswith("done") for entry in box.list_files()):
            assert time.monotonic() < deadline
    elif meanwhile == "cell":
        assert box.run_code("import os\nwhile not os.path.exists('done'): pass").ok
    elif meanwhile == "waiting cell":
        assert box.run_code(f"import subprocess\nsubprocess.run({wait!r}, shell=True, check=True)").ok
    elif meanwhile == "command":
        assert box.shell(wait, timeout=30).ok
    else:
        assert box.session().run(wait, timeout=30).ok
    assert process.poll() is None
    process.close_stdin()
    assert process.wait(10) == 0
    assert process.info().stdout_cut == process.info().stderr_cut == 39 * MIB


def test_what_writes_without_end_leaves_a_cell_most_of_its_time(box: Sandbox) -> None:
    count = "import time\nn, end = 0, time.process_time() + 0.5\nwhile time.process_time() < end: n += 1\nn"
    alone = int(box.run_code(count).value or 0)
    process = box.start(["yes"])
    beside = int(box.run_code(count).value or 0)
    assert beside > alone / 3
    assert process.info().stdout_cut > 0
    assert box.run_code("while True: pass", timeout=0.3).timed_out
    process.kill()


def test_the_output_of_what_ended_is_bounded_too(box: Sandbox) -> None:
    processes = [box.start(["head", "-c", str(MIB), "/dev/zero"]) for _ in range(40)]
    assert all(process.wait(10) == 0 for process in processes)
    box.shell("true")
    kept = [len(process.read()) for process in processes]
    assert sum(kept) <= 32 * MIB and kept[-1] == MIB
    assert [process.info().stdout_cut + n for process, n in zip(processes, kept)] == [MIB] * 40


# ---- input ----------------------------------------------------------------------------------------------------------


def test_input_and_its_end(box: Sandbox) -> None:
    process = box.start(["cat"])
    assert process.write("one\n") == 4
    assert process.read(10) == b"one\n"
    assert process.write(b"") == 0
    process.close_stdin()
    process.close_stdin()
    assert process.wait(10) == 0
    with pytest.raises(BrokenPipeError, match=box.name):
        process.write(b"x")


def test_more_input_than_a_pipe_holds(box: Sandbox) -> None:
    process = box.start(["wc", "-c"])
    assert process.write(bytes(5 * MIB)) == 5 * MIB
    process.close_stdin()
    assert process.read(10).strip() == str(5 * MIB).encode()
    echo = box.start(["cat"])
    assert echo.write(bytes(5 * MIB)) == 5 * MIB  # though nobody reads what it prints


def test_input_that_is_not_read_is_counted(box: Sandbox) -> None:
    process = box.start(["sleep", "60"])
    started = time.monotonic()
    taken = process.write(bytes(MIB), timeout=0.2)
    assert 0 < taken < MIB and time.monotonic() - started < 3
    assert process.write(b"x", timeout=0.05) == 0


# ---- signals --------------------------------------------------------------------------------------------------------

_TREE = "sleep 60 & setsid sleep 60 & (trap '' TERM HUP INT; sleep 60; true) & sh -c 'sleep 60; true' & echo up; wait; wait; wait; wait"


@pytest.mark.parametrize("pty", [False, True])
def test_a_kill_reaches_all_that_it_started(box: Sandbox, pty: bool) -> None:
    other = box.start(["sleep", "61"])
    process = box.start(["bash", "-c", _TREE], pty=pty)
    read_until(process, b"up")
    assert len(alive(box)) >= 6
    process.kill()
    assert process.poll() == 137
    assert alive(box) == ["sleep"] and other.poll() is None
    process.kill()
    process.kill(signal.SIGTERM)


def test_a_kill_after_its_end_reaches_what_it_left(box: Sandbox) -> None:
    process = box.start(["sh", "-c", "sleep 60 & sleep 60 & echo left"])
    assert process.wait(10) == 0
    assert alive(box) == ["sleep", "sleep"]
    process.kill()
    assert alive(box) == [] and process.poll() == 0


def test_a_signal_that_is_handled(box: Sandbox) -> None:
    process = box.start(
        ["bash", "-c", "trap 'echo caught; exit 5' USR1; echo up; while :; do sleep 0.01; done"]
    )
    read_until(process, b"up\n")
    process.kill(signal.SIGUSR1)
    assert read_until(process, b"caught") == b"caught\n"
    assert process.wait(10) == 5
    for number in (0, 65, -9):
        with pytest.raises(ValueError, match="signal"):
            process.kill(number)


def test_a_fork_bomb_can_be_killed(boxes: Callable[[int], list[Sandbox]]) -> None:
    bombed, other = boxes(2)
    process = bombed.start(["bash", "-c", "b() { b | b & b; }; b"])
    assert other.run_code("6 * 7").value == "42"
    process.kill()
    assert process.poll() == 137
    assert forget_after(bombed) == []
    assert bombed.shell("echo fine").stdout == "fine\n"


def test_time_outs_of_calls_leave_it_alone(box: Sandbox) -> None:
    """Neither it nor what it starts while a call is under way."""
    box.session().run("sleep 61 & x=1")
    process = box.start(
        ["sh", "-c", "while [ ! -e go ]; do sleep 0.01; done; sleep 62 & setsid sleep 63 & wait; wait"]
    )
    begun = "while ! pgrep -f 'sleep 63' >/dev/null; do :; done"
    assert box.shell(f"touch go; sleep 70 & {begun}; sleep 70", timeout=3).timed_out
    assert box.run_code("import subprocess; subprocess.run(['sleep', '70'])", timeout=0.3).timed_out
    assert box.session("other").run("sleep 70", timeout=0.3).timed_out
    lines = box.shell("cat /proc/[0-9]*/cmdline | tr '\\0' ' '").stdout
    assert "sleep 61" in lines and "sleep 62" in lines and "sleep 63" in lines and "sleep 70" not in lines
    assert process.poll() is None
    assert box.session().run("echo $x; kill %1").stdout == "1\n"


# ---- beside cells ---------------------------------------------------------------------------------------------------


def test_cells_wait_for_their_own_children(box: Sandbox) -> None:
    process = box.start(["sh", "-c", "exit 3"])
    code = "import subprocess, os\np = subprocess.Popen(['sh', '-c', 'exit 5'])\nsubprocess.run(['true']).returncode, p.wait()"
    assert box.run_code(code).value == "(0, 5)"
    assert process.wait(10) == 3


def test_an_exit_code_that_a_cell_has_taken(box: Sandbox) -> None:
    process = box.start(["sh", "-c", "read x; exit 3"])
    process.close_stdin()
    assert box.run_code("import os\nos.waitpid(-1, 0)[0]").value == str(process.pid)
    assert process.wait(10) == process.poll() == -1
    process.kill()


# ---- bounds ---------------------------------------------------------------------------------------------------------


def test_so_many_run_and_no_more(box: Sandbox) -> None:
    running = [box.start(["sleep", "60"]) for _ in range(64)]
    with pytest.raises(LimitExceeded, match="64"):
        box.start(["true"])
    assert len(box.processes()) == 64
    running[0].kill()
    assert box.start(["true"]).wait(10) == 0
    assert box.shell("true").ok


def test_so_many_exit_codes_are_kept(box: Sandbox) -> None:
    first = box.start(["true"])
    first.wait(10)
    running = box.start(["sleep", "60"])
    for _ in range(256):
        box.start(["no-such-program"])
    assert len(box.processes()) == 257 and running.poll() is None
    with pytest.raises(KeyError, match=first.id):
        first.poll()
    running.kill()
    assert len(box.processes()) == 256 and running.poll() == 137  # the last to end, though the first to start


def test_what_runs_is_named_when_a_fork_can_t_capture_it_and_what_ended_is_no_hindrance(box: Sandbox) -> None:
    done, running = box.start(["sh", "-c", "echo out; exit 4"]), box.start(["sleep", "60"], pty=True)
    with pytest.raises(SnapshotError, match="sleep"):
        box.snapshot(engine="fork")
    box.run_code("kept = 1")
    running.kill()
    box.session().run("true")
    box.session().close()
    box.session().close()
    box.checkpoint("before")
    late = box.start(["true"])
    assert late.wait(10) == 0
    (copy,) = box.fork(1)
    with copy:
        assert copy.process(done.id).poll() == 4 and copy.process(done.id).read() == b"out\n"
        assert copy.run_code("kept").value == "1"
    box.rewind("before")
    assert done.poll() == 4 and running.poll() == 137 and done.read() == b"out\n"
    with pytest.raises(KeyError, match=late.id):
        late.poll()


_LIES: dict[str, tuple[str, str, Callable[[Sandbox], object]]] = {
    "start": ("START", "{'id': 'x'}", lambda box: box.start(["true"])),
    "id": ("START", "{**start(**k), 'id': 5}", lambda box: box.start(["true"])),
    "argv": ("START", "{**start(**k), 'argv': [5]}", lambda box: box.start(["true"])),
    "list": ("PROCESSES", "[None]", lambda box: box.processes()),
    "long list": (
        "PROCESSES",
        "[start(**{**k, 'id': str(i), 'argv': ['x'], 'pty': False, 'cwd': None, 'env': None}) for i in range(400)]",
        lambda box: box.processes(),
    ),
    "another": ("PROCESSES", "[]", lambda box: box.process("x")),
    "code": ("WAIT", "'0'", lambda box: box.start(["true"]).poll()),
    "output": ("OUTPUT", "{'data': 'text', 'open': True}", lambda box: box.start(["true"]).read()),
    "too much": ("OUTPUT", "{'data': bytes(1 << 21), 'open': True}", lambda box: box.start(["true"]).read()),
    "count": ("FEED", "7", lambda box: box.start(["cat"]).write("x")),
    "shell": ("SHELL", "{'exit_code': 0}", lambda box: box.session().run("true")),
}


@pytest.mark.parametrize("what", _LIES)
def test_answers_that_lie(box: Sandbox, what: str) -> None:
    op, lie, call = _LIES[what]
    code = f"from sandbox_gym_guest import agent, wire\nfrom sandbox_gym_guest.processes import start\nagent._HANDLERS[wire.Op.{op}] = lambda **k: {lie}"
    assert box.run_code(code).ok
    with pytest.raises(ProtocolError, match=box.name):
        call(box)
    assert box.status == "dead"
