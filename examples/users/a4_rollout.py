"""A 4. A job for each candidate action: it restores an identical copy, plays the action, reads the score.

They run in parallel over all nodes that Ray has, with a progress bar and retries, and never more copies than the nodes
hold; results come in order. Needs Ray (`.venv-oldest`), root and criu.
"""

from __future__ import annotations

from examples.users.phone_call import play_to_decision_point
from sandbox_gym import Sandbox
from sandbox_gym.ray import job

ACTIONS = ["book_viewing", "ask_budget", "offer_callback"]


def main() -> None:
    with Sandbox.create(cpus=1, memory="1Gi") as box:
        play_to_decision_point(box)
        decision = box.snapshot("decision")

    @job(cpus=1, memory="1Gi", timeout=60)
    def rollout(action: str) -> float:
        with Sandbox.restore(decision) as copy:
            copy.run_code(f"step({action!r})")
            return float(copy.run_code("score()").value or "nan")

    for action, score in zip(ACTIONS, rollout.map(ACTIONS)):
        print(action, score)
    many = list(rollout.map(ACTIONS * 20))  # ten thousand work alike
    print(len(many), "rollouts,", len(set(many)), "scores")
    decision.delete()


if __name__ == "__main__":
    main()
