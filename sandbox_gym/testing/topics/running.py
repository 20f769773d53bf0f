"""Cells and commands: what they return, what a time-out ends."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from sandbox_gym.testing.subject import PATIENCE, Subject, check, expect, output, running, until, value

_MOST = 1 << 20  # bytes that are kept of a stream


@check("code")
def names_live_on(subject: Subject) -> None:
    """Cells share their names; a result has the last value, and what was printed to either stream."""
    box = subject.create()
    result = box.run_code("import sys\nx = 40\nprint('out')\nprint('err', file=sys.stderr)\nx + 1")
    expect((result.value, result.stdout, result.stderr), ("41", "out\n", "err\n"), "a cell")
    assert result.ok and not result.timed_out and result.duration >= 0
    expect(value(box, "x += 2; x"), "42", "the next cell")
    expect(box.run_code("y = 1").value, None, "the value of a statement")


@check("code")
def exceptions_are_results(subject: Subject) -> None:
    """What a cell raises is data; the next cell runs."""
    box = subject.create()
    result = box.run_code("kept = 1\n1 / 0")
    assert result.error is not None and not result.ok
    expect(result.error.type, "ZeroDivisionError", "error")
    assert "line 2" in result.error.traceback, result.error.traceback
    for code, kind in (("(", "SyntaxError"), ("raise SystemExit(3)", "SystemExit")):
        error = box.run_code(code).error
        expect(error and error.type, kind, code)
    expect(value(box, "kept"), "1", "what was there")


@check("code")
def time_out_keeps_state(subject: Subject) -> None:
    """A cell that runs too long is interrupted and what it started is killed; names are still there."""
    box = subject.create()
    code = "import subprocess\nn = 5\nchild = subprocess.Popen(['sleep', '98761'])\nwhile True: pass"
    result = box.run_code(code, timeout=1.5)
    assert result.timed_out and not result.ok, result
    expect(box.status, "running", "status")
    expect(value(box, "n"), "5", "a name from before")
    until(lambda: running(box, "sleep 98761") == 0, "the child is gone")


@check("code")
def output_is_bounded(subject: Subject) -> None:
    """The first MiB of a stream is kept, and the rest counted."""
    result = subject.create().run_code("print('x' * 3_000_000, end='')", timeout=PATIENCE)
    expect((len(result.stdout), result.stdout_cut), (_MOST, 3_000_000 - _MOST), "kept and cut")


@check("code")
def calls_queue_up(subject: Subject) -> None:
    """Calls of several threads are answered each with its own answer."""
    box = subject.create()
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda i: value(box, f"{i} + 1"), range(24)))
    expect(answers, [str(i + 1) for i in range(24)], "answers")


@check("exec")
def results(subject: Subject) -> None:
    """Exit codes, signals, both streams, stdin, folder and variables of a command."""
    box = subject.create()
    result = box.shell("echo out; echo err >&2; exit 3")
    expect((result.exit_code, result.stdout, result.stderr, result.ok), (3, "out\n", "err\n", False), "shell")
    result = box.exec(["sh", "-c", "cat; pwd; echo $A"], stdin=b"in\n", cwd="/tmp", env={"A": "b c"})
    expect((result.exit_code, result.stdout), (0, "in\n/tmp\nb c\n"), "exec")
    expect(box.exec(["no-such-program"]).exit_code, 127, "a program that is not there")
    result = box.shell("kill -9 $$")
    expect((result.exit_code, result.limit), (137, None), "a command that was killed")


@check("exec")
def output_is_cut(subject: Subject) -> None:
    """The first MiB of a stream is kept, and the rest counted and never blocks."""
    code = "import sys; sys.stdout.write('x' * 3_000_000); sys.stderr.write('y' * 2_000_000)"
    result = subject.create().exec(["python3", "-c", code], timeout=PATIENCE)
    expect((len(result.stdout), result.stdout_cut), (_MOST, 3_000_000 - _MOST), "stdout")
    expect((len(result.stderr), result.stderr_cut), (_MOST, 2_000_000 - _MOST), "stderr")


@check("exec")
def time_out_kills_all_it_started(subject: Subject) -> None:
    """After a command's time-out its children are gone, daemons too; what others have started lives on."""
    box = subject.create()
    kept = box.start(["sleep", "98762"])
    result = box.shell(
        "sleep 98763 & setsid sleep 98764 & (setsid sleep 98765 &) ; echo begun; wait", timeout=1.5
    )
    assert result.timed_out and not result.ok, result
    expect(result.stdout, "begun\n", "what it had printed")
    for number in (98763, 98764, 98765):
        until(lambda: running(box, f"sleep {number}") == 0, f"sleep {number} is gone")  # noqa: B023
    expect(kept.poll(), None, "a process that was started before")
    expect(output(box, "echo next"), "next\n", "the next command")


@check("exec")
def background_never_holds(subject: Subject) -> None:
    """A command returns with its children in the background, which live on."""
    box = subject.create()
    result = box.shell("sleep 98766 & echo done", timeout=PATIENCE)
    assert result.ok and result.duration < PATIENCE / 2, result
    # The shell's child may not have become the program yet.
    until(lambda: running(box, "sleep 98766") == 1, "it runs in the background")
