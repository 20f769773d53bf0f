"""Processes on terminals of their own."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sandbox_gym.sandbox import Sandbox
from tests.sandbox.watching import CHATTY, read_until


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
    process = box.start(["python3", "-c", CHATTY.replace("640", "64")], pty=True)
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
