"""Monotonic clocks go on from where the snapshot was taken, whenever it is restored; the time of day is the host's."""

from __future__ import annotations

import time

import pytest

from sandbox_gym.sandbox import Engine, Sandbox

_READ = "import time; (time.monotonic(), time.clock_gettime(time.CLOCK_BOOTTIME), time.perf_counter())"
_LATER = 0.5


def _clocks(box: Sandbox) -> list[float]:
    value = box.run_code(_READ).value
    assert value is not None
    return [float(number) for number in value.strip("()").split(",")]


def _pass(seconds: float) -> None:
    """Waits by the host's clock: that it goes on while a snapshot stands still is what is tested."""
    time.sleep(seconds)


@pytest.mark.parametrize("engine", ["fork", "criu"])
def test_clocks_do_not_jump_over_generations(box: Sandbox, engine: Engine) -> None:
    current = box
    for _ in range(3):
        before = _clocks(current)
        snapshot = current.snapshot(engine=engine)
        _pass(_LATER)
        copy = Sandbox.restore(snapshot)
        for was, now in zip(before, _clocks(copy)):
            assert 0 < now - was < _LATER, (engine, was, now)
        for was, now in zip(before, _clocks(current)):
            assert now - was > _LATER  # the source ran on
        if current is not box:
            current.terminate()
        snapshot.delete()
        current = copy
    current.terminate()


@pytest.mark.parametrize("engine", ["fork", "criu"])
def test_the_time_of_day_is_the_host_s(box: Sandbox, engine: Engine) -> None:
    snapshot = box.snapshot(engine=engine)
    _pass(_LATER)
    with Sandbox.restore(snapshot) as copy:
        result = copy.run_code("import time; time.time()")
        assert result.value is not None and abs(float(result.value) - time.time()) < _LATER
    snapshot.delete()
