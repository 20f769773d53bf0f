"""The example that trains: it learns, writes its curve, resumes, and outlives whatever dies on the way."""

from __future__ import annotations

import csv
import math
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch

from examples.alphazero import Row, Settings, Training, train
from examples.alphazero.evaluation import Evaluator
from examples.alphazero.network import Network, mirrored, view
from examples.alphazero.selfplay import SelfPlay, discounted
from sandbox_gym.ray.scorer import PolicyScorer
from tests.conftest import descendants

LEVEL = "MiniGrid-Empty-5x5-v0"
SETTINGS = Settings(env_id=LEVEL, minutes=2, target=2.0, num_workers=1, evaluate_every=0.2, updates=8)
UP, AGENT, DOOR, GOAL = 3, 10, 4, 8


def until(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def pid_of(actor: Any) -> int:
    pid: int = ray.get(actor.__ray_call__.remote(lambda self: os.getpid()), timeout=30)
    return pid


def kill_below(pid: int) -> None:
    """The sandboxes of one process, their supervisor first."""
    for child in sorted(descendants(pid)):
        try:
            os.kill(child, signal.SIGKILL)
        except ProcessLookupError:
            pass


@pytest.fixture
def idle(cluster: Any) -> Iterator[None]:
    """The cluster's CPUs are all free again afterwards, and what ran below this test's actors is gone."""
    yield
    assert until(lambda: ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"])


@pytest.fixture(scope="module")
def trained(cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Row]]:
    """The folder of a training that was left after three evaluations, and those."""
    out = tmp_path_factory.mktemp("trained")
    with Training(SETTINGS, out) as training:
        pids = [pid_of(worker) for worker in training.workers]
        rows = list(islice(training.rows(), 3))
        below = {child for pid in pids for child in descendants(pid)}
    assert below and until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in (*pids, *below)))
    return out, rows


def test_trains_and_writes_its_curve(trained: tuple[Path, list[Row]]) -> None:
    out, rows = trained
    assert rows[0].episodes == 0 < rows[1].episodes < rows[2].episodes
    assert rows[0].success == 0 and rows[2].search_success == 1 and rows[2].failures == 0
    assert math.isfinite(rows[2].policy_loss) and math.isfinite(rows[2].value_loss)
    with (out / "curve.csv").open() as file:
        written = [{name: float(cell) for name, cell in line.items()} for line in csv.DictReader(file)]
    np.testing.assert_equal(written, [asdict(row) for row in rows])
    assert (out / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_resumes_from_its_checkpoint(idle: None, trained: tuple[Path, list[Row]], tmp_path: Path) -> None:
    out, rows = trained
    shutil.copy(out / "checkpoint.pt", tmp_path)
    with Training(SETTINGS, tmp_path) as training:
        again = next(training.rows())
        np.testing.assert_equal(
            [asdict(row) for row in training.all_rows], [asdict(r) for r in (*rows, again)]
        )
    assert again.episodes > rows[2].episodes and again.seconds > rows[2].seconds
    assert again.policy_loss < rows[1].policy_loss
    with pytest.raises(ValueError, match="take another folder"):
        train(replace(SETTINGS, env_id="MiniGrid-Empty-6x6-v0"), tmp_path)
    reached = replace(SETTINGS, minutes=again.seconds / 60)  # has nothing left to do
    assert train(reached, tmp_path) == [(row.seconds, row.success) for row in (*rows, again)]


def test_goes_on_when_a_worker_is_killed(idle: None, tmp_path: Path) -> None:
    with Training(SETTINGS, tmp_path) as training:
        rows = training.rows()
        before = list(islice(rows, 2))[-1]
        os.kill(pid_of(training.workers[0]), signal.SIGKILL)
        after = next(row for row in rows if row.failures)
        later = next(rows)
    assert before.failures == 0 and before.episodes < later.episodes
    assert after.failures == 1 and after.search_success == 1


def test_what_dies_is_no_episode_that_failed(idle: None) -> None:
    evaluator = ray.remote(Evaluator).options(num_cpus=0).remote(LEVEL)
    worker = ray.remote(SelfPlay).options(num_cpus=0).remote(LEVEL, 0.9)
    side, num_actions = ray.get(evaluator.shape.remote(), timeout=60)
    network = Network(side, num_actions)
    try:
        with PolicyScorer(network) as scorer:
            first = ray.get(worker.play.remote(scorer, 1, 500), timeout=60)
            kill_below(pid_of(worker))
            again = ray.get(worker.play.remote(scorer, 1, 500), timeout=60)
            unsolved = ray.get(worker.play.remote(scorer, 1, 2), timeout=60)
        assert first.solved and first.failures == 0
        assert again.solved and again.failures == 1
        np.testing.assert_equal(again.actions, first.actions)
        assert again.returns[0] == pytest.approx(0.9 ** (len(first.actions) - 1) * again.returns[-1])
        assert not unsolved.solved and len(unsolved.actions) == 0

        # All lanes are at the same corner: what solves one solves all.
        network.policy.bias.data[2] = 1.0  # forward, for ever
        assert ray.get(evaluator.evaluate.remote(network, range(30)), timeout=60).success == 0
        for _ in range(200):
            network.zero_grad()
            logits, _ = network(torch.tensor(first.views))
            torch.nn.functional.cross_entropy(logits, torch.tensor(first.actions)).backward()
            torch.optim.SGD(network.parameters(), lr=0.2).step()
        kill_below(pid_of(evaluator))
        score = ray.get(evaluator.evaluate.remote(network, range(30)), timeout=60)
        assert score.success == 1
    finally:
        ray.kill(evaluator)
        ray.kill(worker)


def test_the_agent_looks_along_the_first_axis_from_the_middle() -> None:
    """A goal two cells ahead, a closed door to the right, whichever way it looks."""
    expected = None
    for heading, ahead, right in ((0, (1, 0), (0, 1)), (1, (0, 1), (-1, 0)), (UP, (0, -1), (1, 0))):
        level = np.zeros((5, 5, 3), np.uint8)
        level[..., 0] = 1
        level[2, 2] = AGENT, 0, heading
        level[2 + 2 * ahead[0], 2 + 2 * ahead[1]] = GOAL, 0, 0
        level[2 + right[0], 2 + right[1]] = DOOR, 0, 1
        seen = view(level)
        assert seen.shape == (9, 9) and seen[6, 4] == GOAL and seen[4, 5] == 10 and seen[4, 4] == 1
        expected = seen if expected is None else expected
        np.testing.assert_array_equal(seen, expected)
    views, actions = mirrored(torch.as_tensor(expected)[None], torch.tensor([0]))
    assert views[0, 4, 3] == 10 and views[0, 6, 4] == GOAL and actions.tolist() == [1]
    assert mirrored(views, torch.tensor([2]))[1].tolist() == [2]


def test_returns_are_discounted() -> None:
    np.testing.assert_allclose(discounted(np.array([0.0, 1.0, 2.0]), 0.5), [1.0, 2.0, 2.0])
