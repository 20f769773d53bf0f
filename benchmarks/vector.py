"""Vector environments of sandboxes against AsyncVectorEnv, whose lanes are bare processes, in alternating rounds.

    python -m benchmarks.vector [--quick] [--json FILE]

Steps per second of CartPole, where all that counts is what a step costs beside the environment. With fresh="reuse" a
lane resets as AsyncVectorEnv's do, by the environment's own reset; with fresh="snapshot", the default, each episode
starts in a new copy of the sandbox, whose price is the more visible the shorter episodes are: 22 steps of random play,
or up to 500 with a policy that balances the pole. The floor is one plain process a lane, over the same kind of socket.
"""

from __future__ import annotations

import os
import statistics
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode

import sandbox_gym  # noqa: F401  # registers Sandbox-v0
from benchmarks._backends_docker import by_hand, daemon, docker
from benchmarks._plain import PlainLanes
from benchmarks._report import Row, main, progress
from sandbox_gym._spares import forget
from sandbox_gym.sandbox import Sandbox

_ENV = "CartPole-v1"
_BARS = {8: 2.0, 32: 3.5}


def bare(n: int) -> Any:
    return AsyncVectorEnv([lambda: gymnasium.make(_ENV)] * n, context="fork")


def sandboxed(n: int, **kwargs: Any) -> Any:
    return gymnasium.make_vec("Sandbox-v0", num_envs=n, env_id=_ENV, **kwargs)


def random_play(rng: np.random.Generator, n: int) -> Callable[[Any], Any]:
    batches = list(rng.integers(0, 2, (512, n)))
    return lambda observations: batches[int(rng.integers(512))]


def balance(rng: np.random.Generator, n: int) -> Callable[[Any], Any]:
    weights = np.array([0.0, 0.1, 1.0, 0.5], np.float32)
    return lambda observations: (observations @ weights > 0).astype(np.int64)


def steps_per_second(env: Any, policy: Callable[[Any], Any], seconds: float, seed: int) -> float:
    observations, _ = env.reset(seed=seed)
    for _ in range(3):
        observations = env.step(policy(observations))[0]
    start, steps = time.perf_counter(), 0
    while time.perf_counter() < start + seconds:
        observations = env.step(policy(observations))[0]
        steps += env.num_envs
    return steps / (time.perf_counter() - start)


def stepping(n: int, play: Callable[..., Any], rounds: int, seconds: float) -> dict[str, float]:
    """Medians of steps per second, by kind of lanes."""
    envs = {
        "plain": PlainLanes(n),  # first: forked while this process is still small
        "async": bare(n),
        "reuse": sandboxed(n, fresh="reuse"),
        "snapshot": sandboxed(n, fresh="snapshot"),
    }
    try:
        rates: dict[str, list[float]] = {kind: [] for kind in envs}
        for turn in range(rounds):
            for kind, env in envs.items():
                policy = play(np.random.default_rng(turn), n)
                rates[kind].append(steps_per_second(env, policy, seconds, turn))
        return {kind: statistics.median(found) for kind, found in rates.items()}
    finally:
        for env in envs.values():
            env.close()


def creation(n: int, rounds: int) -> list[Row]:
    """Seconds until the constructor returns; AsyncVectorEnv's has by then heard from every worker. Cold: Python starts
    and imports in a new guest. Warm: a guest of the same kind is kept from before, as Gymnasium is already imported
    in the process that AsyncVectorEnv forks.
    """
    times: dict[str, list[float]] = {"async": [], "cold": [], "warm": []}
    for _ in range(rounds):
        forget()
        for kind, taken in times.items():
            start = time.perf_counter()
            env = bare(n) if kind == "async" else sandboxed(n)
            taken.append(time.perf_counter() - start)
            env.close()
    reference = statistics.median(times["async"])
    return [
        Row(
            f"create {n} lanes, guest kept warm",
            statistics.median(times["warm"]),
            "s",
            "AsyncVectorEnv",
            reference,
            bar=1.0,
        ),
        Row(
            f"create {n} lanes, first of their kind",
            statistics.median(times["cold"]),
            "s",
            "AsyncVectorEnv",
            reference,
        ),
    ]


def resets(n: int, seconds: float) -> float:
    """Episodes begun per second, each in a new copy of the sandbox, by resets of all lanes."""
    env = sandboxed(n, autoreset_mode=AutoresetMode.DISABLED, spares=n)
    try:
        env.reset(seed=0)
        start, done = time.perf_counter(), 0
        while time.perf_counter() < start + seconds:
            env.reset()
            done += n
        return done / (time.perf_counter() - start)
    finally:
        env.close()


def docker_runs(n: int) -> tuple[float, float]:
    """Episodes begun per second by `docker run` for each: one after the other, and as many at once as cores."""
    code = f"import gymnasium; gymnasium.make({_ENV!r}).reset(seed=0)"
    with daemon(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a disk's limit
        with Sandbox.create(backend="docker") as box:
            container, options = by_hand(box)
            image = docker("inspect", "--format", "{{.Image}}", container)
            python = str(box.run_code("import sys; print(sys.executable)").stdout).strip()

            def begin(_: int) -> None:
                docker("run", *options, image, python, "-c", code)

            def rate(at_once: int) -> float:
                with ThreadPoolExecutor(at_once) as pool:
                    start = time.perf_counter()
                    list(pool.map(begin, range(n)))
                    return n / (time.perf_counter() - start)

            begin(0)
            return rate(1), rate(os.cpu_count() or 1)


def run(quick: bool) -> list[Row]:
    rounds, seconds = (5, 0.5) if quick else (15, 1.0)
    progress("creation")
    rows = creation(32, 3 if quick else 9)
    for n, bar in _BARS.items():
        progress(f"random play, {n} lanes")
        rates = stepping(n, random_play, rounds, seconds)
        rows.append(
            Row(
                f"steps/s, {n} lanes, fresh=reuse, random play",
                rates["reuse"],
                "1/s",
                "AsyncVectorEnv",
                rates["async"],
                bar,
                more_is_better=True,
            )
        )
        name = f"steps/s, {n} lanes, plain forked processes (the floor)"
        rows.append(Row(name, rates["plain"], "1/s", "AsyncVectorEnv", rates["async"]))
        name = f"steps/s, {n} lanes, default (fresh=snapshot), random play"
        rows.append(Row(name, rates["snapshot"], "1/s", "AsyncVectorEnv", rates["async"]))
        progress(f"balancing, {n} lanes")
        rates = stepping(n, balance, rounds, seconds)
        name = f"steps/s, {n} lanes, fresh=reuse, balancing"
        rows.append(Row(name, rates["reuse"], "1/s", "AsyncVectorEnv", rates["async"]))
        name = f"steps/s, {n} lanes, default (fresh=snapshot), balancing"
        rows.append(Row(name, rates["snapshot"], "1/s", "AsyncVectorEnv", rates["async"]))
    progress("resets")
    rate, (one_by_one, at_once) = resets(32, 2.0 if quick else 10.0), docker_runs(10 if quick else 50)
    name = "resets to a fresh sandbox, 32 lanes"
    return [
        *rows,
        Row(name, rate, "1/s", "`docker run` for each", one_by_one, 100, more_is_better=True),
        Row(name, rate, "1/s", "as many at once as cores", at_once),
    ]


if __name__ == "__main__":
    main(__doc__, run)
