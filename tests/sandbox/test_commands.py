"""exec and shell: exit codes, bounded streams, children left behind, and time-outs that kill all that was started."""

# ruff: noqa: E501  (programs for the guest are text)
from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from sandbox_gym.sandbox import Sandbox

MIB = 1 << 20


def processes(box: Sandbox) -> list[str]:
    """The names of what runs in the sandbox, but for its process 1 and the command that looks."""
    code = (
        "import os\ndef names():\n    for p in os.listdir('/proc'):\n        if p.isdigit() and p != '1':\n            try:"
        " s = open(f'/proc/{p}/stat').read()\n            except OSError: continue\n            yield s[s.index('(') + 1:"
        "s.rindex(')')] + s[s.rindex(')') + 1:][:2]\nnames = list(names())\n'|'.join(names)"
    )
    value = box.run_code(code).value
    assert value is not None
    return [name for name in value.strip("'\"").split("|") if name]


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("true", 0),
        ("exit 7", 7),
        ("kill -9 $$", 137),
        ("kill -SEGV $$", 139),
        ("kill -TERM $$", 143),
        ("no-such-program", 127),
        ("/etc/passwd", 126),
        ("/workspace", 126),
    ],
)
def test_exit_codes_of_a_shell(box: Sandbox, command: str, code: int) -> None:
    result = box.shell(command)
    assert result.exit_code == code and result.ok == (code == 0) and not result.timed_out


@pytest.mark.parametrize(
    ("argv", "code", "text"),
    [
        (["no-such-program"], 127, "no-such-program: No such file"),
        (["/etc/passwd"], 126, "/etc/passwd: Permission denied"),
        (["/workspace"], 126, "Permission denied"),
        (["python3", "-c", "import os; os.kill(os.getpid(), 15)"], 143, ""),
        (["sh", "-c", "exit 300"], 44, ""),
    ],
)
def test_exit_codes_of_a_program(box: Sandbox, argv: list[str], code: int, text: str) -> None:
    result = box.exec(argv)
    assert result.exit_code == code
    assert text in result.stderr


def test_where_and_with_what_a_command_runs(box: Sandbox) -> None:
    assert box.shell("pwd").stdout == "/workspace\n"
    assert box.shell("pwd", cwd="/tmp").stdout == "/tmp\n"
    assert box.shell("echo $A-$HOME", env={"A": "1 2"}).stdout == "1 2-/root\n"
    assert box.shell("echo [[ x ]]; echo $0 | head -c 4; echo $BASH_VERSION | head -c1").stdout.startswith(
        "[[ x ]]"
    )
    assert box.exec(["pwd"], cwd="/no/such").exit_code == 127
    assert box.exec(["echo", "*", "$HOME", "a b"]).stdout == "* $HOME a b\n"
    assert box.exec(["python3", "-c", "print(chr(0x1f600))"]).stdout == "\U0001f600\n"


def test_output_that_is_no_text(box: Sandbox) -> None:
    assert box.shell(r"printf '\377a\0b'").stdout == "�a\0b"


@pytest.mark.parametrize("line", ["\ud800", "a\0b"])
def test_a_line_that_no_program_can_be_given(box: Sandbox, line: str) -> None:
    with pytest.raises(ValueError, match=r"null|surrogates"):
        box.shell(line)
    assert box.shell("true").ok


@pytest.mark.parametrize("argv", [[], "ls", ["a\0b"], [b"ls"], [1], None])
def test_an_argv_that_is_none(box: Sandbox, argv: list[str]) -> None:
    with pytest.raises((ValueError, TypeError)):
        box.exec(argv)
    assert box.shell("true").ok


def test_stdin(box: Sandbox) -> None:
    assert box.shell("cat").stdout == ""  # closed: nothing to wait for
    assert box.shell("wc -c", stdin=bytes(10 * MIB)).stdout.strip() == str(10 * MIB)
    assert box.exec(["cat"], stdin=b"in").stdout == "in"
    assert box.exec(["true"], stdin=bytes(10 * MIB)).ok  # reads none of it
    assert box.shell("exec <&-; sleep 0.05", stdin=bytes(10 * MIB)).ok


def test_ten_megabytes_on_both_streams(box: Sandbox) -> None:
    result = box.shell(
        "head -c 10485760 /dev/zero | tr '\\0' o & head -c 10485760 /dev/zero | tr '\\0' e >&2; wait"
    )
    assert result.ok and set(result.stdout) == {"o"} and set(result.stderr) == {"e"}
    assert len(result.stdout) == len(result.stderr) == MIB
    assert result.stdout_cut == result.stderr_cut == 9 * MIB


