"""B 8. Variants of a command, each in a fresh sandbox; the fastest copy that exits with 0 is kept."""

from __future__ import annotations

from sandbox_gym import explore

SUM = 'python3 -c "print({})" > answer'
VARIANTS = {
    "formula": SUM.format("10**7 * (10**7 - 1) // 2"),
    "loop": SUM.format("sum(range(10**7))"),
    "no such program": "fortran77 sum.f > answer",
}


def main() -> None:
    with explore(
        VARIANTS, timeout=120, parallel=1, memory="512Mi"
    ) as tried:  # image="name:tag" for one of docker's
        assert tried.winner is not None and tried.sandbox is not None, [trial.outputs for trial in tried]
        print("the fastest:", tried.winner.name, "->", tried.sandbox.read_text("answer").strip())
        for trial in tried:
            print(f"{trial.name}: {trial.status}, exit code {trial.outputs[-1].exit_code}")


if __name__ == "__main__":
    main()
