"""What a job's maps give: order, laziness, errors, caps; on a real cluster of two nodes with four CPUs each."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import ray
from ray._private.state import actors

from sandbox_gym.backends.shared import registry
from sandbox_gym.errors import BackendUnavailable, ItemFailed, LimitExceeded
from sandbox_gym.ray import job
from sandbox_gym.sandbox import Sandbox

pytestmark = pytest.mark.usefixtures("cluster")
PATIENCE = 40.0  # seconds


def until(condition: Callable[[], Any], patience: float = PATIENCE) -> None:
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def nothing_runs() -> bool:
    """No worker is alive, and no process of this cluster's, alive or dead, has a sandbox."""
    idle = all(actor["State"] == "DEAD" for actor in actors().values() if actor["ActorClassName"] == "Worker")
    owners = {row["owner_pid"] for row in registry.list_all()} - {os.getpid()}
    return idle and all(registry.start_time(pid) and os.getpid() not in ancestors(pid) for pid in owners)


def ancestors(pid: int) -> set[int]:
    found: set[int] = set()
    while pid > 1:
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            break
        found.add(pid)
    return found


@pytest.fixture(autouse=True)
def _all_is_freed() -> Iterator[None]:
    yield
    until(nothing_runs)


# ---- order ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["map", "map_unordered"])
def test_order(way: str, tmp_path: Path) -> None:
    """Item 0 ends last: once another has ended, or once the result of another was taken."""

    @job(cpus=4)
    def play(number: int) -> int:
        if number == 0:
            until((tmp_path / awaited).exists)
        (tmp_path / str(number)).touch()
        return number

    awaited = {"map": "1", "map_unordered": "taken"}[way]
    results = getattr(play, way)(range(3))
    first = next(results)
    (tmp_path / "taken").touch()
    rest = list(results)
    assert (first == 0) == (way == "map")
    assert sorted([first, *rest]) == [0, 1, 2]
    assert way == "map_unordered" or rest == [1, 2]


def test_starmap_a_progress_bar_and_a_call_here(capsys: pytest.CaptureFixture[str]) -> None:
    @job(cpus=4)
    def power(base: int, exponent: int) -> tuple[int, int]:
        return base**exponent, os.getpid()

    results = list(power.starmap([(2, 3), (3, 2), (5, 1)], progress=True))
    assert re.search(r"power: 100%.* 3/3 ", capsys.readouterr().err)
    assert [value for value, _ in results] == [8, 9, 5]
    assert os.getpid() not in {pid for _, pid in results}
    assert power(2, exponent=3) == (8, os.getpid())
    assert list(power.starmap([])) == []
    assert power.__name__ == "power"


def test_inputs_are_drawn_as_results_are_taken(capsys: pytest.CaptureFixture[str]) -> None:
    drawn = 0

    def endless() -> Iterator[int]:
        nonlocal drawn
        for number in itertools.count():
            drawn += 1
            yield number

    @job(cpus=4)
    def double(number: int) -> int:
        return 2 * number

    results = double.map(endless(), window=5)
    assert drawn == 0
    for taken in range(20):
        assert next(results) == 2 * taken
        assert taken < drawn <= taken + 5
    results.close()  # type: ignore[attr-defined]
    assert next(results, "over") == "over"
    assert "double" not in capsys.readouterr().err  # which is no terminal


# ---- failures ------------------------------------------------------------------------------------------------------


