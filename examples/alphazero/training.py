"""The training: self-play workers, a scorer, a learner and an evaluator, as actors of Ray around one loop."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import ray
import torch
from tqdm import tqdm

from examples.alphazero import curve
from examples.alphazero.evaluation import Evaluator, Score
from examples.alphazero.learner import Learner
from examples.alphazero.network import Network
from examples.alphazero.selfplay import TRIES, Episode, SelfPlay
from sandbox_gym.ray.scorer import PolicyScorer

_HELD_OUT = range(100)  # seeds of levels that are never trained on
_FIRST_SEED = 1_000_000  # of those that are
_RECENT = 20  # searches, of which a row tells
_QUEUE = 2  # episodes that a worker has been asked for, so that it never waits for the learner
_PATIENCE = 600.0  # seconds without an episode or a score after which something is broken


@dataclass(frozen=True)
class Settings:
    """Of one training. It ends after `minutes`, or when three evaluations in a row reach `target`.

    Attributes:
        num_simulations: of one search at most. A search ends when it finds the goal.
        updates: gradient steps for each episode.
        evaluate_every: seconds between two evaluations.
    """

    env_id: str = "MiniGrid-DoorKey-8x8-v0"
    seed: int = 0
    minutes: float = 15.0
    target: float = 0.95
    num_workers: int = 2
    num_simulations: int = 5000
    discount: float = 0.97
    updates: int = 24
    evaluate_every: float = 15.0


@dataclass(frozen=True)
class Row:
    """The state of a training at one evaluation.

    `success`: of the network alone, on the held-out levels. `search_success`, `nodes_per_search`: of the latest
    searches (within `Settings.num_simulations`), each in a level that is new to the network. `failures`: sandboxes and
    actors lost and replaced; what they were doing was begun anew.
    """

    seconds: float
    episodes: int
    nodes: int
    success: float
    search_success: float
    nodes_per_search: float
    policy_loss: float
    value_loss: float
    failures: int


@dataclass
class _Progress:
    """What a checkpoint keeps beside the learner's state."""

    seconds: float = 0.0
    started: int = 0  # episodes asked for
    episodes: int = 0
    nodes: int = 0
    failures: int = 0
    rows: list[dict[str, Any]] = field(default_factory=list)


def train(
    settings: Settings, out: Path, on_row: Callable[[Row], object] = lambda row: None
) -> list[tuple[float, float]]:
    """Trains, or goes on from the checkpoint in `out`, where curve.csv, curve.png and checkpoint.pt are kept up to
    date. Returns (seconds, success) of each evaluation, those before the checkpoint too.

    Raises:
        ValueError: the checkpoint is of another level.
        SandboxError: sandboxes, or the scorer, fail again and again. Started again, it goes on from the checkpoint.
        TimeoutError: no actor answers.
    """
    with Training(settings, out) as training:
        for row in training.rows():
            on_row(row)
        return [(row.seconds, row.success) for row in training.all_rows]


