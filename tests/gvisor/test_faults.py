"""kill -9 of every process there is, and commands of runsc that fail: nothing stays, and the error says why."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sandbox_gym.backends import lookup
from sandbox_gym.backends.shared import registry
from sandbox_gym.errors import BackendUnavailable, SandboxDied, SandboxTimeout, SnapshotError
from sandbox_gym.sandbox import Sandbox, Snapshot
from tests.gvisor.conftest import gvisor, holdings, supervisor

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="runsc restores sandboxes for root only")

Client = Callable[..., "subprocess.Popen[str]"]
_BUSY = """
import json
from sandbox_gym.backends import lookup
from sandbox_gym.backends.shared import registry
from sandbox_gym import Allow
box = Sandbox.create("victim", backend="gvisor", network=Allow(["example.org"]))
box.shell("sleep 600 & setsid sleep 601 &")
kept = box.snapshot()
copy = Sandbox.restore(kept, network=None)
backend = lookup.get("gvisor")
print(json.dumps({"folder": str(backend._folder), "janitor": backend._process.pid}), flush=True)
"""


def start(client: Client, after: str = "input()") -> tuple[subprocess.Popen[str], dict[str, Any]]:
    process = client(_BUSY + after)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.communicate()[1]
    return process, json.loads(line)


def sentry(box: Sandbox) -> int:
    """The number that this test has for the process which is the sandbox's kernel."""
    inner = next(int(row["pid"]) for row in gvisor().list() if row["id"] == box.id)
    for child in Path(f"/proc/{supervisor()}/task/{supervisor()}/children").read_text().split():
        if Path(f"/proc/{child}/status").read_text().split("NSpid:")[1].split()[1:3][0] == str(inner):
            return int(child)
    raise AssertionError(f"no process {inner}")


def images_of(folder: str) -> Path:
    return Path(f"/var/tmp/sandbox-gym-{Path(folder).name}")


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGTERM])
def test_the_client_is_killed(client: Client, traces_of: Callable[..., Any], sign: signal.Signals) -> None:
    process, facts = start(client)
    traces = traces_of(process.pid, Path(facts["folder"]))
    assert len(traces.left()) > 8 and len(os.listdir(images_of(facts["folder"]))) == 1
    process.send_signal(sign)
    process.wait(5)
    traces.assert_gone()
    assert not images_of(facts["folder"]).exists()


@pytest.mark.parametrize("which", ["janitor", "supervisor"])
def test_the_supervisor_is_killed(client: Client, traces_of: Callable[..., Any], which: str) -> None:
    """All of its sandboxes end with it, and the client says so."""
    process, facts = start(
        client,
        "input()\ntry: box.run_code('1')\nexcept Exception as error: print(type(error).__name__, error)\n"
        "with Sandbox.create(backend='gvisor') as box: print(box.run_code('6 * 7').value)",
    )
    children = Path(f"/proc/{facts['janitor']}/task/{facts['janitor']}/children").read_text().split()
    inner = [
        pid
        for pid in children
        if len(Path(f"/proc/{pid}/status").read_text().split("NSpid:")[1].splitlines()[0].split()) == 2
    ]
    traces = traces_of(process.pid, Path(facts["folder"]))
    os.kill(facts["janitor"] if which == "janitor" else int(inner[0]), signal.SIGKILL)
    traces.processes.pop(facts["janitor"], None)  # a zombie until its client looks
    traces.assert_gone()
    assert not images_of(facts["folder"]).exists()
    out, err = process.communicate("\n", timeout=60)
    assert out.splitlines()[-1] == "42", err
    assert out.startswith("SandboxDied")


def test_gc_removes_images_and_nothing_that_is_only_named(tmp_path: Path) -> None:
    """Where janitor and sweeper were killed as well."""
    folder = registry.make_folder()
    images, other = tmp_path / f"sandbox-gym-{folder.name}", tmp_path / "other"
    for path in (images, other):
        path.mkdir()
        (path / "file").touch()
    registry.write(folder, owner_pid=os.getpid(), owner_start=0, scratch=str(images))
    assert str(folder) in registry.collect()
    assert not images.exists() and not folder.exists()
    folder.mkdir(parents=True)
    registry.write(folder, scratch=str(other))
    registry.clear(folder)
    assert other.exists() and not folder.exists()


