"""B 9. An eval over a data set of {id, setup, check}: a fork for each task and attempt, the model's answer applied, the
check run, the pass rate counted.

`sandbox-gym eval tasks.jsonl --policy module:function -k 2` is the same from the command line, with a report.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from sandbox_gym import Sandbox
from sandbox_gym.evals import evaluate
from sandbox_gym.tasks import Task, datasets

ROWS = [
    {"id": "count", "setup": ["seq 7 > lines"], "check": 'test "$(cat answer)" = 7'},
    {"id": "newest", "setup": ["touch -d 2001-01-01 old; touch new"], "check": 'test "$(cat answer)" = new'},
    {"id": "secret", "setup": ["echo 42 > .hidden"], "check": 'test "$(cat answer)" = 42'},
]
ANSWERS = {"count": "wc -l < lines", "newest": "ls -t | head -1", "secret": "cat * 2>/dev/null"}


def model(task: Task, box: Sandbox) -> None:
    """Stands for a model: its answer is a command line."""
    box.shell(f"answer=$({ANSWERS[task.id]}); echo $answer > answer")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "tasks.jsonl")
        file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        summary = evaluate(datasets.load(file), model, k=2, out=Path(folder, "out"))
        for row in summary.rows:
            print(row.task, f"{row.solved} of {row.graded}")
        print(f"pass@1 {summary.pass_at[1].value:.2f}, {summary.errors} errors")


if __name__ == "__main__":
    main()
