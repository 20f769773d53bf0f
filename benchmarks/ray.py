"""sandbox_gym under Ray: RLlib's sampling, jobs with a sandbox each, a policy's scores; in full also what is learnt.

    python -m benchmarks.ray [--quick] [--json FILE]

Needs the extra `ray`. Without --quick it takes half an hour: PPO on CartPole to a mean return of 450, in sandboxes and
beside them, and the AlphaZero example from scratch.
"""

from __future__ import annotations

import os
import tempfile

from benchmarks import _ray_jobs, _ray_scorer, _rllib
from benchmarks._report import Row, main, progress


def alphazero() -> list[Row]:
    """How long the example takes until its network alone succeeds in nine of ten new levels."""
    from examples.alphazero import train

    with tempfile.TemporaryDirectory() as folder:
        return train(folder)


def run(quick: bool) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="sg-") as place:  # Ray writes to both
        os.environ.update(HOME=place, RAY_TMPDIR=place, RAY_USAGE_STATS_ENABLED="0")
        progress("sampling")
        rows = _rllib.sampling(quick)
        progress("jobs")
        rows += _ray_jobs.rows(quick)
        progress("scorer")
        rows += _ray_scorer.rows(quick)
        if not quick:
            progress("PPO")
            rows += _rllib.training()
            progress("AlphaZero")
            rows += alphazero()
    return rows


if __name__ == "__main__":
    main(__doc__, run)
