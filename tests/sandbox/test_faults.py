"""kill -9 of every process there is: nothing stays, callers hear the sandbox's name, and work goes on."""

# ruff: noqa: E501, PT012  (programs for the guest are text)
from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sandbox_gym.errors import SandboxDied, SandboxError, SnapshotError
from sandbox_gym.sandbox import Sandbox

Client = Callable[..., "subprocess.Popen[str]"]

_BUSY = """
import json
from sandbox_gym.backends import lookup
box = Sandbox.create("victim")
box.run_code("x = 1")
box.shell("sleep 600 & setsid sleep 601 &")
copies = Sandbox.create("other").fork(2)
copies[0].snapshot()
backend = lookup.get("native")
print(json.dumps({"folder": str(backend._folder), "janitor": backend._process.pid}), flush=True)
"""


def start(client: Client, after: str = "input()") -> tuple[subprocess.Popen[str], dict[str, Any]]:
    """A client with sandboxes, copies, a snapshot and background processes, at a standstill."""
    process = client(_BUSY + after)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.communicate()[1]
    facts = json.loads(line)
    facts["supervisor"] = supervisor_of(facts["janitor"])
    return process, facts


def supervisor_of(janitor: int) -> int:
    """The janitor's child that is process 1 of a namespace."""
    for child in Path(f"/proc/{janitor}/task/{janitor}/children").read_text().split():
        status = Path(f"/proc/{child}/status").read_text()
        if status.split("NSpid:")[1].splitlines()[0].split()[1:] == ["1"]:
            return int(child)
    raise AssertionError("no supervisor")


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_client_is_killed(client: Client, traces_of: Callable[..., Any], sign: signal.Signals) -> None:
    process, facts = start(client)
    traces = traces_of(process.pid, Path(facts["folder"]))
    assert traces.left()
    process.send_signal(sign)
    process.wait(5)
    traces.assert_gone()


def test_the_client_ends_by_itself_without_cleaning_up(client: Client, traces_of: Callable[..., Any]) -> None:
    process, facts = start(client, "input(); os._exit(0)")
    traces = traces_of(process.pid, Path(facts["folder"]))
    process.communicate("\n", timeout=10)
    traces.assert_gone()


def test_a_forked_child_of_the_client_keeps_nothing_alive(
    client: Client, traces_of: Callable[..., Any]
) -> None:
    process, facts = start(
        client,
        "import time\nif os.fork() == 0: time.sleep(8); os._exit(0)\nprint('forked', flush=True); input()",
    )
    assert process.stdout is not None and process.stdout.readline() == "forked\n"
    traces = traces_of(process.pid, Path(facts["folder"]))
    child = next(
        int(pid)
        for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        if int(pid) != facts["janitor"]
    )
    traces.processes.pop(child)
    process.kill()
    process.wait()
    traces.assert_gone()
    os.kill(child, signal.SIGKILL)


_GOES_ON = """
from sandbox_gym.errors import SandboxDied
input()
for call in (lambda: box.run_code("x"), lambda: box.shell("true"), box.snapshot, lambda: copies[1].read_file("/etc/passwd")):
    try:
        call()
        print("no error")
    except SandboxDied as error:
        name = copies[1].name if "read_file" in call.__code__.co_names else "victim"
        assert name in str(error), error
assert box.status == "dead"
box.terminate()
copies[0].terminate()
new = Sandbox.create("victim")
assert new.run_code("6 * 7").value == "42"
assert new.fork(1)[0].run_code("1").ok
print("good", flush=True)
input()
"""


@pytest.mark.parametrize(
    "who", [["supervisor"], ["janitor"], ["janitor", "supervisor"], ["supervisor", "janitor"]]
)
def test_the_supervisor_or_its_janitor_is_killed(
    client: Client, traces_of: Callable[..., Any], who: list[str]
) -> None:
    process, facts = start(client, _GOES_ON)
    traces = traces_of(process.pid, Path(facts["folder"]))
    for name in who:
        os.kill(facts[name], signal.SIGKILL)
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and [
        left for left in traces.left() if left != f"process {facts['janitor']}"
    ]:
        time.sleep(0.02)
    assert [left for left in traces.left() if left != f"process {facts['janitor']}"] == []
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    line = process.stdout.readline()
    assert line == "good\n", process.communicate("\n", timeout=10)[1]
    process.communicate("\n", timeout=20)
    assert process.returncode == 0


