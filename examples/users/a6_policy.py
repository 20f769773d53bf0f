"""A 6. Rollout after rollout from the same snapshot, led by a policy that runs on a GPU where the cluster has one.

Eight branches of one phone call are played at once: a single call to the scorer gives all of their next moves. After
each round the policy moves towards what went well (REINFORCE), and the next round starts at the same moment.

Needs Ray and PyTorch (`.venv-oldest`).
"""

from __future__ import annotations

import numpy as np
import torch

from sandbox_gym import Snapshot
from sandbox_gym.env import SandboxEnv
from sandbox_gym.envs.call_agent import ACTIONS
from sandbox_gym.envs.call_agent_observation import SIZE
from sandbox_gym.ray import PolicyScorer

BRANCHES, ROUNDS = 8, 6


class Policy(torch.nn.Module):
    """[b, SIZE] to (prior_logits [b, num_actions], values [b])."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(SIZE, 64), torch.nn.Tanh(), torch.nn.Linear(64, len(ACTIONS) + 1)
        )

    def forward(self, observations: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.layers(observations)
        return out[:, :-1], out[:, -1]


class Played:
    """What a branch has seen, done and earned."""

    def __init__(self, env: SandboxEnv, observation: np.ndarray) -> None:
        self.env = env
        self.observations, self.actions, self.earned = [observation], list[int](), 0.0

    def step(self, action: int) -> bool:
        """True when the call is over."""
        observation, reward, over, _, _ = self.env.step(np.int64(action))
        self.observations.append(observation)
        self.actions.append(action)
        self.earned += reward
        return over


def play(env: SandboxEnv, decision: Snapshot, scorer: PolicyScorer, rng: np.random.Generator) -> list[Played]:
    """Plays copies of a moment to their ends, each with random numbers of its own."""
    observation, _ = env.restore(decision)
    played = [Played(copy, observation) for copy in env.branch(BRANCHES, rng="diverge")]
    alive = list(played)
    try:
        while alive:
            logits, _ = scorer.evaluate([branch.observations[-1] for branch in alive])
            noisy = logits + rng.gumbel(size=logits.shape)  # samples each row's softmax
            alive = [b for b, action in zip(alive, noisy.argmax(axis=1)) if not b.step(int(action))]
    finally:
        for branch in played:
            branch.env.close()
    return played


def learn(policy: Policy, optimiser: torch.optim.Optimizer, played: list[Played]) -> None:
    earned = torch.tensor([branch.earned for branch in played])
    advantage = (earned - earned.mean()) / (earned.std() + 1e-6)
    loss = torch.zeros(())
    for branch, weight in zip(played, advantage):
        logits, _ = policy(torch.tensor(np.stack(branch.observations[:-1])))
        chosen = torch.distributions.Categorical(logits=logits).log_prob(torch.tensor(branch.actions))
        loss = loss - weight * chosen.sum() / len(played)
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()


def main() -> None:
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    policy = Policy()
    optimiser = torch.optim.Adam(policy.parameters(), lr=0.02)
    env = SandboxEnv("sandbox_gym:CallAgent-v0", cpus=1, memory="1Gi")
    try:
        _, info = env.reset(seed=7, options={"decision": 1})
        print(info["transcript"])
        decision = env.snapshot("decision")
        with PolicyScorer(policy) as scorer:
            for number in range(ROUNDS):
                played = play(env, decision, scorer, rng)
                learn(policy, optimiser, played)
                scorer.set_weights(policy.state_dict(), version=number + 1)
                mean = np.mean([branch.earned for branch in played])
                print(
                    f"round {number + 1}: {len(played)} calls from the same moment, mean return {mean:+.2f}"
                )
            print("scored on", *scorer.stats().devices)
    finally:
        env.close()


if __name__ == "__main__":
    main()
