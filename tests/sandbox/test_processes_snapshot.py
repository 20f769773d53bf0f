"""Processes and shells in snapshots: each copy goes on with its own, at the moment where they were."""

# ruff: noqa: E501  (programs for the guest are text)
from __future__ import annotations

import pytest

from sandbox_gym.process import Process
from sandbox_gym.sandbox import Sandbox
from tests.sandbox.watching import read_until

_COUNTER = "import sys\nn = 0\nfor line in sys.stdin:\n    n += 1\n    print(n, line.strip(), flush=True)\nsys.exit(n)"


def ask(process: Process, line: str) -> str:
    process.write(f"{line}\n")
    return read_until(process, f"{line}\n".encode()).decode()


def test_each_copy_has_its_own_instance_of_a_process(box: Sandbox) -> None:
    process = box.start(["python3", "-c", _COUNTER])
    assert ask(process, "a") == "1 a\n"
    process.write("b\n")
    copies = box.fork(3)
    for i, sandbox in enumerate([*copies, box]):
        instance = sandbox.process(process.id)
        assert instance.pid == process.pid and instance.poll() is None
        assert read_until(instance, b"2 b\n") == b"2 b\n"  # what was on its way, or not yet read
        for _ in range(i):
            ask(instance, "more")
        instance.close_stdin()
        assert instance.wait(10) == 2 + i
    for copy in copies:
        copy.terminate()


def test_a_handle_works_on_after_a_rewind(box: Sandbox) -> None:
    process = box.start(["python3", "-c", _COUNTER])
    ask(process, "a")
    box.checkpoint("one")
    assert ask(process, "b") == "2 b\n"
    late = box.start(["sleep", "60"])
    box.rewind("one")
    assert ask(process, "c") == "2 c\n"
    with pytest.raises(KeyError, match=late.id):
        late.poll()
    process.kill()
    assert process.poll() == 137
    box.rewind("one")
    assert process.poll() is None and ask(process, "d") == "2 d\n"


def test_a_terminal_goes_on_in_each_copy(box: Sandbox) -> None:
    process = box.start(["bash", "--norc", "--noediting"], pty=True, env={"PS1": "> "})
    read_until(process, b"> ")
    process.resize(33, 44)
    process.write("x=kept; cd /tmp; echo unread\n")
    box.run_code("import time; time.sleep(0.2)")
    copies = box.fork(2)
    for i, sandbox in enumerate([*copies, box]):
        instance = sandbox.process(process.id)
        assert instance.pty
        read_until(instance, b"unread\r\n")
        instance.write(f"x=${{x}}{i}; echo $x $PWD; stty size; tty\n")
        text = read_until(instance, b"/dev/pts/0\r\n")
        assert f"kept{i} /tmp\r\n33 44\r\n".encode() in text
        instance.write("sh -c 'echo begun-$((1 + 1)); exec sleep 60'\n")
        read_until(instance, b"begun-2\r\n")
        instance.write("\x03")
        instance.write("echo $?\n")
        read_until(instance, b"130\r\n")
        assert sandbox.start(["tty"], pty=True).read(10) == b"/dev/pts/1\r\n"
        instance.close_stdin()
        assert instance.wait(10) == 0
    for copy in copies:
        copy.terminate()


def test_a_shell_goes_on_in_each_copy(box: Sandbox) -> None:
    shell = box.session()
    shell.run(
        "cd /tmp; x=1; f() { echo f$x; }; alias ll='echo aliased'; sleep 60 & { while [ ! -e go ]; do sleep 0.02; done; echo late; } &"
    )
    box.checkpoint()
    (copy,) = box.fork(1)
    with copy:
        (deeper,) = copy.fork(1)
        with deeper:
            for i, sandbox in enumerate((box, copy, deeper)):
                mine = sandbox.session()
                assert mine.run(f"x={i}").ok
                assert mine.run("pwd; f\nll; jobs -p | wc -l").stdout == f"/tmp\nf{i}\naliased\n2\n"
                assert mine.run("touch go; wait %2; echo $?").stdout == "late\n0\n"
                cut = mine.run("g() { sleep 60; echo BAD; }; g; echo BAD", timeout=0.3)
                assert cut.timed_out and not cut.ended and "BAD" not in cut.stdout
                assert mine.run("f; kill %1; wait %1").exit_code == 143
    shell.run("exit 3")
    box.rewind()
    assert shell.run("pwd; f").stdout == "/tmp\nf1\n"


def test_what_a_copy_s_process_prints_is_read_whatever_the_copy_does(box: Sandbox) -> None:
    program = "import os, sys\nsys.stdin.readline()\nfor _ in range(640): sys.stdout.write('o' * 65536)\nsys.stdout.flush(); os.mknod('done'); sys.stdin.read()"
    process = box.start(["python3", "-c", program])
    (copy,) = box.fork(1)
    with copy:
        instance = copy.process(process.id)
        instance.write("go\n")
        assert copy.run_code("import os\nwhile not os.path.exists('done'): pass").ok
        instance.close_stdin()
        assert instance.wait(10) == 0 and instance.info().stdout_cut == 39 << 20
    assert process.poll() is None and process.info().stdout_cut == 0


def test_a_server_s_memory_is_each_copy_s_own(box: Sandbox) -> None:
    server = (
        "import http.server\nseen = []\nclass H(http.server.BaseHTTPRequestHandler):\n    def do_GET(self):\n"
        "        seen.append(self.path); self.send_response(200); self.end_headers(); self.wfile.write(' '.join(seen).encode())\n"
        "s = http.server.HTTPServer(('127.0.0.1', 8000), H); print('up', flush=True); s.serve_forever()"
    )
    process = box.start(["python3", "-c", server])
    read_until(process, b"up\n")

    def get(sandbox: Sandbox, path: str) -> str:
        code = f"import urllib.request as r; r.urlopen('http://127.0.0.1:8000{path}', timeout=30).read().decode()"
        return str(sandbox.run_code(code).value).strip("'")

    assert get(box, "/a") == "/a"
    (copy,) = box.fork(1)
    with copy:
        assert get(copy, "/b") == "/a /b"
        assert get(box, "/c") == "/a /c"
        copy.process(process.id).kill()
        assert copy.process(process.id).poll() == 137 and process.poll() is None
