"""What the fork engine can't capture: each refused by name, the sandbox unharmed. And open files, which it can."""

from __future__ import annotations

import pytest

from sandbox_gym.errors import SnapshotError
from sandbox_gym.sandbox import Sandbox
from tests.kinds.catalogue import KINDS
from tests.kinds.kind import hold


@pytest.mark.parametrize("what", [name for name, kind in KINDS.items() if kind.fork])
def test_what_a_fork_would_lose_is_refused_by_name(box: Sandbox, what: str) -> None:
    kind = KINDS[what]
    hold(box, kind)
    box.run_code("kept = 1")
    with pytest.raises(SnapshotError, match=box.name) as caught:
        box.snapshot(engine="fork")
    assert any(words in str(caught.value) for words in kind.fork.split("|")), str(caught.value)
    assert box.status == "running" and box.run_code("kept").value == "1" and box.shell("true").ok


def test_after_the_hindrance_has_gone_a_snapshot_works(box: Sandbox) -> None:
    box.run_code("import threading; e = threading.Event(); t = threading.Thread(target=e.wait); t.start()")
    with pytest.raises(SnapshotError):
        box.snapshot(engine="fork")
    box.run_code("e.set(); t.join()")
    box.snapshot(engine="fork").delete()
    box.shell("sleep 60 & echo $! > pid")
    with pytest.raises(SnapshotError, match="sleep"):
        box.snapshot(engine="fork")
    box.shell("kill $(cat pid)")
    for _ in range(3):  # children that end by themselves, with their pipes, in no command's time
        box.shell("(sleep 0.02; echo late) & setsid sleep 0.02 &")
        box.run_code("import time; time.sleep(0.1)")
        box.snapshot(engine="fork").delete()


def test_a_server_in_the_background_is_named(box: Sandbox) -> None:
    serve = "import http.server, os; os.mknod('up'); http.server.test(port=8000)"
    box.shell(f'python3 -c "{serve}" >/dev/null 2>&1 & until [ -e up ]; do :; done')
    with pytest.raises(SnapshotError, match="python3"):
        box.snapshot(engine="fork")


def test_private_mappings_and_read_only_files_are_fine(box: Sandbox) -> None:
    box.run_code(
        "import mmap\nopen('data', 'wb').write(b'x' * 8192)\nf = open('data', 'rb')\n"
        "ro = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)\n"
        "private = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS); private[0] = 7"
    )
    (copy,) = box.fork(1)
    with copy:
        assert copy.run_code("ro[0], len(ro), private[0]").value == "(120, 8192, 7)"


# ---- open files -----------------------------------------------------------------------------------------------------


def test_open_files_go_on_at_their_place_on_each_copy_s_own_disk(box: Sandbox) -> None:
    box.run_code(
        "open('r', 'w').write('0123456789')\nr = open('r'); r.read(3)\n"
        "w = open('w', 'w'); w.write('begun '); w.flush()\n"
        "a = open('a', 'a'); a.write('one '); a.flush()\n"
        "u = open('u', 'w+b', buffering=0); u.write(b'abcdef'); u.seek(2)\n"
        "import os; d = os.open('.', os.O_RDONLY | os.O_DIRECTORY); os.mkdir('sub'); os.chdir('sub')"
    )
    first, second = box.fork(2)
    for name, sandbox in (("first", first), ("second", second), ("source", box)):
        result = sandbox.run_code(
            f"rest = r.read(2)\nw.write('{name}'); w.flush()\na.write('{name}'); a.flush()\nu.write(b'X')\n"
            "os.chdir(d); rest, open('w').read(), open('a').read(), open('u').read(), os.getcwd()"
        )
        assert result.value == str(("34", f"begun {name}", f"one {name}", "abXdef", "/workspace")), result
    first.terminate()
    second.terminate()


def test_unwritten_buffers_are_each_copy_s_own(box: Sandbox) -> None:
    box.run_code("f = open('f', 'w'); f.write('held back ')")
    (copy,) = box.fork(1)
    with copy:
        copy.run_code("f.write('copy'); f.close()")
        assert copy.read_text("f") == "held back copy"
    assert box.read_text("f") == ""
    box.run_code("f.write('source'); f.close()")
    assert box.read_text("f") == "held back source"


def test_modes_of_open_files_hold(box: Sandbox) -> None:
    box.run_code(
        "import os, fcntl\nr = open('/etc/passwd')\nx = os.open('x', os.O_WRONLY | os.O_CREAT | os.O_EXCL)"
    )
    box.run_code("os.write(x, b'12'); os.set_inheritable(x, True)")
    (copy,) = box.fork(1)
    with copy:
        assert (
            copy.run_code("os.write(x, b'3'); os.get_inheritable(x), os.get_inheritable(r.fileno())").value
            == "(True, False)"
        )
        assert copy.read_text("x") == "123"
        assert copy.run_code("os.write(r.fileno(), b'no')").error is not None
    assert box.read_text("x") == "12"


def test_the_working_folder_is_kept_even_when_it_was_moved(box: Sandbox) -> None:
    box.run_code(
        "import os; os.makedirs('/tmp/deep/er'); os.chdir('/tmp/deep/er'); os.rename('/tmp/deep', '/tmp/moved')"
    )
    (copy,) = box.fork(1)
    with copy:
        assert copy.run_code("os.getcwd()").value == "'/tmp/moved/er'"


def test_a_working_folder_that_was_removed(box: Sandbox) -> None:
    box.run_code("import os; os.mkdir('/tmp/gone'); os.chdir('/tmp/gone'); os.rmdir('/tmp/gone'); kept = 1")
    with pytest.raises(SnapshotError, match=box.name):
        box.snapshot(engine="fork")
    assert box.run_code("kept").value == "1"
    box.run_code("os.chdir('/')")
    box.fork(1)[0].terminate()


def test_what_is_written_after_refusals_is_in_the_snapshot(box: Sandbox) -> None:
    """A copy's disk may be mounted ahead, but never that of a sandbox which goes on writing."""
    box.run_code("import signal; signal.alarm(1000)")
    for _ in range(3):
        with pytest.raises(SnapshotError, match="timer"):
            box.snapshot(engine="fork")
    box.run_code("import time; time.sleep(0.05)")  # a quiet moment, in which the supervisor prepares
    box.shell("echo late > /root/late")
    box.run_code("signal.alarm(0)")
    snapshot = box.snapshot()
    assert box.read_text("/root/late") == "late\n"
    with Sandbox.restore(snapshot) as copy:
        assert copy.read_text("/root/late") == "late\n"
    snapshot.delete()
