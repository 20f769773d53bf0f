"""Scores of a policy for many searchers at once: one torch module in Ray actors, asked in batches."""

from __future__ import annotations

import collections
import copy
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import ray

from sandbox_gym import _records
from sandbox_gym.errors import SandboxDied
from sandbox_gym.ray import actors
from sandbox_gym.ray.scorer_replica import Array, Replica, Report


@dataclass(frozen=True)
class ScorerStats:
    """What all replicas that live have done so far.

    Attributes:
        devices, versions: of each replica: "cpu" or "cuda", and the version of its weights.
        batch_sizes: observations in a batch, and how many such batches there were.
        mean_batch_size: in observations.
        num_requests: answered.
        latency_p50, latency_p99: seconds from a request's arrival to its answer, in the replica, of the latest ones.
    """

    devices: list[str]
    versions: list[int]
    batch_sizes: dict[int, int]
    mean_batch_size: float
    num_requests: int
    latency_p50: float
    latency_p99: float


class Scores:
    """Scores under way, from `PolicyScorer.submit`.

    Attributes:
        version: of the weights that scored them; None until `result` has returned.
    """

    def __init__(self, scorer: PolicyScorer, observations: Array) -> None:
        self.version: int | None = None
        self._scorer = scorer
        self._observations = observations
        self._ask()

    def _ask(self) -> None:
        self._replica = self._scorer._next()
        self._ref = self._replica.score.remote(self._observations)

    def result(self) -> tuple[Array, Array]:
        """(prior_logits [b, num_actions], values [b]), both float32. Raises what `PolicyScorer.evaluate` does."""
        deadline = actors.Deadline(self._scorer.timeout)
        while True:
            try:
                logits, values, self.version = actors.get(self._ref, deadline.left(), "PolicyScorer's scores")
            except SandboxDied:
                self._scorer._lost(self._replica)
                self._ask()  # another replica; raises where none is left
            else:
                return logits, values


