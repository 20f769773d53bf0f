"""Snapshots: restored any number of times, sealed from each other, counted, and gone when nothing needs them.

Every engine passes the same tests. The sandbox decides which it is: with a process in the background it is criu's.
"""

# ruff: noqa: PT012  (until it raises)
from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sandbox_gym.errors import SandboxDied, SandboxError, SnapshotError
from sandbox_gym.sandbox import Sandbox, Snapshot

_FORK_ONLY = {"test_too_deep_is_a_clear_error_that_harms_nothing": "criu's copies don't nest"}


@pytest.fixture(params=["fork", "criu"])
def engine(request: pytest.FixtureRequest) -> str:
    if request.param == "criu" and request.node.originalname in _FORK_ONLY:
        pytest.skip(_FORK_ONLY[request.node.originalname])
    return str(request.param)


@pytest.fixture
def box(box: Sandbox, engine: str) -> Sandbox:
    """What fork can take, or what only criu can."""
    if engine == "criu":
        box.shell("tail -f /dev/null >/dev/null 2>&1 &")
    return box


def test_a_copy_goes_on_from_memory_and_disk(box: Sandbox, engine: str) -> None:
    box.run_code("state = [1]\nopen('f', 'w').write('disk')")
    snapshot = box.snapshot("first")
    box.run_code("state.append(2)\nopen('f', 'a').write('+')")
    with Sandbox.restore(snapshot) as copy:
        assert copy.run_code("state, open('f').read()").value == "([1], 'disk')"
        copy.run_code("state.append(3)\nopen('f', 'a').write('-')")
        with Sandbox.restore(snapshot) as other:
            assert other.run_code("state, open('f').read()").value == "([1], 'disk')"
    assert box.run_code("state, open('f').read()").value == "([1, 2], 'disk+')"
    assert (snapshot.engine, snapshot.label, snapshot.deleted) == (engine, "first", False)
    assert snapshot.why and snapshot.disk_bytes >= 4 and snapshot.memory_bytes >= 0
    assert box.parent is snapshot and copy.parent is snapshot
    snapshot.delete()


def test_files_that_are_deleted_or_replaced_in_a_copy(box: Sandbox) -> None:
    box.shell("mkdir d; echo 1 > d/a; echo 2 > d/b; ln -s a d/l; chmod 700 d")
    (copy,) = box.fork(1)
    with copy:
        copy.shell("rm d/a; echo new > d/b; mv d e; mkdir d; rm -r /usr/share/doc; echo x > /etc/passwd")
        assert (
            copy.shell("cat e/b; ls d e; test -e /usr/share/doc; echo $?").stdout
            == "new\nd:\n\ne:\nb\nl\n1\n"
        )
        (deeper,) = copy.fork(1)
        with deeper:
            assert (
                deeper.shell("ls e; test -e /usr/share/doc; echo $?; cat /etc/passwd").stdout
                == "b\nl\n1\nx\n"
            )
    assert box.shell("cat d/a d/b; stat -c %a d; test -e /usr/share/doc; echo $?").stdout == "1\n2\n700\n0\n"
    assert "root" in box.read_text("/etc/passwd")


def test_freeze_turns_the_sandbox_into_the_snapshot(box: Sandbox) -> None:
    box.run_code("x = 1")
    snapshot = box.freeze()
    assert box.status == "terminated" and box not in Sandbox.list()
    with pytest.raises(SandboxDied, match=box.name):
        box.run_code("x")
    with Sandbox.restore(snapshot) as copy:
        assert copy.run_code("x").value == "1"
    snapshot.delete()


def test_fork_names_and_siblings(box: Sandbox) -> None:
    box.run_code("x = 0")
    copies = box.fork(3, prefix="ep-")
    assert [copy.name for copy in copies] == ["ep-1", "ep-2", "ep-3"]
    for i, copy in enumerate(copies):
        copy.run_code(f"x += {i}")
    assert [copy.run_code("x").value for copy in copies] == ["0", "1", "2"]
    with pytest.raises(SandboxError, match="ep-1"):
        box.fork(3, prefix="ep-")
    assert len(Sandbox.list()) == 4
    for copy in copies:
        copy.terminate()
    with pytest.raises(ValueError, match="at least one"):
        box.fork(0)


def test_fork_more_than_one_message_carries(box: Sandbox) -> None:
    copies = box.fork(70)
    assert {copy.run_code("1").value for copy in copies} == {"1"}
    for copy in copies:
        copy.terminate()


