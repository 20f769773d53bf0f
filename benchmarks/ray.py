"""sandbox_gym under Ray: RLlib's sampling, jobs with a sandbox each, a policy's scores; in full also what is learnt.

    python -m benchmarks.ray [--quick] [--json FILE]

Needs the extra `ray`. Without --quick it takes half an hour: PPO on CartPole to a mean return of 450, in sandboxes and
beside them, and the AlphaZero example from scratch.
"""

from __future__ import annotations

import math
import os
import tempfile
from pathlib import Path

from benchmarks import _ray_jobs, _ray_scorer, _rllib
from benchmarks._report import Row, main, progress


def alphazero() -> list[Row]:
    """The example from scratch, until its network alone, without search, solves nine of ten new levels."""
    from examples.alphazero import Settings, train

    settings = Settings()
    with tempfile.TemporaryDirectory() as folder:
        curve = train(settings, Path(folder))
    reached = next((seconds for seconds, success in curve if success > 0.9), math.inf)
    name = f"AlphaZero, {settings.env_id}"
    return [
        Row(f"{name}: success at the start", curve[0][1], "", "bound", 0.2, bar=1.0),
        Row("  at the end", curve[-1][1], "", "bound", 0.9, bar=1.0, more_is_better=True),
        Row("  above 0.9 after", reached / 60, "min", "bound", 15.0, bar=1.0),
    ]


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