def test_the_guest_is_killed(box: Sandbox) -> None:
    os.kill(sentry(box), signal.SIGKILL)
    with pytest.raises(SandboxDied, match="its process ended"):
        box.run_code("1")
    assert box.status == "dead"


def test_the_gofer_is_killed(box: Sandbox) -> None:
    """Files of the host's can't be opened any more: the sandbox dies, or answers still; it never hangs."""
    gofers = [
        int(child)
        for child in Path(f"/proc/{supervisor()}/task/{supervisor()}/children").read_text().split()
        if b"gofer" in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
    ]
    (gofer,) = gofers
    os.kill(gofer, signal.SIGKILL)
    try:
        box.exec(["/usr/bin/sort", "--version"], timeout=20)
    except SandboxDied:
        pass
    box.terminate()


def test_a_guest_ends_itself_in_the_middle(box: Sandbox) -> None:
    with pytest.raises(SandboxDied):
        box.run_code("import os; os._exit(3)")
    with pytest.raises(SandboxDied):
        box.shell("true")


def test_a_stubborn_cell_ends_the_sandbox(box: Sandbox) -> None:
    result = box.run_code(
        "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass", timeout=0.5
    )
    assert result.timed_out and result.error is not None and result.error.type == "SandboxDied"
    assert box.status == "dead"


def test_a_damaged_image(box: Sandbox) -> None:
    """Restores of it are refused, and leave nothing; the sandbox goes on."""
    snapshot = box.snapshot()
    folder = Path(f"/var/tmp/sandbox-gym-{gvisor()._folder.name}") / snapshot.id
    before = holdings()
    os.truncate(folder / "checkpoint.img", (folder / "checkpoint.img").stat().st_size // 2)
    with pytest.raises(SnapshotError, match=snapshot.id):
        Sandbox.restore(snapshot)
    deadline = time.monotonic() + 5
    while (after := holdings()) != before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert after == before
    assert box.run_code("6 * 7").value == "42"
    snapshot.delete()


def test_a_checkpoint_that_fails_leaves_no_image(box: Sandbox) -> None:
    folder = Path(f"/var/tmp/sandbox-gym-{gvisor()._folder.name}")
    before = sorted(os.listdir(folder))
    away = folder.with_name(f"{folder.name}-away")
    folder.rename(away)
    try:
        with pytest.raises(Exception, match="No such file"):
            box.snapshot()
    finally:
        away.rename(folder)
    assert sorted(os.listdir(folder)) == before
    assert box.run_code("6 * 7").value == "42"


def test_too_little_time_for_a_restore(pristine: Snapshot) -> None:
    """It is ended in time, and what it had begun goes."""
    with pytest.raises(SandboxTimeout, match=pristine.id):
        gvisor().restore(pristine.id, names=[None, None], timeout=0.02)


def test_a_guest_that_can_not_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "usr/bin").mkdir(parents=True)
    script = tmp_path / "usr/bin/python3"
    script.write_text("no program at all")
    script.chmod(0o755)
    with pytest.raises(BackendUnavailable, match=r"no sandbox came to be: .*(exec|ENOEXEC|format)"):
        Sandbox.create(backend="gvisor", image=tmp_path)


def test_without_runsc(monkeypatch: pytest.MonkeyPatch, client: Client) -> None:
    process = client("Sandbox.create(backend='gvisor')", SANDBOX_GYM_RUNSC="/nonexistent/runsc")
    _, err = process.communicate(timeout=30)
    assert "BackendUnavailable: the gvisor backend can't start: SANDBOX_GYM_RUNSC: /nonexistent/runsc" in err
    assert "unset SANDBOX_GYM_RUNSC" in err


def test_as_an_ordinary_user(client: Client) -> None:
    code = "os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)\n"
    process = client(
        "from sandbox_gym.backends.gvisor import client\n" + code + "Sandbox.create(backend='gvisor')",
        HOME="/nonexistent",
    )
    _, err = process.communicate(timeout=30)
    assert "BackendUnavailable: the gvisor backend can't start: runsc restores sandboxes for root only" in err
    assert lookup.get("gvisor").alive()
