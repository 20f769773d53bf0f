"""A 6. The next rollout starts from the same snapshot; a policy that chooses runs on a GPU where the cluster has one.

Needs Ray and PyTorch (`.venv-oldest`).
"""

from __future__ import annotations

import numpy as np
import torch

from examples.users.phone_call import play_to_decision_point
from sandbox_gym import Sandbox
from sandbox_gym.ray import PolicyScorer

ACTIONS = ["book_viewing", "ask_budget", "offer_callback"]


class Policy(torch.nn.Module):
    """[b, 2] (mood, budget is known) to (prior_logits [b, 3], values [b])."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, len(ACTIONS) + 1)

    def forward(self, observations: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.layer(observations)
        return out[:, :-1], out[:, -1]


def rollout(decision: Sandbox, scorer: PolicyScorer) -> tuple[str, float]:
    """The policy's first choice from the decision point, and what it scores."""
    (copy,) = decision.fork(1)
    with copy:
        seen = copy.run_code("[mood, float(budget is not None)]").value or ""
        observation = np.array([[float(word) for word in seen.strip("[]").split(",")]], np.float32)
        logits, _ = scorer.submit(observation).result()
        action = ACTIONS[int(logits[0].argmax())]
        copy.run_code(f"step({action!r})")
        return action, float(copy.run_code("score()").value or "nan")


def main() -> None:
    torch.manual_seed(0)
    with Sandbox.create(cpus=1, memory="1Gi") as box, PolicyScorer(Policy()) as scorer:
        play_to_decision_point(box)
        first, second = rollout(box, scorer), rollout(box, scorer)
        print("the same again:", first == second)
        print("scored on", *scorer.stats().devices)


if __name__ == "__main__":
    main()