def test_a_background_child_never_holds_a_call(box: Sandbox) -> None:
    until = "while ! grep -q sleep /proc/$!/comm; do :; done"
    started = time.monotonic()
    assert box.shell(f"sleep 60 & {until}; echo begun").stdout == "begun\n"
    assert box.shell(f"nohup setsid sleep 60 >/dev/null 2>&1 & {until}; echo again").stdout == "again\n"
    assert time.monotonic() - started < 2
    assert sum(name.startswith("sleep") for name in processes(box)) == 2


def test_a_server_left_behind_works_on(box: Sandbox) -> None:
    """It writes to the pipes of a command that has long ended, more than a pipe holds, and still answers."""
    server = (
        "import http.server, sys\nclass H(http.server.BaseHTTPRequestHandler):\n    def do_GET(self):\n"
        "        print('x' * 100000, flush=True); print('y' * 100000, file=sys.stderr, flush=True)\n"
        "        self.send_response(200); self.end_headers(); self.wfile.write(b'served')\n"
        "s = http.server.HTTPServer(('127.0.0.1', 8000), H); print('up', flush=True); s.serve_forever()"
    )
    box.write_file("server.py", server)
    assert (
        "up"
        in box.shell("python3 server.py & while ! grep -q :1F40 /proc/net/tcp; do :; done; sleep 0.02").stdout
    )
    fetch = (
        "import urllib.request as r; print(r.urlopen('http://127.0.0.1:8000', timeout=30).read().decode())"
    )
    for _ in range(5):
        fetched = box.exec(["python3", "-c", fetch])
        assert fetched.stdout == "served\n", fetched.stderr[-2000:]
    assert box.run_code(fetch).stdout == "served\n"


_DAEMON = (
    "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
    "        os.closerange(0, 100)\n        time.sleep(60)\n    os._exit(0)\n"
)


def test_a_time_out_kills_everything_that_the_call_started(box: Sandbox) -> None:
    box.shell("sleep 61 &")  # of an earlier call: stays
    box.write_file("daemon.py", _DAEMON + "time.sleep(60)")
    started = time.monotonic()
    result = box.shell(
        "sleep 62 & (trap '' TERM INT HUP; sleep 63) & echo out; python3 daemon.py", timeout=0.5
    )
    assert result.timed_out and not result.ok and result.exit_code == 137
    assert result.stdout == "out\n"
    assert time.monotonic() - started < 3
    alive = [name for name in processes(box) if not name.endswith("Z")]
    assert alive == ["sleep S"], alive
    assert box.shell("echo on").stdout == "on\n"


def test_a_command_that_stops_itself_times_out(box: Sandbox) -> None:
    assert box.shell("kill -STOP $$", timeout=0.2).timed_out
    assert box.shell("true").ok


def test_orphans_are_reaped(box: Sandbox) -> None:
    box.write_file("daemon.py", _DAEMON.replace("60", "0.05"))
    for _ in range(5):
        box.shell("(sleep 0.01 &) ; setsid sleep 0.01 & python3 daemon.py")
    box.shell("sleep 0.2")
    box.shell("true")
    assert processes(box) == []


def test_the_children_of_cells_are_theirs_to_wait_for(box: Sandbox) -> None:
    code = "import subprocess\np = subprocess.Popen(['sh', '-c', 'exit 5'])\nq = subprocess.Popen(['sh', '-c', 'exit 6'], "
    box.run_code(code + "start_new_session=True)")
    box.shell("sleep 0.05")
    box.shell("true")
    assert box.run_code("p.wait(), q.wait()").value == "(5, 6)"


@pytest.mark.parametrize("before", [False, True])
def test_a_fork_bomb_is_contained(boxes: Callable[[int], list[Sandbox]], before: bool) -> None:
    bombed, other = boxes(2)
    if before:
        bombed.shell("sleep 60 &")
    failures: list[object] = []
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            started = time.monotonic()
            if other.run_code("6 * 7").value != "42" or time.monotonic() - started > 5:
                failures.append("the sibling suffered")

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        result = bombed.shell("b() { b | b & b; }; b", timeout=1.0)
    finally:
        over.set()
        watcher.join()
    assert not failures
    assert result.timed_out or result.exit_code != 0
    started = time.monotonic()
    while time.monotonic() - started < 5 and len(processes(bombed)) > before + 1:
        bombed.shell("true")
    assert [name for name in processes(bombed) if not name.startswith("sleep")] == []
    assert bombed.shell("echo fine").stdout == "fine\n"


def test_pids_run_out_inside_only(boxes: Callable[[int], list[Sandbox]]) -> None:
    full, other = boxes(2)
    result = full.shell("for i in $(seq 200); do sleep 60 & done; wait", timeout=1.5)
    assert "Resource temporarily unavailable" in result.stderr or "fork" in result.stderr
    assert other.shell("for i in $(seq 50); do sleep 0.1 & done; wait").ok
    assert full.shell("echo room").stdout == "room\n"
