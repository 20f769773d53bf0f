"""Whatever a guest holds: the right engine takes it, and it goes on in the source and in each copy."""

from __future__ import annotations

import pytest

from sandbox_gym.errors import SnapshotError
from sandbox_gym.sandbox import Sandbox
from tests.kinds.catalogue import KINDS
from tests.kinds.kind import Kind, hold

pytestmark = pytest.mark.usefixtures("nothing_stays")


def check(boxes: list[Sandbox], kind: Kind) -> None:
    for box in boxes:
        result = box.run_code(kind.check)
        assert result.value == "True", (box.name, result)


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if not kind.criu])
def test_what_survives(box: Sandbox, name: str) -> None:
    kind = KINDS[name]
    hold(box, kind)
    snapshot = box.snapshot()
    assert snapshot.engine == ("criu" if kind.fork else "fork"), snapshot.why
    assert not kind.fork or any(words in snapshot.why for words in kind.fork.split("|")), snapshot.why
    copies = Sandbox.restore_many(snapshot, 2)
    try:
        again = copies[0].snapshot(engine="criu")
        copies.append(Sandbox.restore(again))
        again.delete()
        check([*reversed(copies), box], kind)
        assert box.shell("echo on").stdout == "on\n"
    finally:
        snapshot.delete()
        for copy in copies:
            copy.terminate()


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.criu])
def test_what_no_engine_takes(box: Sandbox, name: str) -> None:
    kind = KINDS[name]
    hold(box, kind)
    with pytest.raises(SnapshotError, match=box.name) as caught:
        box.snapshot()
    assert all(words in str(caught.value) for words in kind.criu.split("|")), str(caught.value)
    check([box], kind)
    assert box.status == "running" and box.shell("echo on").stdout == "on\n"


@pytest.mark.parametrize(
    "name", ["nothing", "file", "thread", "alarm", "file of /proc of a dead process", "System V semaphores"]
)
def test_a_sandbox_that_becomes_its_snapshot(box: Sandbox, name: str) -> None:
    """By the same choice: an alarm does not go off meanwhile."""
    kind = KINDS[name]
    hold(box, kind)
    snapshot = box.freeze()
    assert snapshot.engine == ("criu" if kind.fork else "fork"), snapshot.why
    assert box.status == "terminated"
    for _ in range(2):
        with Sandbox.restore(snapshot) as copy:
            check([copy], kind)
    snapshot.delete()


def test_what_neither_engine_refuses_and_guests_may_not_have(box: Sandbox) -> None:
    code = """
import ctypes, errno, mmap
C = ctypes.CDLL(None, use_errno=True)
found = []
for call in (lambda: C.mq_open(b"/q", 0o102, 0o600, None), lambda: C.syscall(425, 8, 0), lambda: C.syscall(323, 0)):
    found.append((call(), errno.errorcode[ctypes.get_errno()]))
area = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for advice in (10, 18):  # MADV_DONTFORK, MADV_WIPEONFORK
    try:
        area.madvise(advice)
    except OSError as error:
        found.append(errno.errorcode[error.errno])
"""
    assert box.run_code(code).ok
    assert box.run_code("found").value == str(
        [(-1, "ENOSYS"), (-1, "EPERM"), (-1, "EPERM"), "EINVAL", "EINVAL"]
    )