def test_a_deleted_snapshot_whose_copies_live(box: Sandbox) -> None:
    box.run_code("x = 'kept'")
    snapshot = box.snapshot()
    copy = Sandbox.restore(snapshot)
    snapshot.delete()
    snapshot.delete()
    assert snapshot.deleted and snapshot not in Snapshot.list()
    with pytest.raises(SnapshotError, match="deleted"):
        Sandbox.restore(snapshot)
    with copy:
        assert copy.run_code("x").value == "'kept'"
        (child,) = copy.fork(1)
    with child:
        assert child.run_code("x").value == "'kept'"
    assert box.run_code("x").value == "'kept'"


def test_a_snapshot_outlives_its_source(box: Sandbox) -> None:
    box.run_code("x = 1")
    snapshot = box.snapshot()
    box.terminate()
    with Sandbox.restore(snapshot) as copy:
        assert copy.run_code("x").value == "1"
    snapshot.delete()


def test_the_last_handle_s_garbage_releases_it(box: Sandbox) -> None:
    before = len(box._backend.list())
    for _ in range(5):
        box.snapshot()
    box.parent = None
    gc.collect()
    deadline = time.monotonic() + 3
    box._backend.usage(box.id)
    while time.monotonic() < deadline and len(box._backend.list()) > before + 5:
        box._backend.usage(box.id)
    states = [row["state"] for row in box._backend.list()]
    assert states.count("snapshot") <= before + 5


def test_parents_and_the_list(box: Sandbox, engine: str) -> None:
    first = box.snapshot("a")
    second = box.snapshot("b")
    assert second.parent is first and second.parent_id == first.id
    listed = Snapshot.list()
    assert listed.index(first) < listed.index(second)
    assert "b" in repr(second) and engine in repr(second)
    second.delete()
    first.delete()
    assert first not in Snapshot.list()


# ---- checkpoints ----------------------------------------------------------------------------------------------------


def test_checkpoint_and_rewind(box: Sandbox) -> None:
    identity = box.id, box.name
    box.run_code("x = 1")
    box.checkpoint("one")
    box.run_code("x = 2; open('f', 'w').write('2')")
    box.checkpoint("two")
    box.run_code("x = 3; import os; os.remove('f')")
    box.rewind()
    assert box.run_code("x, open('f').read()").value == "(2, '2')"
    box.rewind("one")
    assert box.run_code("import os; x, os.path.exists('f')").value == "(1, False)"
    box.rewind("two")
    assert box.run_code("x").value == "2"
    assert (box.id, box.name) == identity and Sandbox.get(box.id) is box
    with pytest.raises(KeyError, match="three"):
        box.rewind("three")


@pytest.mark.parametrize(
    "killer",
    [
        "import os; os._exit(1)",
        "x = bytearray(4 << 30)",
        "import signal; signal.signal(2, signal.SIG_IGN)\nwhile True: pass",
    ],
)
def test_rewind_after_death(box: Sandbox, killer: str) -> None:
    box.run_code("x = 1")
    box.checkpoint()
    try:
        box.run_code(killer, timeout=1.0)
    except SandboxError:
        pass
    assert box.status == "dead"
    box.rewind()
    assert box.status == "running" and box.run_code("x").value == "1"
    assert box in Sandbox.list()
    row = next(row for row in box._backend.list() if row["id"] == box.id)
    assert row["name"] == box.name


def test_rewind_ends_what_ran_in_between(box: Sandbox) -> None:
    box.checkpoint()
    box.shell("sleep 60 &")
    box.rewind()
    assert "sleep" not in box.shell("cat /proc/[0-9]*/comm").stdout
    box.terminate()
    with pytest.raises((SandboxDied, KeyError)):
        box.rewind()


def test_rewind_to_a_snapshot_of_another(boxes: Callable[[int], list[Sandbox]]) -> None:
    one, other = boxes(2)
    one.run_code("x = 'one'")
    snapshot = one.snapshot()
    other.rewind(snapshot)
    assert other.run_code("x").value == "'one'"
    snapshot.delete()
    with pytest.raises(SnapshotError, match="deleted"):
        other.rewind(snapshot)
    assert other.run_code("x").value == "'one'"


# ---- depth and breadth ----------------------------------------------------------------------------------------------


