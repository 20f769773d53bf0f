"""Makes tasks: python -m sandbox_gym.envs.repo_repair --out tasks.jsonl --n 30 --seed 0

Beside tasks.jsonl lies tasks.solutions.jsonl, with what mends each: keep that from agents.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sandbox_gym.envs.repo_repair.generator import generate
from sandbox_gym.envs.repo_repair.packages import PACKAGES
from sandbox_gym.errors import SandboxError


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m sandbox_gym.envs.repo_repair", description=__doc__)
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="where the tasks go, as JSON lines"
    )
    parser.add_argument("--n", type=int, default=30, help="how many (30)")
    parser.add_argument("--seed", type=int, default=0, help="which (0): the same seed gives the same tasks")
    parser.add_argument(
        "--packages",
        type=lambda text: text.split(","),
        metavar="A,B",
        help=f"of these alone: {', '.join(PACKAGES)}",
    )
    options = parser.parse_args()
    tasks, solutions = [], []
    counts: Counter[str] = Counter()
    try:
        for task, solution in generate(options.n, options.seed, packages=options.packages):
            tasks.append(task.to_json())
            solutions.append(solution.to_json())
            counts[solution.package] += 1
            _show(len(tasks), options.n, task.id)
    except (SandboxError, ValueError) as error:
        parser.exit(1, f"\n{parser.prog}: {error}\n")
    _write(options.out, tasks)
    beside = options.out.with_suffix(".solutions.jsonl")
    _write(beside, solutions)
    print(f"{len(tasks)} tasks in {options.out}, what solves them in {beside}: {dict(counts)}")


def _show(done: int, of: int, name: str) -> None:
    """A bar on a terminal, else a line for each."""
    width = 30 * done // of
    bar = f"[{'#' * width}{'.' * (30 - width)}] {done}/{of} {name}"
    ends = ("\r", "\x1b[K") if sys.stderr.isatty() else ("", "\n")
    print(
        f"{ends[0]}{bar}{ends[1]}",
        end="\n" if sys.stderr.isatty() and done == of else "",
        file=sys.stderr,
        flush=True,
    )


def _write(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """All or nothing."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_text("".join(json.dumps(record) + "\n" for record in records))
    os.replace(scratch, path)


if __name__ == "__main__":
    main()
