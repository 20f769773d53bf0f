"""Shells that live on between calls: their state, their time-outs, their ends."""

# ruff: noqa: E501  (programs for the guest are text)
from __future__ import annotations

import time
from typing import Any

import pytest

from sandbox_gym.api import ShellResult
from sandbox_gym.errors import LimitExceeded
from sandbox_gym.sandbox import Sandbox
from tests.sandbox.watching import MIB, alive


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
        # The job from before is there. How many there are besides is no one's business: bash loses the status of one
        # that dies in the moment in which a trap ends its `wait`.
        shell.run(
            "pwd; echo $kept; f0; ls bad 2>/dev/null; jobs -pr | head -n 1 | wc -l; shopt -q extdebug; trap"
        )
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
