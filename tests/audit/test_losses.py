"""Nothing is lost from the audit log: not at the end, nor to other processes or a slow disk; and little to a kill."""

from __future__ import annotations

import os
import signal
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from sandbox_gym import _audit
from sandbox_gym.audit import read
from sandbox_gym.errors import SandboxError
from sandbox_gym.sandbox import Sandbox
from tests.audit.test_audit import Client, events

CALLS = """
import time
with Sandbox.create(name=sys.argv[1] if sys.argv[1:] else None) as box:
    for number in range({calls}):
        box.run_code(f"{{number}}")
        print(number, time.time(), flush=True)
    {then}
"""


def test_a_client_that_ends_by_itself_loses_nothing(client: Client, tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    _, errors = client(CALLS.format(calls=300, then=""), SANDBOX_GYM_AUDIT=str(path)).communicate(timeout=60)
    assert errors == ""
    assert [event.text for event in read(path) if event.kind == "code"] == [str(n) for n in range(300)]


def test_a_client_that_is_killed_loses_the_last_moment_at_most(client: Client, tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    process = client(CALLS.format(calls=400, then="box.shell('sleep 600')"), SANDBOX_GYM_AUDIT=str(path))
    assert process.stdout is not None
    for _ in range(400):
        process.stdout.readline()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:  # until the command that is under way is there
        if path.exists() and any(event.kind == "shell" for event in read(path)):
            break
    os.kill(process.pid, signal.SIGKILL)
    process.wait(10)
    found = list(read(path))
    assert [event.text for event in found if event.kind == "code"] == [str(n) for n in range(400)]
    assert all(event.result is not None for event in found if event.kind == "code")
    assert (found[-1].text, found[-1].result, found[-1].duration) == ("sleep 600", None, None)


def test_a_kill_in_the_middle_of_calls_loses_a_bounded_time(client: Client, tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    process = client(CALLS.format(calls=10**6, then=""), SANDBOX_GYM_AUDIT=str(path))
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(1500)]
    os.kill(process.pid, signal.SIGKILL)
    killed = time.time()
    lines += process.stdout.readlines()
    process.wait(10)
    found = {event.text for event in read(path) if event.kind == "code"}
    missing = [float(line.split()[1]) for line in lines if line.split()[0] not in found]
    assert len(found) > 100 and all(
        moment > killed - 2.0 for moment in missing
    )  # 0.1 s, on a machine at rest


def test_processes_share_a_file(client: Client, tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    processes = [client(CALLS.format(calls=50, then=""), SANDBOX_GYM_AUDIT=str(path)) for _ in range(4)]
    for process in processes:
        _, errors = process.communicate(timeout=100)
        assert errors == ""
    found = [event for event in read(path) if event.kind == "code"]
    assert len({event.client for event in found}) == 4
    for name in {event.sandbox for event in found}:
        assert [event.text for event in found if event.sandbox == name] == [str(n) for n in range(50)]
    database = sqlite3.connect(path)
    assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    database.close()


def test_a_forked_child_has_a_log_of_its_own(client: Client, tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    code = """
from sandbox_gym import _audit
from sandbox_gym.backends import lookup
box = Sandbox.create()
box.run_code("'parent'")
child = os.fork()
if child == 0:
    with Sandbox.create() as own:
        own.run_code("'child'")
    lookup.shut_down()
    _audit._log.flush()
    os._exit(0)
print(os.waitpid(child, 0)[1])
box.run_code("'parent again'")
box.terminate()
"""
    out, errors = client(code, SANDBOX_GYM_AUDIT=str(path)).communicate(timeout=60)
    assert out == "0\n", errors
    found = [(event.text, event.client) for event in read(path) if event.kind == "code"]
    assert [text for text, _ in found] == ["'parent'", "'child'", "'parent again'"]
    assert found[0][1] == found[2][1] != found[1][1]


def _delete(log: Path) -> None:
    log.unlink()


def _move(log: Path) -> None:
    log.rename(log.with_name("moved.db"))


def _replace(log: Path) -> None:
    _move(log)
    log.touch()


@pytest.mark.parametrize("take", [_delete, _move, _replace])
def test_a_file_that_is_taken_away_is_missed(log: Path, box: Sandbox, take: Callable[[Path], None]) -> None:
    box.run_code("1")
    events(log)
    take(log)
    box.run_code("2")
    assert _audit._log is not None
    with pytest.raises(SandboxError, match="deleted or moved away"):
        _audit._log.flush()
    with pytest.raises(SandboxError, match=r"begin a new one \(set_audit\(path\)\), or do without it"):
        box.run_code("3")
    if take is not _delete:
        moved = log.with_name("moved.db")
        assert [event.text for event in read(moved) if event.kind == "code"] == ["1", "2"]
    _audit.set_audit(log)
    box.run_code("4")
    assert [event.text for event in events(log)] == ["4"]


def test_who_stops_a_log_that_was_lost_is_told(log: Path, box: Sandbox) -> None:
    box.run_code("1")
    log.unlink()
    with pytest.raises(SandboxError, match="deleted or moved away"):
        _audit.set_audit(None)
    box.run_code("2")


def test_threads_that_are_faster_than_the_disk_wait(log: Path, boxes: Callable[[int], list[Sandbox]]) -> None:
    def work(box: Sandbox) -> None:
        for number in range(200):
            box.run_code(str(number))

    made = boxes(4)
    threads = [threading.Thread(target=work, args=(box,)) for box in made]
    assert _audit._log is not None
    _audit._log.flush()
    queue = _audit._log._queue
    with closing(sqlite3.connect(log, isolation_level=None)) as holder:
        holder.execute("BEGIN IMMEDIATE")  # nobody else can write
        deadline = time.monotonic() + 20
        made[0].shell("true")
        while (
            queue and time.monotonic() < deadline
        ):  # until the log's thread has taken it, and waits for the file
            time.sleep(0.001)
        for thread in threads:
            thread.start()
        while len(queue) < 512 and time.monotonic() < deadline:
            time.sleep(0.005)
        waiting = len(queue), [thread.is_alive() for thread in threads]
    for thread in threads:
        thread.join(60)
    assert 512 <= waiting[0] < 512 + 8 and all(waiting[1])
    for box in made:
        texts = [event.text for event in events(log, sandbox=box.id) if event.kind == "code"]
        assert texts == [str(number) for number in range(200)]
