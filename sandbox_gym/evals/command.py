"""`sandbox-gym eval`."""

from __future__ import annotations

import argparse
import os
import sys

from sandbox_gym.errors import SandboxError
from sandbox_gym.evals import policies
from sandbox_gym.evals.runner import evaluate
from sandbox_gym.tasks import datasets


def run(options: argparse.Namespace) -> int:
    """0 when each attempt has a score, 1 when some have none, 2 when nothing could be run."""
    sys.path.insert(0, os.getcwd())  # where the user's policy is
    try:
        tasks = datasets.load(options.tasks, repos=options.repos)
        summary = evaluate(
            tasks,
            policies.find(options.policy),
            k=options.k,
            out=options.out,
            workers=options.workers,
            timeout=options.timeout,
            backend=options.backend,
            name=options.policy,
            show_progress=True,
        )
    except (SandboxError, ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(
            f"stopped; what is over is in {options.out}, and the same command goes on from there",
            file=sys.stderr,
        )
        return 130
    print(summary.text())
    print(f"{options.out}/report.html, {options.out}/results.jsonl")
    return 1 if summary.errors else 0
