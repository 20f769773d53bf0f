"""What lives on between calls: processes, terminals, shells."""

from __future__ import annotations

import signal

from sandbox_gym.testing.subject import PATIENCE, Subject, check, expect, running, until


@check("processes")
def talk_and_end(subject: Subject) -> None:
    """A started process reads what is written to it, prints, and ends with its exit code."""
    box = subject.create()
    process = box.start(["sh", "-c", "while read line; do echo got $line; done; echo over >&2; exit 5"])
    expect(process.poll(), None, "exit code while it runs")
    process.write("one\n")
    expect(process.read_text(PATIENCE), "got one\n", "an answer")
    process.close_stdin()
    expect(process.wait(PATIENCE), 5, "exit code")
    expect(process.read_text(PATIENCE, "stderr"), "over\n", "stderr")
    expect([p.id for p in box.processes()], [process.id], "processes")
    expect(box.start(["no-such-program"]).wait(PATIENCE), 127, "one that is not there")


@check("processes")
def kill_reaches_children(subject: Subject) -> None:
    """A signal reaches a process and what it has started."""
    box = subject.create()
    process = box.start(["sh", "-c", "sleep 98767 & wait"])
    until(lambda: running(box, "sleep 98767") == 1, "its child runs")
    process.kill(signal.SIGTERM)
    expect(process.wait(PATIENCE), 128 + signal.SIGTERM, "exit code")
    until(lambda: running(box, "sleep 98767") == 0, "its child is gone")
    process.kill()  # one that has ended: no error


@check("processes")
def terminals(subject: Subject) -> None:
    """With pty=True a process has a terminal, of the size it is given; Ctrl-C interrupts."""
    box = subject.create()
    process = box.start(
        ["sh", "-c", "trap 'echo interrupted; exit 7' INT; [ -t 0 ] && stty size; echo ready; read x"],
        pty=True,
    )
    seen = ""
    while "ready" not in seen:
        more = process.read_text(PATIENCE)
        assert more, f"its terminal says no more than {seen!r}"
        seen += more
    assert "24 80" in seen, seen
    process.resize(50, 100)
    process.write(b"\x03")
    expect(process.wait(PATIENCE), 7, "exit code")


@check("processes")
def sessions_keep_state(subject: Subject) -> None:
    """A session's folder, variables and functions are there for its next command; a time-out ends that command."""
    box = subject.create()
    session = box.session()
    assert session.run("cd /tmp; a=5; f() { echo f $a; }").ok
    expect(session.run("f; pwd").stdout, "f 5\n/tmp\n", "the next command")
    expect(box.session("other").run("echo ${a:-none}").stdout, "none\n", "another session")
    result = session.run("sleep 98768", timeout=1.5)
    assert result.timed_out
    until(lambda: running(box, "sleep 98768") == 0, "what timed out is gone")
    if not result.ended:
        expect(session.run("f").stdout, "f 5\n", "after a time-out")
    result = session.run("exit 4")
    expect((result.exit_code, result.ended), (4, True), "exit")
