"""Many threads on one sandbox, and on many."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from sandbox_gym.sandbox import Sandbox


def test_calls_on_one_sandbox_queue_up(box: Sandbox) -> None:
    box.run_code("n = 0")

    def work(i: int) -> str | None:
        kind = i % 4
        if kind == 0:
            return box.run_code("n += 1; 'code'").value
        if kind == 1:
            return box.shell(f"echo {i}").stdout.strip()
        if kind == 2:
            box.write_file(f"f{i}", str(i))
            return box.read_text(f"f{i}")
        with box.fork(1)[0] as copy:
            return copy.run_code(f"{i}").value

    with ThreadPoolExecutor(12) as pool:
        results = list(pool.map(work, range(60)))
    assert results == ["'code'" if i % 4 == 0 else str(i) for i in range(60)]
    assert box.run_code("n").value == "15"


def test_calls_on_many_run_side_by_side(boxes: Callable[[int], list[Sandbox]]) -> None:
    made = boxes(8)
    together = threading.Barrier(8)

    def work(i: int) -> str | None:
        together.wait()
        for k in range(10):
            made[i].run_code(f"last = {i * 100 + k}")
            made[i].shell("true")
        return made[i].run_code("last").value

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(8))) == [str(i * 100 + 9) for i in range(8)]


def test_making_and_ending_from_many_threads(box: Sandbox) -> None:
    snapshot = box.snapshot()

    def work(i: int) -> None:
        with Sandbox.restore(snapshot) as copy:
            copy.run_code(f"x = {i}")
            (child,) = copy.fork(1)
            with child:
                assert child.run_code("x").value == str(i)
            mark = copy.checkpoint()
            copy.run_code("x = None")
            copy.rewind()
            assert copy.run_code("x").value == str(i)
            mark.delete()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(40)))
    snapshot.delete()


def test_terminate_from_many_threads(boxes: Callable[[int], list[Sandbox]]) -> None:
    (box,) = boxes(1)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: box.terminate(), range(8)))
    assert box.status == "terminated"


def test_creating_from_many_threads() -> None:
    with ThreadPoolExecutor(6) as pool:
        made = list(pool.map(lambda i: Sandbox.create(f"many-{i}"), range(6)))
    assert sorted(box.name for box in made) == [f"many-{i}" for i in range(6)]
    for box in made:
        assert box.run_code("1").ok
        box.terminate()
