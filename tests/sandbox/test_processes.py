"""Processes and shells that live on between calls: their streams, terminals, signals, bounds, and their end."""

# ruff: noqa: E501  (programs for the guest are text)
from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from sandbox_gym.api import ShellResult
from sandbox_gym.errors import LimitExceeded, ProtocolError, SandboxDied, SnapshotError
from sandbox_gym.process import Process
from sandbox_gym.sandbox import Sandbox

MIB = 1 << 20


def read_until(process: Process, wanted: bytes, *, stream: Any = "stdout", timeout: float = 20.0) -> bytes:
    """Its output up to and with `wanted`."""
    data, deadline = b"", time.monotonic() + timeout
    while wanted not in data:
        assert time.monotonic() < deadline, data[-2000:]
        data += process.read(0.5, stream)
    return data


def alive(box: Sandbox) -> list[str]:
    """The names of what runs in the sandbox, but for its process 1 and the command that looks; no zombies."""
    line = "for p in /proc/[0-9]*; do [ $p != /proc/1 ] && [ $p != /proc/$$ ] && sed 's/.*(\\(.*\\)) \\(.\\).*/\\1 \\2/' $p/stat; done 2>/dev/null"
    names = [row.split() for row in box.shell(line).stdout.splitlines()]
    return sorted(name for name, state in names if state not in "ZX" and name != "sed")


def forget_after(box: Sandbox, timeout: float = 5.0) -> list[str]:
    """`alive`, as soon as it is empty."""
    deadline = time.monotonic() + timeout
    while (names := alive(box)) and time.monotonic() < deadline:
        pass
    return names


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


_CHATTY = (
    "import os, sys\nfor _ in range(640): sys.stdout.buffer.write(bytes(65536)); sys.stderr.write('e' * 65536)\n"
    "sys.stdout.flush(); os.mknod('done'); sys.stdin.read()"
)


@pytest.mark.parametrize("meanwhile", ["idle", "cell", "waiting cell", "command", "session"])
def test_a_full_pipe_never_stops_it(box: Sandbox, meanwhile: str) -> None:
    """40 MiB on each stream that nobody reads, whatever the sandbox does in the meantime."""
    process = box.start(["python3", "-c", _CHATTY])
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


# ---- terminals ------------------------------------------------------------------------------------------------------


def test_a_terminal(box: Sandbox) -> None:
    process = box.start(["bash", "--norc", "--noediting"], pty=True, env={"PS1": "> "})
    read_until(process, b"> ")
    process.write("tty; stty size; [ -t 0 ] && [ -t 2 ] && echo both; echo err >&2\n")
    text = read_until(process, b"err\r\n")
    assert b"/dev/pts/" in text and b"24 80\r\n" in text and b"both" in text
    assert process.read(stream="stderr") == b""
    process.resize(50, 120)
    process.write("stty size\n")
    read_until(process, b"50 120")
    process.write(
        "sleep 0.05; sh -c 'sleep 0.05; echo begun-$((1 + 1)); exec sleep 60' & fg\n"
    )  # job control
    read_until(process, b"begun-2\r\n")
    process.write("\x03")
    process.write("echo code $?\n")
    read_until(process, b"code 130")
    process.close_stdin()
    assert process.wait(10) == 0
    assert process.read(10) == b"" or process.read(10) == b""
    with pytest.raises(BrokenPipeError):
        process.write("x")


def test_the_size_of_a_window_is_signalled(box: Sandbox) -> None:
    process = box.start(
        ["bash", "-c", "trap 'stty size' WINCH; echo up; while :; do sleep 0.01; done"], pty=True
    )
    read_until(process, b"up")
    process.resize(11, 22)
    read_until(process, b"11 22")
    for size in ((0, 80), (24, 1 << 16)):
        with pytest.raises(ValueError, match="from 1 to 65535"):
            process.resize(*size)
    process.kill()
    with pytest.raises(ValueError, match="terminal"):
        box.start(["true"]).resize(24, 80)


def test_a_terminal_s_output_never_stops_it(box: Sandbox) -> None:
    process = box.start(["python3", "-c", _CHATTY.replace("640", "64")], pty=True)
    assert box.run_code("import os\nwhile not os.path.exists('done'): pass").ok
    assert process.poll() is None
    process.kill()