class PolicyScorer:
    """A torch module in Ray actors that score observations for many callers, in batches over all of them.

        with PolicyScorer(network) as scorer:
            MCTS(evaluate=scorer.evaluate, batch_size=16).search(env)

    A handle: it can be pickled, and used in tasks, actors and threads. The actors go with `close`, or with the process
    that made it. Where one is lost, the others take its requests.

    Args:
        module: maps a batch [b, ...], as it is submitted (float64 becomes float32), to `(prior_logits [b, num_actions],
            values [b])`. It is copied, put into eval mode, and called without gradients.
        num_replicas: actors; each asks Ray for one CPU.
        max_batch: observations in one pass.
        max_wait: seconds that a request may wait for others. With 0 a batch is what came during the last pass, which
            is best where many callers keep it busy.
        gpus: of each replica. None: one GPU, or the share there is, where the cluster has any, and no GPU elsewhere.
        timeout: seconds for any call, the start included.

    Raises:
        BackendUnavailable: the cluster hasn't the room, or torch can't use the GPU it was given.
    """

    def __init__(
        self,
        module: Any,
        *,
        num_replicas: int = 1,
        max_batch: int = 256,
        max_wait: float = 0.001,
        gpus: float | None = None,
        timeout: float = 60.0,
    ) -> None:
        if num_replicas < 1 or max_batch < 1 or max_wait < 0:
            raise ValueError(
                f"num_replicas and max_batch must be at least 1 and max_wait at least 0, not {num_replicas}, "
                f"{max_batch} and {max_wait}"
            )
        if not hasattr(module, "load_state_dict"):
            raise TypeError(f"module is a torch.nn.Module, not {type(module).__name__}")
        _records.check_seconds("timeout", timeout)
        self.timeout = timeout
        if not ray.is_initialized():
            ray.init()
        needs = {"num_cpus": 1.0, "num_gpus": _gpus_each(num_replicas) if gpus is None else gpus}
        shared = ray.put(copy.deepcopy(module).cpu())  # once, for all replicas
        self._replicas, _ = actors.start(
            Replica, (shared, max_batch, max_wait), number=num_replicas, needs=needs, timeout=timeout
        )
        self._turn = random.randrange(num_replicas)

    def evaluate(self, observations: Sequence[Any] | Array) -> tuple[Array, Array]:
        """The scores of observations [b, ...], a list or an array: `(prior_logits [b, num_actions], values [b])`. It is
        what `MCTS(evaluate=...)` takes.

        Raises:
            ValueError: the observations are no numbers of one shape, or the module gave a wrong shape or number.
            SandboxError: the module raised.
            SandboxTimeout: no answer within `timeout` seconds.
            SandboxDied: no replica is left.
        """
        return self.submit(observations).result()

    def submit(self, observations: Sequence[Any] | Array) -> Scores:
        """The same, to be waited for later."""
        return Scores(self, _as_batch(observations))

    def set_weights(self, state_dict: Mapping[str, Any], *, version: int) -> None:
        """Goes on with other weights, in all replicas when this returns. No request is dropped, and each is scored by
        one version. They start with version 0.

        Raises:
            ValueError: they don't fit the module, which goes on as it was.
            SandboxTimeout, SandboxDied: as in `evaluate`.
        """
        self._living()
        shared = ray.put({name: _on_cpu(value) for name, value in state_dict.items()})
        self._on_all("set_weights", shared, version)

    def stats(self) -> ScorerStats:
        """Raises SandboxTimeout, SandboxDied."""
        reports: list[Report] = self._on_all("report")
        sizes: collections.Counter[int] = collections.Counter()
        for report in reports:
            sizes.update(report.batch_sizes)
        latencies = np.concatenate([report.latencies for report in reports])
        p50, p99 = np.percentile(latencies, [50, 99]).tolist() if len(latencies) else (math.nan, math.nan)
        return ScorerStats(
            devices=[report.device for report in reports],
            versions=[report.version for report in reports],
            batch_sizes=dict(sorted(sizes.items())),
            mean_batch_size=sum(size * n for size, n in sizes.items()) / max(1, sizes.total()),
            num_requests=sum(report.num_requests for report in reports),
            latency_p50=p50,
            latency_p99=p99,
        )

    def close(self) -> None:
        """Ends the actors, for all who have this handle. Idempotent."""
        replicas, self._replicas = self._replicas, []
        actors.end(replicas)

    def __enter__(self) -> PolicyScorer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _living(self) -> list[Any]:
        """Raises SandboxDied where there are none. (Ray, once shut down, would be started anew by a call.)"""
        replicas = self._replicas if ray.is_initialized() else []
        if not replicas:
            raise SandboxDied(
                "the policy scorer was closed, or its last actor died: make another PolicyScorer"
            )
        return replicas

    def _next(self) -> Any:
        replicas = self._living()
        self._turn += 1
        return replicas[self._turn % len(replicas)]

    def _lost(self, replica: Any) -> None:
        # Out of reach for a moment only, it would go on elsewhere with weights that are no longer changed.
        actors.end([replica])
        # Another list: threads may be choosing from this one.
        self._replicas = [other for other in self._replicas if other is not replica]

    def _on_all(self, method: str, *args: Any) -> list[Any]:
        """The answers of all replicas that live."""
        deadline = actors.Deadline(self.timeout)
        asked = [(replica, getattr(replica, method).remote(*args)) for replica in self._living()]
        answers = []
        for replica, ref in asked:
            try:
                answers.append(actors.get(ref, deadline.left(), f"PolicyScorer.{method}"))
            except SandboxDied:
                self._lost(replica)
        if not answers:
            self._living()
        return answers


def _gpus_each(num_replicas: int) -> float:
    """A GPU for each, or as equal a share as whole replicas on each GPU allow; 0 where there is none."""
    there = int(ray.cluster_resources().get("GPU", 0))
    return 1 / math.ceil(num_replicas / there) if there else 0.0


def _as_batch(observations: Sequence[Any] | Array) -> Array:
    batch = np.asarray(observations)
    if batch.dtype.kind not in "biuf" or batch.ndim < 1 or not len(batch):
        raise ValueError(
            f"a batch is one observation or more, numbers of one shape, not {batch.dtype} {batch.shape}: take arrays "
            "out of dicts first, as in evaluate=lambda seen: scorer.evaluate([o['image'] for o in seen])"
        )
    return batch.astype(np.float32) if batch.dtype == np.float64 else batch


def _on_cpu(value: Any) -> Any:
    return value.detach().cpu() if hasattr(value, "detach") else value
