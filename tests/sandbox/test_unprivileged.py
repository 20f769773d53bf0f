"""The whole path as an ordinary user: no root, no capability, only user namespaces."""

# ruff: noqa: E501  (programs for the guest are text)
from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import sandbox_gym
from tests.images.making import entry, folder, layer, layout

Run = Callable[[str], str]
_NOBODY = 65534


@pytest.fixture(scope="module")
def as_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """`as_user(code)`: what `code` prints, run by an ordinary user with Sandbox imported, a home and a run folder."""
    if os.geteuid() != 0:
        yield lambda code: _run(
            [sys.executable], Path(sandbox_gym.__file__).parent.parent, code, dict(os.environ)
        )
        return
    python = next((p for p in (sys.executable, "/usr/bin/python3") if _works_for_user(p)), None)
    if python is None or shutil.which("setpriv") is None:
        pytest.fail("no Python that an ordinary user may run (/usr/bin/python3), or no setpriv (util-linux)")
    place = tmp_path_factory.mktemp("user")
    for above in (place, *place.parents):
        if above != Path("/") and above.stat().st_uid == 0 and not above.stat().st_mode & 0o001:
            above.chmod(above.stat().st_mode | 0o011)
    source = place / "lib"
    shutil.copytree(
        Path(sandbox_gym.__file__).parent,
        source / "sandbox_gym",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    subprocess.run(["chmod", "-R", "a+rX", str(source)], check=True)
    for name in ("home", "run"):
        (place / name).mkdir(mode=0o700)
        os.chown(place / name, _NOBODY, _NOBODY)
    environment = {
        "HOME": str(place / "home"),
        "XDG_RUNTIME_DIR": str(place / "run"),
        "PATH": "/usr/bin:/bin",
        "SECRET": "hush",
    }
    (place / "home/secret").write_text("at home")
    os.chown(place / "home/secret", _NOBODY, _NOBODY)
    yield lambda code: _run([*_SETPRIV, python], source, code, environment)
    assert not os.path.exists(place / "run" / f"sandbox-gym-{_NOBODY}")


_SETPRIV = ["setpriv", f"--reuid={_NOBODY}", f"--regid={_NOBODY}", "--clear-groups"]


def _works_for_user(python: str) -> bool:
    # It starts itself once more: setpriv's own step may still have rights that let it through a closed folder.
    code = "import subprocess, sys; assert sys.version_info >= (3, 10); subprocess.run([sys.executable, '-V'], check=True)"
    return (
        subprocess.run([*_SETPRIV, python, "-c", code], check=False, capture_output=True, cwd="/").returncode
        == 0
    )


def _run(command: list[str], source: Path, code: str, environment: dict[str, str]) -> str:
    head = (
        f"import os, sys, warnings; sys.path.insert(0, {str(source)!r}); warnings.simplefilter('ignore')\n"
        "from sandbox_gym.sandbox import Sandbox, Snapshot\nfrom sandbox_gym import errors\n"
    )
    done = subprocess.run(
        [*command, "-c", head + code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        cwd="/",
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_code_commands_and_files(as_user: Run) -> None:
    out = as_user("""
assert os.geteuid() != 0
with Sandbox.create() as box:
    assert box.run_code("x = 41; x + 1").value == "42"
    assert box.shell("id -u; echo $0 >&2; exit 3").exit_code == 3
    assert box.shell("echo disk > f; cat f; ls -ld / /tmp /workspace").stdout.startswith("disk")
    box.write_file("a/b", bytes(9 << 20))
    assert len(box.read_file("a/b")) == 9 << 20
    assert box.run_code("while True: pass", timeout=0.2).timed_out
    assert box.shell("sleep 60 & sleep 60", timeout=0.2).timed_out
    assert box.run_code("import tempfile, subprocess; subprocess.run(['true']).returncode").value == "0"
print("good")
""")
    assert out == "good"


def test_snapshots_forks_and_rewinds(as_user: Run) -> None:
    out = as_user("""
with Sandbox.create() as box:
    box.run_code("x = 1; open('f', 'w').write('1'); g = open('f', 'a')")
    snapshot = box.snapshot()
    copies = box.fork(4)
    for i, copy in enumerate(copies):
        copy.run_code(f"x += {i}; g.write('{i}'); g.flush()")
        copy.run_code("g.close()")
    assert [c.run_code("x, open('f').read()").value for c in copies] == [str((1 + i, f"1{i}")) for i in range(4)]
    copies[0].shell("rm f; mkdir f; rm -rf /etc/alternatives /tmp; echo gone > /etc/passwd")
    (deeper,) = copies[0].fork(1)
    assert deeper.shell("test -d f && cat /etc/passwd").stdout == "gone\\n"
    assert box.shell("cat f").stdout == "1"
    box.checkpoint("a")
    box.run_code("x = 0; import os; g.close(); os.remove('f')")
    box.rewind("a")
    assert box.run_code("x, open('f').read()").value == str((1, "1"))
    box.run_code("g.close()")
    for i in range(20):
        box.run_code(f"x = {i}")
        box.checkpoint()
    assert box.run_code("x").value == "19"
    with Sandbox.restore(snapshot) as again:
        assert again.run_code("x").value == "1"
    try:
        for _ in range(40): box.checkpoint()
    except errors.SnapshotError as error:
        assert "deep" in str(error), error
    assert box.run_code("x").value == "19"
print("good")
""")
    assert out == "good"


def test_isolation(as_user: Run) -> None:
    out = as_user("""
home = os.environ["HOME"]
with Sandbox.create() as box, Sandbox.create() as other:
    box.shell("exec -a only-here sleep 60 & sleep 0.05")
    box.write_file("/tmp/mine", "x")
    assert "only-here" not in other.shell("cat /proc/[0-9]*/cmdline; ls /tmp").stdout
    assert not other.shell("test -e /tmp/mine").ok
    for path in (home + "/secret", "/proc/1/root" + home + "/secret", "/root/.bashrc", "/var/log/dpkg.log"):
        assert box.shell(f"cat {path}").exit_code != 0, path
    text = box.shell("env; cat /proc/[0-9]*/environ").stdout
    assert "hush" not in text
    for command in ("touch /usr/x", "mount -o remount,rw /usr", "umount /usr", "mount -t tmpfs x /mnt", "unshare -r true",
                    f"kill -9 {os.getpid()}", "mknod /tmp/d b 8 0"):
        assert box.shell(command).exit_code != 0, command
    assert box.run_code("import socket; [n for _, n in socket.if_nameindex()]").value == "['lo']"
    assert box.shell("kill -9 -1; true").exit_code in (0, 137)
    assert other.run_code("1").ok
print("good")
""")
    assert out == "good"


def test_limits(as_user: Run) -> None:
    out = as_user("""
import warnings
from sandbox_gym.backends import lookup
with warnings.catch_warnings(record=True) as heard:
    warnings.simplefilter("always")
    box = Sandbox.create(disk="16Mi")
    Sandbox.create().terminate()
unenforced = [n for n in ("cpus", "memory", "pids") if any(n in str(w.message) for w in heard)]
assert len(heard) == (1 if unenforced else 0), heard
for name in unenforced:
    try:
        Sandbox.create(**{name: {"cpus": 1, "memory": "1Gi", "pids": 100}[name]})
    except errors.BackendUnavailable as error:
        assert name in str(error) and "doctor" in str(error), error
    else:
        raise AssertionError(name)
Sandbox.create(memory=None, cpus=None, pids=None).terminate()
try:
    for i in range(10): box.write_file(f"fill{i}", os.urandom(4 << 20))
except OSError as error:
    assert error.errno in (28, 122), error
else:
    raise AssertionError("the disk has no end")
assert box.run_code("print('full'); 1").stdout == "full\\n"
box.shell("rm fill*")
box.write_file("after", bytes(4 << 20))
(copy,) = box.fork(1)
assert copy.shell("head -c 14000000 /dev/urandom > more").exit_code != 0
assert box.shell("head -c 8000000 /dev/urandom > more").ok
print("good")
""")
    assert out == "good"


def test_an_image_is_refused_with_the_reason(as_user: Run) -> None:
    out = as_user("""
try:
    Sandbox.create(image="/usr").terminate()
except errors.BackendUnavailable as error:
    print("good" if "root" in str(error) else error)
""")
    assert out == "good"


def test_an_image_out_of_an_archive(
    as_user: Run, python_layer: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """All files are root's inside, and whiteouts, closed folders and setuid programs are no hindrance."""
    place = tmp_path_factory.mktemp("archive")
    place.chmod(0o755)
    upper = layer(
        folder("closed", mode=0o000, uid=5),
        entry("closed/f", content=b"f", mode=0o4000, uid=5),
        entry("etc/.wh.motd"),
        folder("srv/app", uid=1000, gid=1000),
    )
    archive = layout(
        place / "layout",
        [python_layer, upper],
        Env=["PATH=/opt/python/bin:/usr/bin:/bin"],
        WorkingDir="/srv/app",
    )
    out = as_user(f"""
from sandbox_gym import Image
image = Image.from_oci_archive({str(archive)!r})
with Sandbox.create(image=image) as box:
    assert box.run_code("import os; os.getcwd(), os.stat('.').st_uid, open('/closed/f').read()").value == "('/srv/app', 0, 'f')"
    assert box.shell("test -e /etc/motd || echo gone; cat /closed/f > kept; cat kept").stdout == "gone\\nf"
    box.run_code("os.rmdir('/tmp'); os.remove('/closed/f')")
    one, other = box.fork(2)
    one.write_file("kept", "one")
    assert other.read_text("kept") == "f" and not other.shell("test -e /closed/f").ok
    try:
        image.delete()
    except errors.ImageError as error:
        assert "has sandboxes" in str(error)
assert os.path.exists(image.rootfs + "/closed") and Image.list() == [image]
from sandbox_gym.backends import lookup
lookup.shut_down()
image.delete()
assert Image.list() == [] and not os.path.exists(image.rootfs)
print("good")
""")
    assert out == "good"


def test_mounts(as_user: Run) -> None:
    out = as_user("""
home = os.environ["HOME"]
with Sandbox.create(mounts=[(home, "/mnt/given")]) as box:
    assert box.read_text("/mnt/given/secret") == "at home"
    assert box.shell("echo x > /mnt/given/secret").exit_code != 0
    (copy,) = box.fork(1)
    assert copy.read_text("/mnt/given/secret") == "at home" and copy.shell("rm /mnt/given/secret").exit_code != 0
print("good")
""")
    assert out == "good"


def test_killed_clients_leave_nothing(as_user: Run) -> None:
    out = as_user("""
import subprocess, signal, time
code = "import sys; sys.path[:0] = " + repr(sys.path[:1]) + '''
from sandbox_gym.sandbox import Sandbox
from sandbox_gym.backends import lookup
box = Sandbox.create(); box.shell("sleep 600 &"); copies = Sandbox.create().fork(2)
print(lookup.get("native")._folder, flush=True); input()
'''
child = subprocess.Popen([sys.executable, "-W", "ignore", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
folder = child.stdout.readline().strip()
assert os.path.isdir(folder)
child.kill()
end = time.monotonic() + 5
def left():
    mine = []
    for pid in os.listdir("/proc"):
        try:
            if pid.isdigit() and int(pid) != os.getpid() and os.stat("/proc/" + pid).st_uid == os.getuid():
                line = open(f"/proc/{pid}/cmdline").read()
                if os.path.basename(folder) in line or "sleep\\0600" in line: mine.append(line)
        except OSError: pass
    return mine or os.path.exists(folder)
while left() and time.monotonic() < end: time.sleep(0.02)
assert not left(), left()
print("good")
""")
    assert out == "good"


def test_processes_terminals_and_shells(as_user: Run) -> None:
    out = as_user("""
with Sandbox.create() as first:
    (copy,) = first.fork(1)
    for box in (first, copy):
        process = box.start(["sh", "-c", "sleep 60 & cat; exit 4"])
        assert process.write("in\\n") == 3 and process.read(10) == b"in\\n"
        process.close_stdin()
        assert process.wait(10) == 4
        process.kill()
        terminal = box.start(["bash", "-c", "tty; stty size; trap 'stty size' WINCH; echo up; while :; do sleep 0.01; done"], pty=True)
        text = b""
        while b"up" not in text: text += terminal.read(10)
        assert b"/dev/pts/0" in text and b"24 80" in text
        terminal.resize(30, 90)
        while b"30 90" not in text: text += terminal.read(10)
        terminal.kill()
        assert terminal.poll() == 137
        shell = box.session()
        shell.run("cd /tmp; x=1; sleep 60 &")
        assert shell.run("f() { sleep 60; echo BAD; }; f; echo BAD", timeout=0.3).timed_out
        assert shell.run("pwd; echo $x; kill %1; cat").stdout == "/tmp\\n1\\n"
        shell.close()
        assert box.run_code("import os; a, b = os.openpty(); os.ttyname(b), os.close(a), os.close(b)").ok
        box.fork(1)[0].terminate()
print("good")
""")
    assert out == "good"
