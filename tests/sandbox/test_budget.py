"""One budget for all that a process holds: refused by name, or room made by putting snapshots on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

import sandbox_gym
from sandbox_gym.errors import BudgetExceeded, LimitExceeded
from sandbox_gym.sandbox import Sandbox, Snapshot

_FILL = "data = bytearray(range(256)) * (160 << 12); len(data)"  # 160 MiB


@pytest.fixture(autouse=True)
def no_budget() -> Iterator[None]:
    yield
    sandbox_gym.set_budget()


def _leaf(box: Sandbox, mark: int) -> Snapshot:
    """A snapshot that nothing hangs from, of a copy that holds 160 MiB of its own."""
    copy = Sandbox.create(memory="1Gi")
    assert copy.run_code(f"{_FILL}; data[7] = {mark}").ok
    return copy.freeze(label=f"{mark}")


def test_over_the_budget_nothing_more_is_made(box: Sandbox) -> None:
    snapshot = _leaf(box, 1)
    sandbox_gym.set_budget(memory="100Mi")
    makers: list[Callable[[], object]] = [box.snapshot, lambda: box.fork(2), Sandbox.create]
    makers.append(lambda: Sandbox.restore(snapshot))
    for make in makers:
        with pytest.raises(BudgetExceeded, match=r"bytes of memory.*budget is 104857600"):
            make()
    assert box.run_code("1 + 1").value == "2"
    snapshot.delete()
    box.snapshot().delete()


def test_a_disk_budget(box: Sandbox) -> None:
    box.shell("head -c 60M /dev/urandom > data")
    sandbox_gym.set_budget(disk="50Mi")
    with pytest.raises(LimitExceeded, match="bytes of disk"):
        box.snapshot()
    sandbox_gym.set_budget(disk="20Gi")
    box.snapshot().delete()


def test_snapshots_go_to_disk_to_make_room_and_come_back(box: Sandbox) -> None:
    first, second, third = (_leaf(box, mark) for mark in (1, 2, 3))
    with Sandbox.restore(first):  # now the second is the one that was used least lately
        pass
    sandbox_gym.set_budget(memory="450Mi", evict=True)
    with Sandbox.restore(third) as copy:
        assert copy.run_code("data[7]").value == "3"
    assert (first.engine, second.engine, third.engine) == ("fork", "criu", "fork")
    assert "budget" in second.why and second.memory_bytes > 160 << 20
    sandbox_gym.set_budget()
    for mark, snapshot in enumerate((first, second, third), start=1):
        with Sandbox.restore(snapshot) as copy:
            assert copy.run_code("len(data), data[7], data[300]").value == f"({160 << 20}, {mark}, 44)"
        snapshot.delete()


def test_without_leave_to_evict_they_stay(box: Sandbox) -> None:
    snapshot = _leaf(box, 1)
    sandbox_gym.set_budget(memory="100Mi")
    with pytest.raises(BudgetExceeded):
        Sandbox.restore(snapshot)
    assert snapshot.engine == "fork"
    snapshot.delete()


def test_snapshots_that_hang_from_each_other_can_not_be_evicted(box: Sandbox) -> None:
    box.run_code(_FILL)
    first = box.snapshot()
    box.run_code("data = bytearray(range(1, 256)) * (160 << 12)")
    second = box.snapshot()
    sandbox_gym.set_budget(memory="200Mi", evict=True)
    with pytest.raises(BudgetExceeded, match="needed by sandboxes and snapshots that came from it"):
        box.snapshot()
    sandbox_gym.set_budget()
    for snapshot in (first, second):
        assert snapshot.engine == "fork"
        snapshot.delete()
