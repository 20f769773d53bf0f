"""The audit log holds what was done, by whom, and where that came from; bounded, without secrets, whole."""

from __future__ import annotations

import hashlib
import os
import sqlite3
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sandbox_gym import _audit
from sandbox_gym._audit import set_audit
from sandbox_gym.audit import Event, read
from sandbox_gym.env import SandboxEnv
from sandbox_gym.errors import ProtocolError, SandboxError
from sandbox_gym.network import Allow
from sandbox_gym.sandbox import Sandbox, Snapshot

Client = Callable[..., subprocess.Popen[str]]


def events(path: Path, **which: Any) -> list[Event]:
    if _audit._log is not None:
        _audit._log.flush()
    return list(read(path, **which))


def stored(path: Path) -> bytes:
    """All bytes of the log's files."""
    assert _audit._log is not None
    _audit._log.flush()
    return b"".join(file.read_bytes() for file in path.parent.glob(f"{path.name}*"))


# ---- what is recorded ----------------------------------------------------------------------------------------------


def test_every_kind_of_call(log: Path, box: Sandbox, tmp_path: Path) -> None:
    box.shell("echo out; echo err >&2; exit 3", cwd="/tmp")
    box.exec(["cat", "-"], stdin=b"fed")
    box.run_code("x = 6\nprint('p')\nx * 7")
    box.run_code("1 / 0")
    box.write_file("/tmp/f", "text")
    with pytest.raises(OSError, match="No such file"):
        box.write_file("/proc/nothing", "x")
    (tmp_path / "folder").mkdir()
    box.upload(tmp_path / "folder", "/tmp/there")
    process = box.start(["cat"])
    process.write("typed\n")
    process.kill()
    box.session("s").run("cd /")
    box.read_file("/tmp/f")

    restore, *found = events(log, sandbox=box.id)
    assert restore.kind == "restore"
    assert [event.kind for event in found] == [
        *("shell", "exec", "code", "code", "write", "write", "upload", "start", "stdin", "session"),
    ]
    assert all(event.duration is not None and event.duration > 0 for event in found)
    shell, exec_, code, failed, write, refused, upload, start, stdin, session = (
        (event.text, event.result or {}) for event in found
    )
    streams = {"stdout": "out\n", "stderr": "err\n"}
    assert shell == ("echo out; echo err >&2; exit 3", {"cwd": "/tmp", "exit_code": 3, **streams})
    assert exec_[0] == "cat -" and exec_[1]["stdin"] == exec_[1]["stdout"] == "fed"
    assert code == ("x = 6\nprint('p')\nx * 7", {"value": "42", "stdout": "p\n"})
    assert failed[1]["error"] == "ZeroDivisionError: division by zero"
    assert write[0] == "/tmp/f" and write[1]["data"] == "text" and write[1]["data_bytes"] == 4
    assert refused[1]["error"].startswith("FileNotFoundError")
    assert upload[0] == "/tmp/there" and upload[1]["data_bytes"] > 0
    assert start[0] == "cat" and stdin[0] == "typed\n"
    assert start[1]["id"] == stdin[1]["id"] == process.id
    assert session[0] == "cd /" and session[1]["session"] == "s"


def test_what_only_looks_like_a_shell_is_told_as_it_is(log: Path, box: Sandbox) -> None:
    box.exec(["/bin/sh", "-c", "echo cheat > result", "innocent"])
    assert events(log, sandbox=box.id)[-1].text == "/bin/sh -c 'echo cheat > result' innocent"


def test_a_timed_out_cell(log: Path, box: Sandbox) -> None:
    box.run_code("while True: pass", timeout=0.2)
    result = events(log, sandbox=box.id)[-1].result
    assert result is not None and "SandboxTimeout" in result["error"]


def test_ancestry(log: Path) -> None:
    with Sandbox.create(name="base") as base:
        base.shell("echo base 1")
        mid, other = base.fork(2, prefix="mid-")
        base.shell("echo base 2")
        mid.shell("echo mid 1")
        other.shell("echo other 1")
        (leaf,) = mid.fork(1, prefix="leaf-")
        mid.shell("echo mid 2")
        leaf.shell("echo leaf 1")
        for box in (leaf, mid, other):
            box.terminate()
    found = events(log, sandbox="leaf-1")
    story = ["echo base 1", "echo mid 1", "echo leaf 1"]
    assert [event.text for event in found if event.kind == "shell"] == story
    assert [event.kind for event in found if event.kind != "shell"] == [
        *("create", "snapshot", "restore", "snapshot", "restore", "end"),
    ]
    assert {event.sandbox for event in found} == {base.id, mid.id, leaf.id}
    assert events(log, sandbox=leaf.id) == found
    with pytest.raises(KeyError, match="nobody"):
        events(log, sandbox="nobody")