def test_a_chain_of_25_snapshots(box: Sandbox) -> None:
    box.run_code("trail = []")
    chain = []
    for i in range(25):
        box.run_code(f"trail.append({i})\nopen('f{i}', 'w').write('{i}')")
        chain.append(box.snapshot(str(i)))
    for i in (0, 12, 24):
        with Sandbox.restore(chain[i]) as copy:
            assert copy.run_code(
                "len(trail), len([f for f in __import__('os').listdir() if f[0] == 'f'])"
            ).value == str((i + 1, i + 1))
    assert box.run_code("trail == list(range(25))").value == "True"
    for snapshot in chain[::2] + chain[1::2]:
        snapshot.delete()
    assert box.run_code("open('f0').read()").value == "'0'"


def test_too_deep_is_a_clear_error_that_harms_nothing(box: Sandbox) -> None:
    chain = []
    with pytest.raises(SnapshotError, match=r"deep") as caught:
        for _ in range(40):
            chain.append(box.snapshot(engine="fork"))
    assert box.name in str(caught.value)
    assert 25 <= len(chain) < 40
    assert box.run_code("1 + 1").value == "2" and box.shell("true").ok
    with Sandbox.restore(chain[-2]) as copy:
        assert copy.run_code("1").value == "1"
    for snapshot in chain:
        snapshot.delete()


def test_25_restores_at_once(box: Sandbox) -> None:
    box.run_code("import os; token = os.urandom(8).hex()")
    token = box.run_code("token").value
    snapshot = box.snapshot()
    copies: list[Sandbox] = []
    failures: list[BaseException] = []

    def restore() -> None:
        try:
            copy = Sandbox.restore(snapshot)
            copies.append(copy)
            assert copy.run_code("token").value == token
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=restore) for _ in range(25)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and len({copy.id for copy in copies}) == 25
    for copy in copies:
        copy.terminate()
    snapshot.delete()


# ---- random numbers -------------------------------------------------------------------------------------------------


def test_random_state_same_diverging_or_by_number(box: Sandbox) -> None:
    box.run_code("import random; random.seed(1); random.random()")
    draw = "random.random()"

    def draws(rng: object) -> list[str | None]:
        copies = box.fork(3, rng=rng)  # type: ignore[arg-type]
        values = [copy.run_code(draw).value for copy in copies]
        for copy in copies:
            copy.terminate()
        return values

    same = draws("same")
    assert len(set(same)) == 1 and draws("same") == same
    assert len(set(draws("diverge") + draws("diverge") + same)) == 7
    seeded = draws(7)
    assert len(set(seeded)) == 3 and draws(7) == seeded and draws(8) != seeded
    assert box.run_code(draw).value == same[0]
    with pytest.raises(ValueError, match="diverge"):
        draws("other")


def test_files_of_different_moments_are_different_files(box: Sandbox) -> None:
    """Each layer of the disk counts its inodes anew, unless told otherwise: cp(1) would take two files for one."""
    names = [f"file{i}" for i in range(6)]
    for name in names:
        box.shell(f"echo {name} > {name}; for i in $(seq 80); do echo > more-{name}-$i; done")
        box.checkpoint()
    copies = [box, *box.fork(2)]
    for copy in copies:
        copy.shell("echo new > new")
        found = copy.shell("stat -c '%d %i' *; mv file0 file1; cp file2 file3; cat file1 file3")
        *numbers, moved, copied = found.stdout.splitlines()
        assert len(numbers) == len(set(numbers)) == 6 + 480 + 1
        assert (moved, copied) == ("file0", "file2") and not found.stderr
    for copy in copies[1:]:
        copy.terminate()


def test_mounts_come_along(tmp_path: Path, engine: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "data").write_text("shown")
    (tmp_path / "single").write_text("one")
    mounts = [(tmp_path / "folder", "/mnt/folder"), (tmp_path / "single", "/etc/single")]
    current = Sandbox.create(mounts=mounts)
    current.run_code("data = open('/mnt/folder/data')")
    for _ in range(3):
        snapshot = current.snapshot(engine="fork" if engine == "fork" else "criu")
        current.terminate()
        current = Sandbox.restore(snapshot)
        snapshot.delete()
        assert current.run_code("data.seek(0); data.read()").value == "'shown'"
        assert current.shell("cat /mnt/folder/data /etc/single").stdout == "shownone"
        assert not current.shell("touch /mnt/folder/new").ok
    current.terminate()