def test_terminals_of_the_sandbox_s_own(boxes: Callable[[int], list[Sandbox]]) -> None:
    one, other = boxes(2)
    make = "import os; a, b = os.openpty(); os.ttyname(b)"
    assert one.run_code(make).value == other.run_code(make).value == "'/dev/pts/0'"
    assert sorted(one.shell("ls /dev/pts").stdout.split()) == ["0", "ptmx"]
    assert one.run_code("os.write(a, b'mine'); os.close(a); os.close(b)").ok
    (copy,) = one.fork(1)
    with copy:
        assert copy.shell("ls /dev/pts").stdout == "ptmx\n"
        assert copy.exec(["script", "-qec", "tty", "/dev/null"]).stdout == "/dev/pts/0\r\n"
        assert copy.start(["tty"], pty=True).read(10) == b"/dev/pts/0\r\n"
    code = "fds = []\ntry:\n    while True: fds += os.openpty()\nexcept OSError as e: print(len(fds) // 2, e.errno)\n"
    assert one.run_code(code + "for fd in fds: os.close(fd)").stdout == "256 28\n"


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


# ---- shells ---------------------------------------------------------------------------------------------------------


def ran(result: ShellResult) -> tuple[int, str, str]:
    assert not result.timed_out and not result.ended, result
    return result.exit_code, result.stdout, result.stderr


def test_a_shell_keeps_its_state(box: Sandbox) -> None:
    shell = box.session()
    shell.run(
        "cd /tmp; x='a b'; export Y=1; f() { echo f $1; return 4; }; alias ll='echo aliased'; declare -A m=([k]=v)"
    )
    assert ran(shell.run("pwd; echo $x-$Y-${m[k]}; ll; f 2")) == (4, "/tmp\na b-1-v\naliased\nf 2\n", "")
    assert ran(box.session("default").run("echo $0 $x")) == (0, "bash a b\n", "")
    assert ran(box.session("other").run("pwd; echo [$x]")) == (0, "/workspace\n[]\n", "")
    assert ran(shell.run("set -- 1 2; shopt -s nullglob; set -o pipefail; false | true")) == (1, "", "")
    assert ran(shell.run("echo $2 /no/such*; false | true")) == (1, "2\n", "")
    assert box.processes() == []


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("echo out; echo err >&2; (exit 7)", (7, "out\n", "err\n")),
        ("printf 'no newline'", (0, "no newline", "")),
        ("", (0, "", "")),
        ("# nothing", (0, "", "")),
        ("cat <<'E'\nit's \"quoted\" $HOME \\\nE", (0, 'it\'s "quoted" $HOME \\\n', "")),
        ("echo é \U0001f600", (0, "é \U0001f600\n", "")),
        ("break; echo on", (0, "", "")),
        ("echo a\nread x || echo end\ncat; wc -c", (0, "a\nend\n0\n", "")),
        ("for i in 1 2; do echo $i; done | cat", (0, "1\n2\n", "")),
        ("kill -9 $BASHPID & wait $!", (137, "", None)),
        ("no-such-program", (127, "", None)),
        ("echo 'unterminated", (2, "", None)),
        ("if true; then", (2, "", None)),
        ("}", (2, "", None)),
        ("f(", (2, "", None)),
        ("echo $(", (2, "", None)),
        ("x=$(for i in 1; do", (2, "", None)),
        ("cat <(echo $(echo in))", (0, "in\n", "")),
        ("cat <<E", (0, "", None)),
        ("trap 'echo never' 60; set -o nounset; echo $undefined_variable || true", (None, "", None)),
    ],
)
def test_commands_of_a_shell(box: Sandbox, command: str, expected: tuple[Any, ...]) -> None:
    shell = box.session()
    shell.run("kept=1")
    result = shell.run(command)
    actual = (result.exit_code, result.stdout, result.stderr)
    assert all(want is None or want == got for want, got in zip(expected, actual)), result
    if not result.ended:
        assert ran(shell.run("echo $kept; { echo ok; }")) == (0, "1\nok\n", "")