class Training:
    """One training in the making; its actors live as long as the `with` block."""

    def __init__(self, settings: Settings, out: Path) -> None:
        self._settings = settings
        self._out = out
        self._progress = _Progress()
        self._recent: deque[Episode] = deque(maxlen=_RECENT)
        self._losses = (float("nan"), float("nan"))
        self._scorer: PolicyScorer | None = None
        self._evaluator: Any = None
        self.workers: list[Any] = []

    def __enter__(self) -> Training:
        settings = self._settings
        self._out.mkdir(parents=True, exist_ok=True)
        saved = self._saved()
        try:
            self._evaluator = _actor(Evaluator, 0.0, settings.env_id)
            side, num_actions = ray.get(self._evaluator.shape.remote(), timeout=120)
            torch.manual_seed(settings.seed)
            self._learner = Learner(Network(side, num_actions))
            if saved is not None:
                self._learner.load(saved["learner"])
                self._progress = _Progress(**saved["progress"])
            self._scorer = PolicyScorer(self._learner.network)
            self.workers = [
                _actor(SelfPlay, 0.5, settings.env_id, settings.discount) for _ in range(settings.num_workers)
            ]
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the actors, and with them their sandboxes. Idempotent."""
        for actor in (*self.workers, self._evaluator):
            if actor is not None:
                ray.kill(actor)
        self.workers, self._evaluator = [], None
        if self._scorer is not None:
            self._scorer.close()

    @property
    def all_rows(self) -> list[Row]:
        return [Row(**row) for row in self._progress.rows]

    def rows(self) -> Iterator[Row]:
        """Trains; yields at each evaluation, when the files in `out` are up to date."""
        progress, limit = self._progress, 60 * self._settings.minutes
        began = time.monotonic() - progress.seconds
        playing = {self._play(worker): worker for worker in self.workers for _ in range(_QUEUE)}
        scoring, due, over = None, 0.0, False
        heard = time.monotonic()
        with tqdm(total=round(limit), desc=self._settings.env_id, unit="s", disable=None) as bar:
            while not over or scoring is not None:
                new = not progress.rows or progress.episodes > progress.rows[-1]["episodes"]
                over = over or self._ended
                if scoring is None and new and (over or progress.seconds >= due):
                    scoring = self._evaluate()
                ready, _ = ray.wait([*playing, *([scoring] if scoring else [])], timeout=1.0)
                heard = time.monotonic() if ready else heard
                progress.seconds = time.monotonic() - began
                bar.update(min(round(progress.seconds), bar.total) - bar.n)
                for ref in ready:
                    if ref in playing:
                        worker = playing.pop(ref)
                        playing[self._play(worker)] = worker
                        self._learn(ray.get(ref, timeout=_PATIENCE))
                    else:
                        scoring, due = None, progress.seconds + self._settings.evaluate_every
                        yield self._note(ray.get(ref, timeout=_PATIENCE))
                if time.monotonic() - heard > _PATIENCE:
                    raise TimeoutError(f"no actor answered within {_PATIENCE:.0f} s: look at Ray's logs")

    @property
    def _ended(self) -> bool:
        latest = [row["success"] for row in self._progress.rows[-3:]]
        reached = len(latest) == 3 and min(latest) >= self._settings.target
        return reached or self._progress.seconds >= 60 * self._settings.minutes

    def _play(self, worker: Any) -> Any:
        seed = _FIRST_SEED * (self._settings.seed + 1) + self._progress.started
        self._progress.started += 1
        return worker.play.remote(self._scorer, seed, self._settings.num_simulations)

    def _evaluate(self) -> Any:
        return self._evaluator.evaluate.remote(self._learner.network, _HELD_OUT)

    def _learn(self, episode: Episode) -> None:
        assert self._scorer is not None
        self._progress.episodes += 1
        self._progress.nodes += episode.num_nodes
        self._progress.failures += episode.failures
        self._recent.append(episode)
        self._learner.add(episode)
        for _ in range(self._settings.updates):
            self._losses = self._learner.update() or self._losses
        self._scorer.set_weights(self._learner.network.state_dict(), version=self._progress.episodes)

    def _note(self, score: Score) -> Row:
        progress, recent = self._progress, self._recent
        progress.failures += score.failures
        row = Row(
            seconds=round(progress.seconds, 1),
            episodes=progress.episodes,
            nodes=progress.nodes,
            success=score.success,
            search_success=_mean(episode.solved for episode in recent),
            nodes_per_search=_mean(episode.num_nodes for episode in recent),
            policy_loss=round(self._losses[0], 6),
            value_loss=round(self._losses[1], 6),
            failures=progress.failures,
        )
        progress.rows.append(asdict(row))
        self._save()
        return row

    def _save(self) -> None:
        state = {"env_id": self._settings.env_id, "learner": self._learner.state()}
        partial = self._out / "checkpoint.pt.partial"
        torch.save({**state, "progress": asdict(self._progress)}, partial)
        partial.replace(self._out / "checkpoint.pt")  # at once: a kill leaves the last one whole
        curve.write(self._out / "curve.csv", self.all_rows)
        curve.plot(self._out / "curve.png", self.all_rows, title=self._settings.env_id)

    def _saved(self) -> dict[str, Any] | None:
        """The checkpoint that is there to go on from. Raises ValueError."""
        path = self._out / "checkpoint.pt"
        if not path.exists():
            return None
        state: dict[str, Any] = torch.load(path, weights_only=True)
        if state["env_id"] != self._settings.env_id:
            raise ValueError(
                f"{path} is of {state['env_id']}, not {self._settings.env_id}: take another folder"
            )
        return state


def _actor(kind: Any, num_cpus: float, *args: Any) -> Any:
    """Where its process dies, Ray starts it again and repeats what it was doing."""
    lasting = ray.remote(kind).options(num_cpus=num_cpus, max_restarts=-1, max_task_retries=TRIES)
    return lasting.remote(*args)


def _mean(numbers: Iterable[float]) -> float:
    found = list(numbers)
    return sum(found) / len(found) if found else float("nan")
