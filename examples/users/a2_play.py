"""A 2. An episode is played to a decision point in the sandbox's interpreter; later calls go on from there."""

from __future__ import annotations

from examples.users.phone_call import play_to_decision_point
from sandbox_gym import Sandbox


def main() -> None:
    with Sandbox.create(cpus=1, memory="1Gi") as box:
        play_to_decision_point(box)
        result = box.run_code("step('book_viewing'); print(score())\nsaid[-1]")
        print(result.stdout, end="")  # what was printed
        print(result.value)  # the last expression's value


if __name__ == "__main__":
    main()
