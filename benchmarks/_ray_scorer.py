"""A policy's scores over Ray: searchers that send batches at once, against one observation a call to the same actor."""

from __future__ import annotations

import collections
import statistics
import time
from typing import Any

import numpy as np
import ray

from benchmarks._report import Row
from sandbox_gym.ray.scorer import PolicyScorer

_BATCH = 32  # observations that a search asks for at once
_AHEAD = 4  # batches that a searcher has under way: it keeps as many trees
_SEARCHERS = 2


def network() -> Any:
    """A policy and a value for CartPole's observations, of the size that its examples use."""
    import torch

    class Network(torch.nn.Module):  # type: ignore[misc]  # torch is untyped here
        def __init__(self) -> None:
            super().__init__()
            self.body = torch.nn.Sequential(
                torch.nn.Linear(4, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Tanh()
            )
            self.policy, self.value = torch.nn.Linear(64, 2), torch.nn.Linear(64, 1)

        def forward(self, observations: Any) -> tuple[Any, Any]:
            hidden = self.body(observations)
            return self.policy(hidden), self.value(hidden)[:, 0]

    torch.manual_seed(0)
    return Network()


def searcher(scorer: PolicyScorer, seconds: float, seed: int) -> tuple[int, float, list[float]]:
    """What `search_all` does without its trees. Observations scored, seconds taken, and of each batch."""
    observations = np.random.default_rng(seed).normal(size=(_BATCH, 4)).astype(np.float32)
    scorer.evaluate(observations)
    begin = time.perf_counter()
    waiting = [(time.perf_counter(), scorer.submit(list(observations))) for _ in range(_AHEAD)]
    latencies: list[float] = []
    while time.perf_counter() - begin < seconds:
        asked, scores = waiting.pop(0)
        scores.result()
        latencies.append(time.perf_counter() - asked)
        waiting.append((time.perf_counter(), scorer.submit(list(observations))))
    return _BATCH * len(latencies), time.perf_counter() - begin, latencies


def one_by_one(scorer: PolicyScorer, seconds: float) -> tuple[int, float]:
    observations = np.random.default_rng(0).normal(size=(1, 4)).astype(np.float32)
    scorer.evaluate(observations)
    begin, n = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        scorer.evaluate(observations)
        n += 1
    return n, time.perf_counter() - begin


def rows(quick: bool) -> list[Row]:
    """Starts Ray where none runs."""
    rounds, seconds = (3, 1.0) if quick else (7, 3.0)
    batched: list[float] = []
    unbatched: list[float] = []
    latencies: list[float] = []
    # No waiting for company: the calls that are compared with would only wait in vain.
    elsewhere = ray.remote(num_cpus=0)
    with PolicyScorer(network(), max_wait=0) as scorer:
        for _ in range(rounds):
            n, took = ray.get(elsewhere(one_by_one).remote(scorer, seconds), timeout=60)
            unbatched.append(n / took)
            before = scorer.stats()
            asked = [elsewhere(searcher).remote(scorer, seconds, seed) for seed in range(_SEARCHERS)]
            found = ray.get(asked, timeout=60)
            batched.append(sum(n / took for n, took, _ in found))
            latencies += [latency for *_, each in found for latency in each]
            after = scorer.stats()
    sizes = collections.Counter(after.batch_sizes)  # of the last round's batched part
    sizes.subtract(before.batch_sizes)
    return [
        Row(
            f"scorer, {_SEARCHERS} searchers, batches of {_BATCH}",
            statistics.median(batched),
            "obs/s",
            "one a call, same actor",
            statistics.median(unbatched),
            bar=20,
            more_is_better=True,
        ),
        Row(
            "  from a batch's submission to its scores, p99", 1e3 * float(np.percentile(latencies, 99)), "ms"
        ),
        Row("  observations in a pass, mean", sum(s * n for s, n in sizes.items()) / sizes.total(), ""),
    ]
