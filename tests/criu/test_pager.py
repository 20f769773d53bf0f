"""A pager ends with its sandbox, or when it is needed no more; killed, it takes its sandbox along."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from sandbox_gym.errors import SandboxDied, SnapshotError
from sandbox_gym.guest.wire import Op
from sandbox_gym.sandbox import Sandbox, Snapshot
from tests.conftest import descendants
from tests.criu.memory import (
    eventually,
    pagers,
    parent,
    run,
    userfaultfds,
)


def test_a_pager_ends_with_its_sandbox(image: Snapshot) -> None:
    before = pagers()
    copies = Sandbox.restore_many(image, 3)
    assert len(pagers() - before) == 6  # each with its keeper
    for copy in copies:
        copy.terminate()
    eventually(lambda: pagers() == before)


def test_a_pager_ends_when_all_has_come(plain: Snapshot) -> None:
    before = pagers()
    with Sandbox.restore(plain) as copy:
        copy.snapshot(engine="criu").delete()
        eventually(lambda: pagers() == before)
        assert run(copy, "wrong(big, 0, range(PAGES))") == "[]"


@pytest.mark.parametrize("waiting", [False, True])
def test_a_sandbox_whose_pager_is_killed_ends_with_that_reason_and_sees_no_wrong_page(
    image: Snapshot, waiting: bool
) -> None:
    before = pagers()
    copy = Sandbox.restore(image)
    pid = next(pid for pid in pagers() - before if parent(pid) not in pagers())  # not the keeper
    if waiting:
        os.kill(pid, signal.SIGSTOP)
        copy._live.channel.post(
            Op.CODE, b'{"code": "wrong(big, 0, range(PAGES))", "timeout": 30}', timeout=30.0
        )
        time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    if waiting:
        with pytest.raises(SandboxDied):
            copy._live.channel.wait(Op.CODE, timeout=30.0)
    with pytest.raises(SandboxDied, match="ended"):
        _touch_at_random(copy)
    copy.terminate()
    eventually(lambda: pagers() == before)


def _touch_at_random(box: Sandbox) -> None:
    for _ in range(1000):
        assert run(box, "wrong(big, 0, [random.randrange(PAGES)])") == "[]"


def test_a_snapshot_fails_when_the_pager_is_killed_meanwhile(image: Snapshot) -> None:
    before = pagers()
    copy = Sandbox.restore(image)
    pid = next(pid for pid in pagers() - before if parent(pid) not in pagers())
    os.kill(pid, signal.SIGSTOP)  # it would be ready before it is killed
    timer = threading.Timer(0.3, os.kill, (pid, signal.SIGKILL))
    timer.start()
    with pytest.raises((SandboxDied, SnapshotError), match="ended"):
        copy.snapshot(engine="criu")
    timer.join()
    copy.terminate()
    eventually(lambda: pagers() == before)


def test_children_that_have_ended_leave_nothing_in_the_pager(image: Snapshot) -> None:
    before = pagers()
    with Sandbox.restore(image) as copy:
        run(
            copy,
            "for _ in range(200):\n    pid = os.fork()\n    if not pid: os._exit(0)\n    os.waitpid(pid, 0)",
        )
        (most,) = {userfaultfds(pid) for pid in pagers() - before}
        assert most <= 4  # those of two processes, and of the child that was last


def test_a_restore_whose_pager_is_killed_fails_at_once(image: Snapshot) -> None:
    before = descendants(os.getpid())
    failures: list[BaseException] = []

    def restore() -> None:
        try:
            with Sandbox.restore(image) as copy:  # it may just have been ready
                run(copy, "wrong(big, 0, range(PAGES))")
        except (SandboxDied, SnapshotError) as error:
            failures.append(error)

    thread = threading.Thread(target=restore)
    started = time.monotonic()
    thread.start()
    found: set[int] = set()
    while not found:
        assert time.monotonic() < started + 5
        made = descendants(os.getpid()) - before
        found = {pid for pid in made if userfaultfds(pid) and parent(pid) not in made}
    os.kill(found.pop(), signal.SIGKILL)
    thread.join(timeout=10)
    assert not thread.is_alive() and "ended" in str(failures[0])
    eventually(lambda: not pagers() & (descendants(os.getpid()) - before))
