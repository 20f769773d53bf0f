"""A model whose states live on the workers of a cluster, each near the states it came from."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

from sandbox_gym.errors import SandboxDied, SnapshotError
from sandbox_gym.ray import actors
from sandbox_gym.ray._search_worker import Start, Where, Worker, depart
from sandbox_gym.search.model import Playout, Transition

_MOVE = 1.0  # what it costs to make a state again, in steps, each of which restores one too
_REPLAY = 0.05  # and for each action that is played on the way, in the guest


@dataclass(eq=False)
class RemoteState:
    """A state of a search: where it comes from, what it showed, and which workers have it."""

    where: Where
    observation: Any
    holders: set[int] = field(default_factory=set)


class RemoteModel:
    """Searches from where `env` stands now, with its states on `num_workers` actors, one CPU each.

    An action is taken where the state is, unless that worker has so much more to do than another that making the state
    again there, by playing its actions from the root, is sooner done. So it is also made again where a worker was lost
    with its node. That a state comes out the same is what `Model` asks for: random generators are part of it.

    Raises:
        TypeError: `env` isn't a sandboxed environment with `Discrete` actions.
        SnapshotError, BackendUnavailable: its state can't travel, or the cluster hasn't the room.
    """

    def __init__(self, env: Any, *, num_workers: int, timeout: float) -> None:
        if num_workers < 1:
            raise ValueError(f"a search needs at least one worker, not {num_workers}")
        self._deadline = actors.Deadline(timeout)
        self._numbers = itertools.count()
        started: list[Start]
        made, started = actors.start(
            Worker, (depart(env),), number=num_workers, needs={"num_cpus": 1}, timeout=self._deadline.left()
        )
        self._workers = dict(enumerate(made))  # those that live
        self.num_actions, self.max_depth, self._observation = started[0]

    def close(self) -> None:
        """Ends the workers, and with them every state. Idempotent."""
        actors.end(list(self._workers.values()))
        self._workers = {}

    def __enter__(self) -> RemoteModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # ---- what a search calls ------------------------------------------------------------------------------------

    def root(self) -> RemoteState:
        return RemoteState(Where(next(self._numbers), ()), self._observation)

    def step(self, state: RemoteState, action: int) -> Transition[RemoteState]:
        return self.step_all(state, [action])[0]

    def step_all(self, state: RemoteState, actions: Sequence[int]) -> list[Transition[RemoteState]]:
        return self.step_many([(state, actions)])[0]

    def step_many(
        self, jobs: Sequence[tuple[RemoteState, Sequence[int]]]
    ) -> list[list[Transition[RemoteState]]]:
        asked = [(state, (action, next(self._numbers))) for state, actions in jobs for action in actions]
        try:
            answers = self._spread("step", asked)
        except BaseException:
            self._release([number for _, (_, number) in asked], set(self._workers))
            raise
        made = iter(
            [
                self._arrived(state, action, number, worker, transition)
                for (state, (action, number)), (worker, transition) in zip(asked, answers, strict=True)
            ]
        )
        return [[next(made) for _ in actions] for _, actions in jobs]

    def rollout(self, state: RemoteState, *, max_steps: int, discount: float, seed: int) -> Playout:
        return self.rollout_many([state], max_steps=max_steps, discount=discount, seeds=[seed])[0]

    def rollout_many(
        self, states: Sequence[RemoteState], *, max_steps: int, discount: float, seeds: Sequence[int]
    ) -> list[Playout]:
        requests = [{"max_steps": max_steps, "discount": discount, "seed": seed} for seed in seeds]
        return [playout for _, playout in self._spread("play", list(zip(states, requests, strict=True)))]

    def observe(self, state: RemoteState) -> Any:
        return state.observation

    def release(self, state: RemoteState) -> None:
        self._release([state.where.number], state.holders)

    # ---- the workers --------------------------------------------------------------------------------------------

    def _spread(self, method: str, asked: Sequence[tuple[RemoteState, Any]]) -> list[tuple[int, Any]]:
        """For each state and what is asked of it: the worker that has answered, and its answer.

        Raises what a worker raised, SandboxTimeout, and SandboxDied when none is left.
        """
        answers: dict[int, tuple[int, Any]] = {}
        while len(answers) < len(asked):
            places = self._place([(i, state) for i, (state, _) in enumerate(asked) if i not in answers])
            under_way = []
            for worker, jobs in places.items():
                sent = [(state.where, [asked[i][1] for i in places]) for state, places in jobs.items()]
                under_way.append((worker, jobs, getattr(self._workers[worker], method).remote(sent)))
            for worker, jobs, ref in under_way:
                try:
                    found = actors.get(ref, self._deadline.left(), f"a search's worker, {method}")
                except (SandboxDied, SnapshotError) as error:
                    self._give_up(worker, error)
                    continue
                for (state, numbers), results in zip(jobs.items(), found, strict=True):
                    state.holders.add(worker)
                    answers.update((i, (worker, result)) for i, result in zip(numbers, results, strict=True))
        return [answers[i] for i in range(len(asked))]

    def _place(self, waiting: Sequence[tuple[int, RemoteState]]) -> dict[int, dict[RemoteState, list[int]]]:
        """By worker, which states it is asked about, each with the numbers of the questions.

        Each goes where all that was placed there before, and itself, ends first.
        """
        load = dict.fromkeys(self._workers, 0.0)
        placed: dict[int, dict[RemoteState, list[int]]] = defaultdict(lambda: defaultdict(list))
        for number, state in waiting:
            path = state.where.path
            costs = {
                worker: 1.0 if not path or worker in state.holders or state in placed[worker]
                else 1.0 + _MOVE + _REPLAY * len(path)
                for worker in load
            }  # fmt: skip
            chosen = min(load, key=lambda worker: load[worker] + costs[worker])
            load[chosen] += costs[chosen]
            placed[chosen][state].append(number)
        return {worker: jobs for worker, jobs in placed.items() if jobs}

    def _give_up(self, worker: int, error: Exception) -> None:
        """Goes on without a worker that is gone, or whose sandboxes are; raises `error` where it was the last."""
        actors.end([self._workers.pop(worker)])
        if not self._workers:
            raise error

    def _arrived(
        self, parent: RemoteState, action: int, number: int, worker: int, step: Transition[Any]
    ) -> Transition[RemoteState]:
        if step.terminated or step.truncated:
            return step
        where = Where(number, (*parent.where.path, action))
        return replace(step, state=RemoteState(where, step.observation, {worker}))

    def _release(self, numbers: list[int], holders: set[int]) -> None:
        # Not waited for: a worker does what it is asked in order, and what fails here fails for the next that it does.
        for worker in holders & self._workers.keys():
            self._workers[worker].release.remote(numbers)