def test_rewinds_and_ends(log: Path) -> None:
    box = Sandbox.create(env={"A": "1"})
    checkpoint = box.checkpoint("before")
    box.shell("risky")
    box.rewind()
    box.freeze("frozen").delete()
    checkpoint.delete()
    create, snapshot, _, rewind, frozen, end = events(log, sandbox=box.id)
    assert create.kind == "create" and create.result is not None and create.result["env"] == ["A"]
    assert (snapshot.text, rewind.text, frozen.text) == ("before", "before", "frozen")
    assert snapshot.snapshot == rewind.snapshot == checkpoint.id != frozen.snapshot
    assert end.kind == "end" and end.result == {"state": "terminated"}
    box = Sandbox.create()
    with pytest.raises(SandboxError):
        box.run_code("import os; os._exit(1)")
    code, end = events(log, sandbox=box.id)[-2:]
    assert code.result is not None and "SandboxDied" in code.result["error"]
    assert end.result == {"state": "dead"} and "gone" in end.text


def test_a_story_goes_on_where_an_archive_is_loaded(log: Path, box: Sandbox, tmp_path: Path) -> None:
    box.shell("echo before")
    snapshot = box.snapshot()
    snapshot.save(tmp_path / "x.sbx")
    snapshot.delete()
    loaded = Snapshot.load(tmp_path / "x.sbx")
    with Sandbox.restore(loaded) as copy:
        copy.shell("echo after")
    loaded.delete()
    texts = [event.text for event in events(log, sandbox=copy.id) if event.kind == "shell"]
    assert texts == ["echo before", "echo after"]


def test_steps_are_not_recorded(log: Path) -> None:
    env = SandboxEnv("CartPole-v1")
    env.reset(seed=0)
    for _ in range(5):
        env.step(0)
    box = env.sandbox
    env.close()
    kinds = [event.kind for event in events(log, sandbox=box.id)]
    assert kinds == ["create", "make", "snapshot", "end"]


def test_network_verdicts(log: Path, web: str) -> None:
    with Sandbox.create(network=Allow(services={"api": web}), env={"TOKEN": "hidden-in-names"}) as box:
        port = web.split(":")[1]
        box.shell(f"curl -s http://api:{port}/; curl -s http://denied.test/; curl -s http://$TOKEN.test/")

        def told() -> list[Event]:
            return [event for event in events(log, sandbox=box.id) if event.kind == "network"]

        deadline = time.monotonic() + 20  # while it lives: a client that is killed has told of it
        while len(told()) < 3 and time.monotonic() < deadline:
            time.sleep(0.05)
        with Sandbox.restore(snapshot := box.snapshot(), network=None) as closed:
            assert closed._spec.network is None
        snapshot.delete()
        before = len(told())
        box.shell("curl -s http://last.test/")
    texts = [event.text for event in told()]
    assert f"allowed http api:{port}" in texts and "denied http denied.test:80" in texts
    assert len(texts) == before + 1 and "last.test" in texts[-1]
    assert any("[env TOKEN].test" in text for text in texts)
    allowed = next(event for event in told() if event.text.startswith("allowed"))
    assert allowed.result is not None and allowed.result["received"] > 0


# ---- bounds and secrets --------------------------------------------------------------------------------------------


def test_long_texts_are_cut_and_named_by_their_hash(log: Path, box: Sandbox) -> None:
    code = "x = 1 #" + "c" * 100_000
    box.run_code(code)
    box.shell("head -c 50000 /dev/zero | tr '\\0' o")
    box.write_file("f", b"d" * 100_000)
    cell, shell, write = ((event.text, event.result or {}) for event in events(log, sandbox=box.id)[-3:])
    assert len(cell[0]) == 16 << 10 and cell[1]["text_bytes"] == len(code)
    assert cell[1]["text_sha256"] == hashlib.sha256(code.encode()).hexdigest()
    assert len(shell[1]["stdout"]) == 4 << 10 and shell[1]["stdout_bytes"] == 50_000
    assert len(write[1]["data"]) == 4 << 10
    assert write[1]["data_sha256"] == hashlib.sha256(b"d" * 100_000).hexdigest()
    assert len(stored(log)) < 200_000


