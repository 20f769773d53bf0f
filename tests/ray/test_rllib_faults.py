"""What is killed while RLlib trains: a guest, a supervisor, an env runner. And what can't be helped raises, soon."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
from gymnasium.error import NameNotFound

from sandbox_gym.errors import SandboxDied, SandboxError
from sandbox_gym.rllib import algorithms, ppo_config
from sandbox_gym.rllib.env_runner import lane_seeds
from tests.conftest import Traces, kill_guest
from tests.ray.rllib_toys import LENGTH, tell_seeds

TOYS = "tests.ray.rllib_toys"
LANES = 4
_PATIENCE = 20.0  # seconds in which what is over must be gone


def counting(toy: str = "Counter", **options: Any) -> Any:
    config = ppo_config(entry_point=f"{TOYS}:{toy}", num_envs_per_env_runner=LANES, **options)
    config.training(train_batch_size_per_learner=160, minibatch_size=80, num_epochs=1)
    return config.debugging(seed=7).callbacks(on_episode_start=tell_seeds)


def on_runners(algorithm: Any, function: Callable[[Any], Any]) -> list[Any]:
    found: list[Any] = algorithm.env_runner_group.foreach_env_runner(
        function, local_env_runner=False, timeout_seconds=30
    )
    return found


def kill_lane(runner: Any) -> None:
    kill_guest(runner.env.unwrapped._lanes._lanes[1].box)


def kill_supervisor(runner: Any) -> None:
    backend = supervisor_of(runner)
    os.kill(backend._process.pid, signal.SIGKILL)
    backend._process.wait()


def traces_of(algorithm: Any) -> list[Traces]:
    """All that the env runners have on this machine, by their supervisors."""
    clients = on_runners(algorithm, lambda runner: (os.getpid(), supervisor_of(runner)._folder))
    return [Traces.of(pid, folder) for pid, folder in clients]


def supervisor_of(runner: Any) -> Any:
    return runner.env.unwrapped._lanes._warm.snapshot._backend


@pytest.fixture(scope="module")
def two_runners(cluster: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    """An algorithm with two env runners of four lanes, and what its first iteration gave. Leaves nothing behind."""
    algorithm = counting(num_env_runners=2).build_algo()
    try:
        yield algorithm, algorithm.train()["env_runners"]
    finally:
        traces = traces_of(algorithm)
        algorithm.stop()
    for trace in traces:
        trace.assert_gone(_PATIENCE)


def test_no_two_lanes_share_a_seed(two_runners: Any) -> None:
    _, first = two_runners
    assert len(set(first["seeds"])) == 2 * LANES
    draws = first["draws"]
    assert len(draws) >= 2 * LANES * 2
    assert len(set(draws)) == len(draws), "two lanes play the same episode"


def test_lane_seeds() -> None:
    workers = [lane_seeds(3, worker, 5) for worker in range(8)]
    assert len({seed for seeds in workers for seed in seeds}) == 40
    assert lane_seeds(3, 1, 5) == workers[1], "the same again"
    assert not set(lane_seeds(4, 1, 5)) & set(workers[1])
    assert not set(lane_seeds(3, 1, 5, (1,))) & set(workers[1])
    assert all(0 <= seed < 2**31 for seed in lane_seeds(2**40, 10**6, 500, (2**32,)))


def test_a_killed_guest_costs_its_lane_one_episode(two_runners: Any) -> None:
    algorithm, _ = two_runners
    on_runners(algorithm, kill_lane)
    samples = on_runners(algorithm, lambda runner: [told(e) for e in runner.sample(num_timesteps=80)])
    for episodes in samples:
        assert sum(1 for _, truncated, _ in episodes if truncated) <= 1
        assert all("sandbox_error" not in info for *_, infos in episodes for info in infos)
        assert sum(length for length, *_ in episodes) >= 79, "steps of other lanes are missing"
    result = algorithm.train()["env_runners"]
    assert result["sandboxes"]["lane_failures"] == 2
    assert result["num_env_steps_sampled"] >= 160
    assert algorithm.env_runner_group.num_remote_worker_restarts() == 0


def told(episode: Any) -> tuple[int, bool, list[Any]]:
    return len(episode), bool(episode.is_truncated), list(episode.get_infos())


def test_a_killed_supervisor_costs_no_runner(two_runners: Any) -> None:
    algorithm, _ = two_runners
    on_runners(algorithm, kill_supervisor)
    result = algorithm.train()["env_runners"]
    assert result["num_env_steps_sampled"] >= 160
    assert result["sandboxes"]["live"] >= LANES
    assert algorithm.env_runner_group.num_remote_worker_restarts() == 0


def test_a_killed_env_runner_is_started_again_with_other_seeds(two_runners: Any) -> None:
    algorithm, first = two_runners
    traces = traces_of(algorithm)
    for pid in on_runners(algorithm, lambda runner: os.getpid()):
        os.kill(pid, signal.SIGKILL)
    seeds: set[int] = set()
    for _ in range(20):  # the iteration in which they die may have no samples
        result = algorithm.train().get("env_runners", {})
        seeds |= {int(seed) for seed in result.get("seeds", ())}
        if len(seeds) == 2 * LANES:
            break
    assert len(seeds) == 2 * LANES
    assert not seeds & {int(seed) for seed in first["seeds"]}
    assert algorithm.env_runner_group.num_remote_worker_restarts() == 2
    assert result["episode_len_mean"] == pytest.approx(LENGTH)
    for trace in traces:
        trace.assert_gone(_PATIENCE)


def test_env_runners_that_are_gone_for_good_raise(two_runners: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last test that uses them."""
    algorithm, _ = two_runners
    monkeypatch.setattr(algorithms, "_PATIENCE", 1.0)
    traces = traces_of(algorithm)
    on_runners(algorithm, lambda runner: ray.actor.exit_actor())
    with pytest.raises(SandboxError, match="no env runner has come back"):
        train(algorithm, 5)
    for trace in traces:
        trace.assert_gone(_PATIENCE)


def train(algorithm: Any, iterations: int) -> None:
    for _ in range(iterations):
        algorithm.train()


@pytest.mark.parametrize("num_env_runners", [0, 1])
def test_what_always_fails_raises(cluster: Any, num_env_runners: int) -> None:
    algorithm = counting("Broken", num_env_runners=num_env_runners).build_algo()
    began = time.monotonic()
    try:
        with pytest.raises(SandboxError, match=r"failed at 3 steps in a row.*broken for good"):
            train(algorithm, 5)
    finally:
        algorithm.stop()
    assert time.monotonic() - began < 30


def test_an_environment_that_can_not_be_made_raises(cluster: Any) -> None:
    with pytest.raises(NameNotFound, match="NoSuch"):
        ppo_config("NoSuch-v1").build_algo()
    with pytest.raises(SandboxError, match="the first env runner could not start"):
        ppo_config("NoSuch-v1", num_env_runners=1).build_algo()


def test_a_supervisor_that_always_dies_raises(cluster: Any) -> None:
    algorithm = counting().build_algo()
    runner = algorithm.env_runner
    reset = runner.env.reset
    kills: list[int] = []

    def reset_and_kill(**kwargs: Any) -> Any:
        answer = reset(**kwargs)
        kill_supervisor(runner)
        kills.append(1)
        return answer

    runner.env.reset = reset_and_kill
    try:
        with pytest.raises(SandboxDied):
            algorithm.train()
    finally:
        algorithm.stop()
    assert len(kills) <= 3
