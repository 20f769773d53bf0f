"""Search over a cluster: one scorer for several trees, several trees for one decision, one tree over several nodes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import ray

from sandbox_gym import _records
from sandbox_gym.ray import actors
from sandbox_gym.ray._search_merge import Findings, findings, merge
from sandbox_gym.ray._search_remote import RemoteModel
from sandbox_gym.ray._search_worker import arrive, depart
from sandbox_gym.ray.travel import Parcel
from sandbox_gym.search import MCTS, Batch, SearchResult, TreeSearch

_RETRIES = 3  # of a search whose worker, or its node, was lost


class Waiting(Protocol):
    """Scores under way."""

    def result(self) -> tuple[npt.ArrayLike | None, npt.ArrayLike]:
        """`(prior_logits [b, num_actions], values [b])`."""


class Submit(Protocol):
    """What asks for scores and doesn't wait for them: `PolicyScorer` is one."""

    def submit(self, observations: list[Any]) -> Waiting:
        """Of observations [b, ...]."""


def search_all(envs: Sequence[object], mcts: MCTS | Sequence[MCTS], scorer: Submit) -> list[SearchResult]:
    """A search from each environment, all of them scored by one `scorer`: while one tree waits for its scores, the
    others step their sandboxes.

    Each tree asks, and is told, in the order of `MCTS.search`, so each result is that of a search by itself, as far as
    the module gives an observation the same scores in a batch of any size.

    Args:
        envs: each whatever `MCTS.search` takes.
        mcts: of all searches, or one for each; its `batch_size` is what a tree asks for at once, and `scorer` takes the
            place of its `evaluate`.
        scorer: a `PolicyScorer`, or what else has its `submit`.

    Raises what `MCTS.search` and the scorer do; no state outlives the call.
    """
    configs = [mcts] * len(envs) if isinstance(mcts, MCTS) else list(mcts)
    if len(configs) != len(envs):
        raise ValueError(f"{len(envs)} environments need as many searches, not {len(configs)}")
    with ExitStack() as stack:
        searches = [stack.enter_context(each.tree(env)) for each, env in zip(configs, envs, strict=True)]
        waiting: deque[tuple[int, Batch, Waiting]] = deque()

        def ask(i: int, search: TreeSearch) -> None:
            if batch := search.ask_batch(configs[i].batch_size):
                waiting.append((i, batch, scorer.submit(batch.observations)))

        for i, search in enumerate(searches):
            ask(i, search)
        while waiting:
            i, batch, scores = waiting.popleft()
            searches[i].tell(batch, *scores.result())
            ask(i, searches[i])
    return [search.result() for search in searches]


def root_parallel(env: object, mcts: MCTS, *, num_workers: int, timeout: float = 600.0) -> SearchResult:
    """The same search `num_workers` times over the cluster, each from the present state of `env` with a seed of its own
    (from `mcts.seed`), and one result of all: visits added, values weighted by them, the most visited action.

    It asks Ray for one CPU a worker; where there are fewer, some wait for others. A worker that is lost is replaced.
    The result's `tree` holds the root, its children, and a best line below each; its counts are those of all searches.

    Args:
        env: a sandboxed environment, as `gymnasium.make("sandbox_gym:Sandbox-v0", env_id=...)` makes it; it goes on.
        mcts: with functions that can be pickled: `PolicyScorer.evaluate` can.
        num_workers: searches.
        timeout: seconds for the whole.

    Raises:
        TypeError: `env` isn't a sandboxed environment with `Discrete` actions.
        SnapshotError, BackendUnavailable: its state can't travel: that needs root, and criu, as `Snapshot.save` does.
        SandboxTimeout: it took longer. SandboxDied: a worker was lost too often.
        What a search raised. In each case all of them are ended.
    """
    if num_workers < 1:
        raise ValueError(f"a search needs at least one worker, not {num_workers}")
    _records.check_seconds("timeout", timeout)
    deadline = actors.Deadline(timeout)
    _connect()
    parcel, shared = depart(env), ray.put(mcts)
    made = ray.remote(_Searcher).options(
        num_cpus=1, max_restarts=_RETRIES, max_task_retries=_RETRIES, scheduling_strategy="SPREAD"
    )
    searchers: dict[Any, Any] = {}  # by the answer that is waited for
    parts: dict[Any, Findings] = {}
    try:
        for i in range(num_workers):
            seed = int(np.random.SeedSequence([mcts.seed, i]).generate_state(1)[0])
            searcher = made.remote()
            searchers[searcher.search.remote(parcel, shared, seed)] = searcher
        order = list(searchers)
        while searchers:
            ready, late = ray.wait(list(searchers), timeout=deadline.left())
            ref = (ready or late)[0]
            parts[ref] = actors.get(ref, deadline.left(), f"root_parallel within {timeout} s")
            actors.end([searchers.pop(ref)])  # another may wait for its CPU
    finally:
        actors.end(list(searchers.values()))
    return merge([parts[ref] for ref in order])


def leaf_parallel(env: object, mcts: MCTS, *, num_workers: int, timeout: float = 600.0) -> SearchResult:
    """One search, its tree here and its states on `num_workers` workers over the cluster: the leaves of a batch
    (`mcts.batch_size`, several for each worker at best) are stepped, and played out, at once.

    A state's children are made where it is, unless another worker is so much less busy that playing its actions there
    again, from the root, is sooner done; that is also how states come back whose node was lost. The result is that of
    `mcts.search(env)`, which has the same batches.

    Args, and what it raises: as for `root_parallel`. `evaluate` and all other functions of `mcts` run here.
    """
    _records.check_seconds("timeout", timeout)
    _connect()
    with RemoteModel(env, num_workers=num_workers, timeout=timeout) as model:
        return mcts.search(model)


def _connect() -> None:
    if not ray.is_initialized():
        ray.init()


class _Searcher:
    """One of `root_parallel`'s, in a worker process. No task: Ray aborts the process that cancels one in the moment in
    which that ends (ray-project/ray#54798; so does 2.60), while an actor can be ended at any.
    """

    def search(self, parcel: Parcel, mcts: MCTS, seed: int) -> Findings:
        env = arrive(parcel)
        try:
            return findings(replace(mcts, seed=seed).search(env))
        finally:
            env.close()
