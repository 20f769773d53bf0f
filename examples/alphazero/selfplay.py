"""Self-play: a Ray actor that searches levels over live snapshots of a sandbox, and plays what it found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
import ray

from examples.alphazero.network import Views, view
from sandbox_gym.errors import SandboxError
from sandbox_gym.ray.scorer import PolicyScorer
from sandbox_gym.search import MCTS, PUCT, Novelty, observation_key
from sandbox_gym.search.tree import Node

ENTRY_POINT = "sandbox_gym.envs.fully_observable:make"
TRIES = 3  # of an episode whose sandbox dies or hangs

Floats = npt.NDArray[np.float32]

_NO_STEPS = (np.zeros((0, 0, 0), np.uint8), np.zeros(0, np.int64), np.zeros(0, np.float32))


@dataclass(frozen=True)
class Episode:
    """One level: searched from its start until the goal was found, then played. T is 0 where it wasn't found.

    `failures` counts the sandboxes and actors that were lost on the way; each time the level was begun anew.
    """

    views: Views  # [T, side, side]
    actions: npt.NDArray[np.int64]  # [T]
    returns: Floats  # [T], discounted
    solved: bool
    num_nodes: int
    failures: int


class SelfPlay:
    """An actor that searches, with one sandbox of its own."""

    def __init__(self, env_id: str, discount: float) -> None:
        self._env_id = env_id
        self._discount = discount
        self._env: Any = None
        self._failures = int(ray.get_runtime_context().was_current_actor_reconstructed)

    def play(self, scorer: PolicyScorer, seed: int, num_simulations: int) -> Episode:
        """The level of this seed. Raises what the last try raised when none ended well."""
        for tries_left in reversed(range(TRIES)):
            try:
                return self._play(scorer, seed, num_simulations)
            except SandboxError:
                self._failures += 1
                self._close()
                if not tries_left:
                    raise
        raise AssertionError("unreachable")

    def _play(self, scorer: PolicyScorer, seed: int, num_simulations: int) -> Episode:
        if self._env is None:
            self._env = gymnasium.make(
                "sandbox_gym:Sandbox-v0", entry_point=ENTRY_POINT, env_kwargs={"env_id": self._env_id}
            )
        first, _ = self._env.reset(seed=seed)
        found = MCTS(
            num_simulations=num_simulations,
            discount=self._discount,
            evaluate=guided_by(scorer),
            action_selection=PUCT(pb_c_init=5.0),
            key=observation_key,
            batch_size=8,
            max_snapshots=2000,
            stop_when=reached_goal,
            seed=seed,
        ).search(self._env)
        failures, self._failures = self._failures, 0
        if found.found is None:
            return Episode(*_NO_STEPS, False, found.num_nodes, failures)
        line = found.principal_variation
        played = self._env.unwrapped.rollout(line, observations=True)
        return Episode(
            views=np.array([view(seen) for seen in (first, *played.observations[:-1])]),
            actions=np.array(line),
            returns=discounted(played.rewards, self._discount),
            solved=bool(played.rewards.sum() > 0),
            num_nodes=found.num_nodes,
            failures=failures,
        )

    def _close(self) -> None:
        env, self._env = self._env, None
        if env is not None:
            env.close()


def guided_by(scorer: PolicyScorer) -> Any:
    """An `evaluate` function for one search: the network's logits and values, with a bonus for what this search hasn't
    seen yet. Where nothing is known of the reward, the bonus leads; where the network is sure of the way, its prior.
    """
    novelty = Novelty()

    def evaluate(observations: list[Any]) -> tuple[Any, Any]:
        logits, values = scorer.evaluate([view(seen) for seen in observations])
        return logits, values + novelty(observations)[1]

    return evaluate


def reached_goal(node: Node) -> bool:
    return node.reward > 0


def discounted(rewards: npt.NDArray[np.float64], discount: float) -> Floats:
    """The return from each step on: [T]."""
    returns = np.zeros(len(rewards), np.float32)
    ahead = 0.0
    for step in reversed(range(len(rewards))):
        ahead = returns[step] = rewards[step] + discount * ahead
    return returns