def test_what_makes_network_namespaces_is_killed(client: Client) -> None:
    code = """
print("ready", flush=True); input()
made = [Sandbox.create() for _ in range(3)] + copies[0].fork(20)  # more than are made ahead
print(sum(one.run_code("1").ok for one in made))
"""
    process, facts = start(client, code)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    spaces = f"/proc/{facts['supervisor']}/ns/pid"
    for child in Path(f"/proc/{facts['supervisor']}/task/{facts['supervisor']}/children").read_text().split():
        if os.readlink(f"/proc/{child}/ns/pid") == os.readlink(spaces):  # no guest
            os.kill(int(child), signal.SIGKILL)
    out, err = process.communicate("\n", timeout=60)
    assert out == "23\n", err


def test_a_call_under_way_hears_that_the_supervisor_is_gone(client: Client) -> None:
    code = """
try:
    box.run_code("import time; time.sleep(60)", timeout=50)
except Exception as error:
    print(type(error).__name__, "victim" in str(error))
"""
    process, facts = start(client, code)
    os.kill(facts["supervisor"], signal.SIGKILL)
    out, err = process.communicate(timeout=10)
    assert out.strip() == "SandboxDied True", err


# ---- guests ---------------------------------------------------------------------------------------------------------


def host_pid(run_folder: Path, node_id: str, box: Sandbox) -> int:
    """The process of a sandbox or snapshot, as this test's namespace numbers it."""
    inner = next(row["pid"] for row in box._backend.list() if row["id"] == node_id)
    janitor = box._backend._process.pid  # type: ignore[attr-defined]
    supervisor = supervisor_of(janitor)
    space = os.readlink(f"/proc/{supervisor}/ns/pid")
    level = len(Path(f"/proc/{supervisor}/status").read_text().split("NSpid:")[1].splitlines()[0].split()) - 1
    waiting = [supervisor]
    while waiting:
        pid = waiting.pop()
        numbers = Path(f"/proc/{pid}/status").read_text().split("NSpid:")[1].splitlines()[0].split()
        if len(numbers) > level and numbers[level] == str(inner):
            return pid
        waiting += [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    raise AssertionError(f"no process {inner} in {space}")


def test_a_guest_is_killed(boxes: Callable[[int], list[Sandbox]], run_folder: Path) -> None:
    one, other = boxes(2)
    os.kill(host_pid(run_folder, one.id, one), signal.SIGKILL)
    with pytest.raises(SandboxDied, match=one.name):
        one.run_code("1")
    with pytest.raises(SandboxDied, match=one.name):
        one.snapshot()
    with other.fork(1)[0] as copy:
        assert other.run_code("1").ok and copy.run_code("1").ok


def test_a_guest_is_killed_in_the_middle_of_a_call(box: Sandbox, run_folder: Path) -> None:
    pid = host_pid(run_folder, box.id, box)
    threading.Timer(0.2, os.kill, (pid, signal.SIGKILL)).start()
    started = time.monotonic()
    with pytest.raises(SandboxDied, match=box.name):
        box.shell("sleep 30")
    assert time.monotonic() - started < 3


def test_a_guest_is_killed_while_it_is_to_be_snapshotted(box: Sandbox, run_folder: Path) -> None:
    pid = host_pid(run_folder, box.id, box)
    os.kill(pid, signal.SIGSTOP)
    threading.Timer(0.2, os.kill, (pid, signal.SIGKILL)).start()
    started = time.monotonic()
    with pytest.raises(SandboxError, match=box.name):
        box.snapshot()
    assert time.monotonic() - started < 5
    with pytest.raises(SandboxDied, match=box.name):
        box.run_code("1")


def test_a_snapshot_s_process_is_killed(box: Sandbox, run_folder: Path) -> None:
    with Sandbox.create() as stranger:
        box.run_code("x = 1")
        with Sandbox.restore(box.parent or box.snapshot()) as source:
            snapshot = source.freeze()
            copy = Sandbox.restore(snapshot)
            os.kill(host_pid(run_folder, snapshot.id, box), signal.SIGKILL)
            with pytest.raises(SandboxDied, match=copy.name):  # its namespace lay inside the snapshot's
                while True:
                    copy.run_code("1")
            with pytest.raises(SnapshotError, match=snapshot.id):
                Sandbox.restore(snapshot)
            with pytest.raises(SnapshotError, match=snapshot.id):
                stranger.rewind(snapshot)
            snapshot.delete()
        assert box.run_code("x").value == "1" and stranger.run_code("1").ok


def test_a_stopped_guest_times_out_and_is_killed(box: Sandbox, run_folder: Path) -> None:
    os.kill(host_pid(run_folder, box.id, box), signal.SIGSTOP)
    started = time.monotonic()
    result = box.run_code("1", timeout=0.3)
    assert result.timed_out and time.monotonic() - started < 4 and box.status == "dead"
