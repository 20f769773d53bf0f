"""B 4. Hidden tests come in after the rollout and decide the reward. The agent can't have seen, edited or pre-empted
them.

A partial score is JSON that the grader prints; here the reward is the part of the tests that pass.
"""

from __future__ import annotations

from sandbox_gym import Sandbox
from sandbox_gym.tasks import Prepared, Task

GRADER = """
import json, median
cases = [([3, 1, 2], 2), ([5], 5), ([4, 1, 3, 2], 2.5)]
passed = sum(median.median(numbers) == expected for numbers, expected in cases)
print(json.dumps({"score": passed / len(cases)}))
"""
TASK = Task(
    id="median",
    prompt="median.py is wrong. Mend it.",
    files={"median.py": "def median(numbers):\n    return numbers[len(numbers) // 2]\n"},
    hidden={"grader.py": GRADER},
    check="python3 grader.py",
    scoring="json",
)


def half(box: Sandbox) -> None:
    box.write_file("median.py", "def median(numbers):\n    return sorted(numbers)[len(numbers) // 2]\n")


def whole(box: Sandbox) -> None:
    box.write_file("median.py", "from statistics import median\n")


def cheat(box: Sandbox) -> None:
    """Would print a score of its own, and end before the grader does."""
    line = "import os\nprint('{\"score\": 1.0}', flush=True)\nos._exit(0)\n"
    box.write_file("median.py", line)
    box.write_file("grader.py", line)


def main() -> None:
    with Prepared(TASK) as task:
        for agent in (half, whole, cheat):
            with task.start() as box:
                agent(box)
                verdict = task.grade(box)
                print(agent.__name__, round(verdict.score, 2), "flagged" if verdict.flags else "")


if __name__ == "__main__":
    main()