class Odd(Exception):
    """Can't be unpickled."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__("odd")


def test_what_an_item_raises(tmp_path: Path) -> None:
    @job(cpus=4, retries=1)
    def fragile(what: str) -> str:
        with (tmp_path / what).open("a") as log:
            log.write("tried\n")
        if what == "odd":
            raise Odd(1, 2)
        if what == "exit":
            raise SystemExit(3)
        return {"good": "fine"}[what]

    items = ["good", "bad", "odd", "exit", "good"]
    results = list(fragile.map(items, return_exceptions=True))
    assert [results[0], results[4]] == ["fine", "fine"]
    bad, odd, ended = results[1:4]
    assert isinstance(bad, ItemFailed) and (bad.index, bad.item, bad.attempts) == (1, "bad", 2)
    assert isinstance(bad.cause, KeyError) and bad.cause.args == ("bad",)
    assert str(bad) == "item 1, 'bad', failed 2 times, at last with KeyError: 'bad'"
    shown = "".join(traceback.format_exception(bad))
    assert re.search(r'test_jobs\.py", line \d+, in fragile\n +return \{"good": "fine"\}\[what\]', shown)
    assert isinstance(ended.cause, SystemExit)
    assert "Odd: odd" in str(odd) and "in fragile" in "".join(traceback.format_exception(odd))
    assert [(tmp_path / what).read_text().count("tried") for what in ("bad", "odd", "exit")] == [2, 2, 2]

    over = fragile.map(items)
    assert next(over) == "fine"
    with pytest.raises(ItemFailed, match="item 1, 'bad'") as caught:
        next(over)
    assert isinstance(caught.value.__cause__, KeyError)


def test_an_error_of_a_class_that_only_this_process_has() -> None:
    """As those of a script are."""

    class Mine(Exception):
        pass

    @job(cpus=4, retries=0)
    def raises(number: int) -> int:
        raise Mine(number)

    with pytest.raises(ItemFailed, match="Mine: 1") as caught:
        list(raises.map([1]))
    assert type(caught.value.cause) is Mine and caught.value.cause.args == (1,)


def test_what_the_inputs_raise() -> None:
    def inputs() -> Iterator[int]:
        yield 1
        raise OSError("no more")

    @job(cpus=4)
    def same(number: int) -> int:
        return number

    with pytest.raises(OSError, match="no more"):
        list(same.map(inputs()))


def test_a_function_that_no_worker_can_load() -> None:
    class Heavy:
        def __reduce__(self) -> Any:
            return int, ("not here",)

    heavy = Heavy()

    @job(resources={"second": 1})
    def use(number: int) -> Any:
        return heavy, number

    with pytest.raises(
        BackendUnavailable, match=r"no worker of this job can start: ValueError: .*'not here'"
    ):
        list(use.map([1]))


def test_what_the_cluster_can_never_give() -> None:
    def same(number: int) -> int:
        return number

    for wish, told in (
        ({"gpus": 1}, "1 GPUs: they have 4 CPUs, .* 0 GPUs"),
        ({"cpus": 5}, "needs 5 CPUs"),
        ({"memory": "100Ti"}, "1.02e+05 GiB of memory".replace("+", r"\+")),
        ({"resources": {"unheard": 1}}, "1 unheard"),
    ):
        with pytest.raises(BackendUnavailable, match=told):
            job(**wish)(same).map([1])
    for wrong in (
        {"cpus": 0},
        {"retries": -1},
        {"timeout": 0},
        {"sandboxes_per_node": 0},
        {"memory": "much"},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong)) if "memory" not in wrong else "much"):
            job(**wrong)


# ---- sandboxes -----------------------------------------------------------------------------------------------------


def test_the_cap_of_a_node() -> None:
    @job(cpus=1, sandboxes_per_node=2, retries=0)
    def several(count: int) -> tuple[str, int]:
        with contextlib.ExitStack() as stack:
            for _ in range(count):
                stack.enter_context(Sandbox.create())
            return ray.get_runtime_context().get_node_id(), os.getpid()

    results = list(several.map([1] * 16 + [2], return_exceptions=True))
    workers = set(results[:-1])
    nodes = [node for node, _ in workers]
    assert len(set(nodes)) == 2
    assert all(nodes.count(node) <= 2 for node in nodes)  # each may have one sandbox
    assert isinstance(results[-1].cause, LimitExceeded)
    assert "would pass the cap of 1: sandboxes_per_node=2 is shared by up to 2 workers" in str(results[-1])


def test_what_an_item_leaves_open_is_ended() -> None:
    @job(resources={"second": 1})
    def leave(number: int) -> tuple[int, list[str], list[str], int]:
        mine = [row["id"] for row in registry.list_all() if row["owner_pid"] == os.getpid()]
        left = [Sandbox.create(), Sandbox.create()]
        left[0].exec(["sleep", "1000"], timeout=1) if number == 1 else None
        kept.append(left)
        return len(left), [box.id for box in Sandbox.list()], mine, os.getpid()

    kept: list[Any] = []
    results = list(leave.map(range(3)))
    assert [len(made) for _, made, _, _ in results] == [2, 2, 2]
    assert len({id for _, made, _, _ in results for id in made}) == 6
    assert [before for _, _, before, _ in results] == [[], [], []]
    assert len({pid for *_, pid in results}) == 1


def test_a_supervisor_that_is_killed_is_replaced() -> None:
    @job(resources={"second": 1})
    def play(number: int) -> tuple[str | None, int]:
        with Sandbox.restore(snapshot) as box:
            value = box.run_code("x").value
            if number == 1:
                box._backend._process.kill()  # type: ignore[attr-defined]
            return value, os.getpid()

    with Sandbox.create() as box:
        box.run_code("x = 7")
        snapshot = box.snapshot()
    results = list(play.map(range(4)))
    assert [value for value, _ in results] == ["7"] * 4
    assert len({pid for _, pid in results}) == 2


def test_a_thousand_items_with_a_sandbox_each(cluster: Any) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    @job(cpus=2)
    def play(number: int) -> tuple[str | None, int, int]:
        with Sandbox.restore(snapshot) as copy:
            return copy.run_code(f"x + {number}").value, os.getpid(), resident()

    with Sandbox.create() as box:
        box.run_code("x = 1000")
        snapshot = box.snapshot()
    here: list[int] = []
    workers: dict[int, list[int]] = {}
    for number, (value, pid, size) in enumerate(play.map(range(1000))):
        assert value == str(1000 + number)
        workers.setdefault(pid, []).append(size)
        here.append(resident())
    for sizes in (here, *workers.values()):
        tenth = len(sizes) // 10
        assert median(sizes[-tenth:]) - median(sizes[tenth : 2 * tenth]) < 10e6, sizes[:: tenth or 1]
