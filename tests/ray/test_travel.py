"""Snapshots that jobs take along: to each node once, whole, and gone afterwards."""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import gymnasium
import numpy as np
import pytest
import ray

from sandbox_gym import archive
from sandbox_gym.errors import ItemFailed, SnapshotError
from sandbox_gym.ray import hand, job, jobs, travel
from sandbox_gym.sandbox import Sandbox, Snapshot
from tests.ray.test_jobs import nothing_runs, until

pytestmark = pytest.mark.usefixtures("cluster")


@pytest.fixture(autouse=True)
def _all_is_freed() -> Iterator[None]:
    yield
    until(nothing_runs)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[Snapshot]:
    """The snapshots that became archives, one entry each time."""
    found: list[Snapshot] = []
    write = archive.write

    def counted(snapshot: Snapshot, file: BinaryIO, timeout: float) -> None:
        found.append(snapshot)
        write(snapshot, file, timeout)

    monkeypatch.setattr(archive, "write", counted)
    return found


@pytest.fixture
def packings(monkeypatch: pytest.MonkeyPatch) -> list[travel.Packing]:
    """What maps pack into."""
    found: list[travel.Packing] = []

    def made() -> travel.Packing:
        found.append(travel.Packing())
        return found[-1]

    monkeypatch.setattr(jobs, "Packing", made)
    return found


@pytest.fixture
def snapshot() -> Iterator[Snapshot]:
    with Sandbox.create() as box:
        box.run_code("import random; random.seed(3); state = [1, 2]; open('kept', 'w').write('disk')")
        taken = box.snapshot("decision")
    yield taken
    taken.delete()


STATE = "state.append(3); state, open('kept').read(), random.random()"


def test_to_both_nodes_once(
    snapshot: Snapshot, written: list[Snapshot], packings: list[travel.Packing], tmp_path: Path
) -> None:
    """Captured and in items; two workers, which wait for each other, so that both get some."""

    @job(cpus=4)
    def play(item: dict[str, Any]) -> tuple[str, str, int, Any]:
        node = ray.get_runtime_context().get_node_id()
        (tmp_path / node).touch()
        until(lambda: len(list(tmp_path.iterdir())) == 2)
        same = item["deep"][0]
        assert (same.label, same is snapshot) == ("decision", True)
        with Sandbox.restore(same) as copy:
            return node, same.id, len(Snapshot.list()), copy.run_code(STATE).value

    with Sandbox.restore(snapshot) as box:
        expected = box.run_code(STATE).value
    results = play.map({"number": number, "deep": [snapshot]} for number in range(8))
    got = [next(results)]
    ((packed),) = packings[0]._packed.values()
    got += [next(results) for _ in range(6)]
    where = ray.experimental.get_object_locations([packed.ref])[packed.ref]
    got += results
    assert written == [snapshot]
    nodes = {node for node, *_ in got}
    assert len(nodes) == 2 and set(where["node_ids"]) == nodes
    assert {value for *_, value in got} == {expected}
    for node in nodes:  # loaded once there, and nothing else
        assert len({id for at, id, _, _ in got if at == node}) == 1
    assert {count for _, _, count, _ in got} == {1}
    # Nobody has the archive any more.
    number = packed.ref.hex()
    del packed, results
    packings.clear()
    counts = ray._private.worker.global_worker.core_worker.get_all_reference_counts
    until(lambda: number not in counts())


def test_an_environment_goes_on_there() -> None:
    @job(cpus=4)
    def play(how: str, moment: Snapshot) -> tuple[list[float], list[float]]:
        env = gymnasium.make("sandbox_gym:Sandbox-v0", env_id="CartPole-v1")
        if how == "restore":
            observation, _ = env.unwrapped.restore(moment)  # type: ignore[attr-defined]
        else:
            observation, _ = env.reset(options={"snapshot": moment})
        return observation.tolist(), env.unwrapped.step(1)[0].tolist()  # left open

    @job(cpus=4, retries=0)
    def wrong(moment: Snapshot) -> None:
        gymnasium.make("sandbox_gym:Sandbox-v0", env_id="Acrobot-v1").unwrapped.restore(moment)  # type: ignore[attr-defined]

    env = gymnasium.make("sandbox_gym:Sandbox-v0", env_id="CartPole-v1")
    env.reset(seed=1)
    here = env.step(0)[0]
    moment = env.unwrapped.snapshot()  # type: ignore[attr-defined]
    there = env.step(1)[0]
    results = list(play.starmap([("restore", moment), ("reset", moment)]))
    assert results == [(here.tolist(), there.tolist())] * 2
    with pytest.raises(ItemFailed, match="of another environment"):
        list(wrong.map([moment]))
    env.close()


def test_many_snapshots_take_turns(written: list[Snapshot], monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker keeps few of them; here nobody keeps those that are garbage."""
    monkeypatch.setattr(hand, "_MOST_LOADED", 2)

    @job(resources={"second": 1})
    def play(moment: Snapshot) -> tuple[str | None, int]:
        with Sandbox.restore(moment) as copy:
            return copy.run_code("x").value, len(Snapshot.list())

    kept: list[weakref.ref[Snapshot]] = []

    def moments() -> Iterator[Snapshot]:
        with Sandbox.create() as box:
            for number in range(4):
                box.run_code(f"x = {number}")
                moment = box.snapshot()
                kept.append(weakref.ref(moment))
                yield moment
                yield moment
            box.parent = None

    results = list(play.map(moments(), window=2))
    assert [value for value, _ in results] == [str(number) for number in (0, 0, 1, 1, 2, 2, 3, 3)]
    assert max(count for _, count in results) <= 3  # two, and one that is being brought
    assert len(written) == 4
    written.clear()
    until(lambda: not any(moment() for moment in kept))


def test_what_belongs_to_ray_travels_as_such() -> None:
    @ray.remote(num_cpus=0)
    class Scorer:
        def score(self, value: int) -> int:
            return 10 * value

    scorer = Scorer.remote()  # type: ignore[attr-defined]
    weights = ray.put(np.arange(5))

    @job(resources={"second": 1})
    def play(item: dict[str, Any]) -> int:
        total = int(ray.get(item["weights"]).sum()) + item["number"]
        return int(ray.get(scorer.score.remote(total)))

    results = list(play.map({"weights": weights, "number": number} for number in range(3)))
    assert results == [100, 110, 120]
    name = weights.hex()
    del weights
    counts = ray._private.worker.global_worker.core_worker.get_all_reference_counts
    until(lambda: name not in counts())


def test_what_can_not_travel(snapshot: Snapshot) -> None:
    with pytest.raises(
        TypeError, match=r"save\(\) writes an archive .* and a job of sandbox_gym.ray takes it along"
    ):
        pickle.dumps({"a": snapshot})

    @job(resources={"second": 1}, retries=0)
    def play(what: Any) -> Any:
        return what

    with pytest.raises(ItemFailed, match=r"TypeError: <Snapshot .*> can't be pickled.* save\(\)"):
        list(play.map([snapshot]))
    with (
        Sandbox.create() as box,
        pytest.raises(TypeError, match="a job takes snapshots along"),
    ):
        list(play.map([[box]]))
    snapshot.delete()
    with pytest.raises(SnapshotError, match="was deleted"):
        list(play.map([snapshot]))
