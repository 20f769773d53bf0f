"""An eval over rows of {id, setup, check}: a copy for each task, an answer applied, the check run, the rate counted.

python -m examples.eval_data_set
"""

from __future__ import annotations

from sandbox_gym import Task, evals
from sandbox_gym.sandbox import Sandbox
from sandbox_gym.tasks import datasets

ROWS = [
    {
        "id": "sum",
        "setup": "seq 10 > numbers",
        "check": 'test "$(cat answer)" = 55',
        "prompt": "Sum numbers into answer.",
    },
    {
        "id": "sort",
        "setup": "printf 'b\\na\\n' > names",
        "check": "sort -c names",
        "prompt": "Sort names in place.",
    },
    {
        "id": "prime",
        "setup": "true",
        "check": 'test "$(cat answer)" = 97',
        "prompt": "Largest prime below 100.",
    },
]
# What a model would say, here from a table.
ANSWERS = {
    "sum": "paste -sd+ numbers | python -c 'print(eval(input()))' > answer",
    "sort": "sort -o names names",
}


def answer(task: Task, box: Sandbox) -> None:
    box.shell(ANSWERS.get(task.id, "echo 91 > answer"), timeout=30)


if __name__ == "__main__":
    summary = evals.evaluate(datasets.load(ROWS), answer, k=2)
    print(summary.text())
    for row in summary.rows:
        print(f"{row.task}: {row.solved} of {row.graded} solved")
