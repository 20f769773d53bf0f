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
            anew=options.anew,
            workers=options.workers,
            timeout=options.timeout,
            backend=options.backend,
            name=options.policy,
            show_progress=True,
        )
    except (SandboxError, ValueError, OSError) as error:
        print(str(error).encode("utf-8", "backslashreplace").decode(), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        same = "the same command without --anew" if options.anew else "the same command"
        print(f"stopped; what is over is in {options.out}, and {same} goes on from there", file=sys.stderr)
        return 130
    print(
        summary.text().encode("utf-8", "backslashreplace").decode()
    )  # a policy's words may hold what is no text
    if summary.from_before:
        print("If the policy's code has changed since, --anew or another --out runs all attempts again")
    whole = ", with all that each error says" if summary.errors else ""
    print(f"{options.out}/report.html, {options.out}/results.jsonl{whole}")
    return 1 if summary.errors else 0