def test_nothing_that_a_command_writes_is_its_end(box: Sandbox) -> None:
    shell = box.session()
    assert ran(shell.run("printf '0\\n0\\n'; echo 0 >&2; sleep 0.05; false")) == (1, "0\n0\n", "0\n")
    held = "import os; print([fd for fd in range(3, 1024) if os.path.exists(f'/proc/self/fd/{fd}') and 'pipe' in os.readlink(f'/proc/self/fd/{fd}')])"
    assert ran(shell.run(f'python3 -c "{held}"')) == (0, "[]\n", "")
    assert ran(shell.run(f'python3 -c "{held}" | cat & wait')) == (0, "[]\n", "")
    assert ran(shell.run("exec 3>file; echo x >&3")) == (0, "", "")
    assert ran(shell.run("echo y >&3; cat file")) == (0, "x\ny\n", "")


def test_ten_megabytes_on_both_streams_of_a_shell(box: Sandbox) -> None:
    line = "head -c 10485760 /dev/zero | tr '\\0' o & head -c 10485760 /dev/zero | tr '\\0' e >&2; wait"
    result = box.session().run(line)
    assert result.ok and set(result.stdout) == {"o"} and set(result.stderr) == {"e"}
    assert len(result.stdout) == len(result.stderr) == MIB
    assert result.stdout_cut == result.stderr_cut == 9 * MIB
    assert ran(box.session().run("echo on")) == (0, "on\n", "")


def test_a_long_command(box: Sandbox) -> None:
    text = "x" * 200_000
    assert ran(box.session().run(f"echo {text}")) == (0, text + "\n", "")
    with pytest.raises(ValueError, match="characters"):
        box.session().run("x" * (MIB + 1))
    for line in ("a\0b", "\ud800"):
        with pytest.raises(ValueError, match=r"null|surrogates"):
            box.session().run(line)
    for name in ("", "x" * 101):
        with pytest.raises(ValueError, match="name"):
            box.session(name)


def test_a_command_that_ends_the_shell(box: Sandbox) -> None:
    shell = box.session()
    shell.run("x=1; cd /tmp")
    for command, code in (
        ("echo bye; exit 3", 3),
        ("kill -9 $$", 137),
        ("exec true", 0),
        ("set -e; false; true", 1),
    ):
        result = shell.run(command)
        assert (result.exit_code, result.ended, result.timed_out) == (code, True, False), result
        assert ran(shell.run("echo [$x]; pwd")) == (0, "[]\n/workspace\n", "")


def test_children_in_the_background_of_a_shell(box: Sandbox) -> None:
    shell, started = box.session(), time.monotonic()
    assert ran(shell.run("sleep 60 & sleep 61 & echo begun")) == (0, "begun\n", "")
    assert time.monotonic() - started < 10
    assert ran(shell.run("kill %2; wait %2; echo $?; jobs | wc -l")) == (0, "143\n1\n", "")
    assert ran(shell.run("{ while [ ! -e go ]; do sleep 0.01; done; echo late; } &")) == (0, "", "")
    assert ran(shell.run("touch go; wait $!; echo $?")) == (0, "late\n0\n", "")
    assert shell.run("sleep 60 & exit 0").ended
    assert alive(box) == ["sleep", "sleep"]


_CUT = [
    "sleep 60; echo BAD > bad",
    "sleep 60 && echo BAD > bad || echo BAD > bad\necho BAD > bad",
    "while :; do :; done; echo BAD > bad",
    "until false; do sleep 60; done; echo BAD > bad",
    "f() { sleep 60; echo BAD > bad; }; g() { for i in 1 2; do f; echo BAD > bad; done; }; g; g; echo BAD > bad",
    "f() { while :; do :; done; echo BAD > bad; }; f; echo BAD > bad",
    "x=$(sleep 60; echo BAD > bad); echo BAD > bad",
    "(sleep 60; echo BAD > bad); echo BAD > bad",
    "sleep 60 | while read x; do echo BAD > bad; done; echo BAD > bad",
    "if sleep 60; then echo BAD > bad; else echo BAD > bad; fi; echo BAD > bad",
    "sleep 60 & wait; echo BAD > bad",
    "(trap '' TERM INT HUP; sleep 60) & setsid sleep 60",
    "eval 'sleep 60\necho BAD > bad'\necho BAD > bad",
    "printf 'sleep 60\necho BAD > bad\n' > script; . ./script; echo BAD > bad",
    "mapfile -t a < <(sleep 60); echo BAD > bad",
    "trap '' INT TERM; kill -STOP $$; echo BAD > bad",
]