def test_secrets_are_not_written(log: Path) -> None:
    secret, second = "s3cr3t-" + "k" * 30, "an0ther-secret"
    with Sandbox.create(env={"API_KEY": secret, "HOME": "/workspace"}) as box:
        box.shell("echo $API_KEY $HOME; echo $OTHER >&2", env={"OTHER": second})
        box.run_code("import os; print(os.environ['API_KEY']); os.environ['API_KEY']")
        box.run_code("import os; raise ValueError(os.environ['API_KEY'])")
        box.exec(["echo", secret], stdin=secret.encode())
        box.write_file(".env", f"KEY={secret}")
        box.write_file("long", b"x" * 4090 + secret.encode() * 2000)
        box.run_code("#" + "c" * (16_384 - 10) + secret)
        with pytest.raises(OSError, match="No such file"):
            box.write_file(f"/proc/{secret}", "")
        box.start(["true", secret]).wait()
        box.session().run(f"echo {secret}")
    found = events(log, sandbox=box.id)
    assert found[1].result is not None
    assert found[1].result["stdout"] == "[env API_KEY] /workspace\n"
    assert found[1].result["stderr"] == "[env OTHER]\n" and found[1].result["env"] == ["OTHER"]
    kept = stored(log)
    assert b"s3cr3t" not in kept and second.encode() not in kept and b"[env API_KEY]" in kept


@pytest.mark.parametrize(
    "answer",
    [
        "{'exit_code': [1], 'stdout': 7, 'artifacts': 9, 'error': {'type': [1] * 10**5}}",
        "{'exit_code': float('nan'), 'value': {'a': 1}}",
        "[1, 2]",
        "'\\udcff' * 10",
    ],
)
def test_a_guest_that_lies_does_not_end_the_log(log: Path, box: Sandbox, answer: str) -> None:
    head = "import sandbox_gym_guest.interpreter as own\n"
    box.run_code(f"{head}own.Interpreter.run = lambda *a, **k: {answer}")
    with pytest.raises(ProtocolError):
        box.run_code("1")
    assert [event.kind for event in events(log, sandbox=box.id)][-2:] == ["code", "end"]


# ---- where it goes -------------------------------------------------------------------------------------------------


def test_one_after_the_other(tmp_path: Path, box: Sandbox) -> None:
    paths = [tmp_path / "one.db", tmp_path / "two.db"]
    for path in (*paths, paths[0]):
        set_audit(path)
        assert os.environ[_audit.VARIABLE] == str(path)
        box.run_code("1")
    set_audit(None)
    box.run_code("1")
    assert [len(list(read(path))) for path in paths] == [2, 1]
    assert (paths[0].stat().st_mode & 0o777) == 0o600


def test_what_cannot_be_a_log(tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="can't be written"):
        set_audit(tmp_path / "missing/a.db")
    (tmp_path / "text").write_text("no log " * 1000)
    with pytest.raises(SandboxError, match="can't be written"):
        set_audit(tmp_path / "text")
    other = sqlite3.connect(tmp_path / "other.db")
    other.execute("CREATE TABLE t (x)")
    other.close()
    with pytest.raises(SandboxError, match="no audit log"):
        set_audit(tmp_path / "other.db")
    for name, error in (("text", SandboxError), ("other.db", SandboxError), ("nothing", FileNotFoundError)):
        with pytest.raises(error, match=name):
            list(read(tmp_path / name))
    assert _audit._log is None and _audit.VARIABLE not in os.environ


def test_a_log_that_fails_later_fails_the_next_call(client: Client, tmp_path: Path) -> None:
    code = """
import resource, signal
from sandbox_gym.errors import SandboxError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
with Sandbox.create() as box:
    resource.setrlimit(resource.RLIMIT_FSIZE, (3_000_000, resource.RLIM_INFINITY))
    try:
        for _ in range(100_000):
            box.run_code("'x' * 4000")
    except SandboxError as error:
        print(error)
    sandboxes = box.status
    from sandbox_gym._audit import set_audit
    set_audit(None)
    print(sandboxes, box.run_code("1").value)
"""
    out, errors = client(code, SANDBOX_GYM_AUDIT=str(tmp_path / "a.db")).communicate(timeout=100)
    first, second = out.splitlines()
    assert "a.db can't be written" in first and "set_audit(None)" in first, errors
    assert second == "running 1"
    assert len(list(read(tmp_path / "a.db"))) > 10