@pytest.mark.parametrize("command", _CUT)
def test_after_a_time_out_the_shell_goes_on_and_the_rest_is_not_run(box: Sandbox, command: str) -> None:
    shell = box.session()
    shell.run("cd /tmp; kept=1; f0() { echo f0; }; sleep 59 &")
    started = time.monotonic()
    result = shell.run(f"echo out; {command}", timeout=0.3)
    assert (result.timed_out, result.exit_code, result.ok, result.ended) == (True, 137, False, False), result
    assert result.stdout == "out\n" and time.monotonic() - started < 3
    code, out, _ = ran(
        shell.run("pwd; echo $kept; f0; ls bad 2>/dev/null; jobs -pr | wc -l; shopt -q extdebug; trap")
    )
    traps = [line for line in out.splitlines()[4:] if "BASH_COMMAND" not in line and " ERR" not in line]
    assert (code, out.splitlines()[:4]) == (0, ["/tmp", "1", "f0", "1"])
    assert traps == (["trap -- '' SIGINT", "trap -- '' SIGTERM"] if "INT TERM; kill" in command else [])
    assert alive(box) == ["bash", "sleep"]


def test_a_shell_that_does_not_come_back_is_replaced(box: Sandbox) -> None:
    shell = box.session()
    shell.run("kept=1; mkfifo pipe; sleep 60 &")
    result = shell.run("echo out; read x < pipe; echo BAD > bad", timeout=0.2)
    assert (
        result.timed_out
        and result.ended
        and result.stdout == "out\n"
        and "did not come back" in result.stderr
    )
    assert ran(shell.run("echo [$kept]; ls")) == (0, "[]\npipe\n", "")
    result = shell.run("exec sleep 60", timeout=0.2)
    assert result.timed_out and result.ended
    assert alive(box) == []


def test_a_shell_without_bash(box: Sandbox) -> None:
    box.run_code(
        "import os, shutil; os.mkdir('/tmp/bin'); [os.symlink(shutil.which(n), '/tmp/bin/' + n) for n in ('cat', 'sleep', 'ls')]; os.environ['PATH'] = '/tmp/bin'"
    )
    shell = box.session()
    shell.run("cd /tmp; x=1; f() { echo f; }; alias ll='echo aliased'")
    assert ran(shell.run("pwd; echo $x $BASH_VERSION; f\nll; cat; echo err >&2; false")) == (
        1,
        "/tmp\n1\nf\naliased\n",
        "err\n",
    )
    assert ran(shell.run("break; true"))[0] == 0
    assert ran(shell.run("/bin/ls -l /proc/self/fd | /usr/bin/grep -c pipe")) == (0, "2\n", "")
    assert ran(shell.run("sleep 60 & echo begun")) == (0, "begun\n", "")
    result = shell.run("sleep 60; echo BAD > bad", timeout=0.2)
    assert result.timed_out and result.ended and "did not come back" in result.stderr
    assert ran(shell.run("echo [$x]; ls bad /tmp/bad 2>/dev/null")) == (2, "[]\n", "")
    assert shell.run("exit 3").exit_code == 3


def test_where_there_is_no_shell(box: Sandbox) -> None:
    box.run_code("import os; os.environ['PATH'] = '/nowhere'")
    box.shell("/bin/rm /bin/sh")
    result = box.session().run("true")
    assert (result.exit_code, result.ended) == (127, True) and "/bin/sh" in result.stderr


def test_the_memory_limit_is_named_by_a_shell_too(box: Sandbox) -> None:
    shell = box.session()
    shell.run("kept=1")
    result = shell.run("python3 -c 'x = bytearray(b\"x\") * (1 << 30)'")
    assert (result.exit_code, result.limit) == (137, "memory")
    assert ran(shell.run("echo $kept")) == (0, "1\n", "")


def test_so_many_shells_and_no_more(box: Sandbox) -> None:
    for i in range(16):
        assert box.session(str(i)).run("true").ok
    with pytest.raises(LimitExceeded, match="16"):
        box.session("more").run("true")
    box.session("0").close()
    assert box.session("more").run("true").ok
    assert box.session("1").run("exit").ended
    assert box.session("again").run("true").ok


def test_closing_a_shell_ends_all_that_it_started(box: Sandbox) -> None:
    shell = box.session()
    shell.run("x=1; sleep 60 & setsid sleep 60 & (sleep 60; true) &")
    shell.close()
    assert alive(box) == []
    assert ran(shell.run("echo [$x]")) == (0, "[]\n", "")
