"""The network's own policy, without search, on levels that were never trained on, in vectorised sandboxes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
import torch

from examples.alphazero.network import Network, view
from examples.alphazero.selfplay import ENTRY_POINT, TRIES
from sandbox_gym.errors import SandboxDied, SandboxError
from sandbox_gym.search import observation_key

LANES = 20

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Score:
    """`failures` are lanes whose sandbox was lost: they were played again, and are in no rate."""

    success: float
    failures: int


class Evaluator:
    """An actor that plays the most likely action in every state, to the episode's end.

    The level has no chance in it, so a policy that comes back to a state goes round until the time limit: such an
    episode counts as failed there and then.
    """

    def __init__(self, env_id: str) -> None:
        self._venv: Any = gymnasium.make_vec(
            "sandbox_gym:Sandbox-v0",
            num_envs=LANES,
            vectorization_mode="vector_entry_point",
            entry_point=ENTRY_POINT,
            env_kwargs={"env_id": env_id},
        )

    def shape(self) -> tuple[int, int]:
        """(side of a view, number of actions)."""
        width, height, _ = self._venv.single_observation_space.shape
        return 2 * max(width, height) - 1, int(self._venv.single_action_space.n)

    def evaluate(self, network: Network, seeds: Sequence[int]) -> Score:
        """Raises SandboxError when a level fails again and again."""
        waiting = list(seeds)
        solved = failures = 0
        while waiting:
            batch = waiting[:LANES]
            try:
                success, lost = self._play(network, batch)
            except SandboxDied:  # all lanes at once; the next reset makes new ones
                success, lost = np.zeros(len(batch), np.bool_), np.ones(len(batch), np.bool_)
            waiting = waiting[LANES:] + [seed for seed, gone in zip(batch, lost, strict=True) if gone]
            solved += int(success.sum())
            failures += int(lost.sum())
            if failures > TRIES * len(seeds):
                raise SandboxError(f"{failures} sandboxes lost in one evaluation: see the log of this actor")
        return Score(solved / len(seeds), failures)

    def _play(self, network: Network, seeds: list[int]) -> tuple[Bools, Bools]:
        """One episode of each seed: which were solved, and which lanes were lost. Lanes too many repeat the last."""
        lanes = seeds + [seeds[-1]] * (LANES - len(seeds))
        observations, _ = self._venv.reset(seed=lanes)
        over, solved, lost = (np.zeros(LANES, np.bool_) for _ in range(3))
        met: list[set[Any]] = [set() for _ in lanes]
        while not over.all():
            with torch.no_grad():
                logits, _ = network(torch.as_tensor(np.stack([view(seen) for seen in observations])))
            observations, rewards, terminated, truncated, infos = self._venv.step(logits.argmax(1).numpy())
            lost |= infos.get("_sandbox_error", False) & ~over
            solved |= (rewards > 0) & ~over
            over |= terminated | truncated
            for lane, seen in enumerate(observations):
                key = observation_key(seen)
                over[lane] |= key in met[lane]
                met[lane].add(key)
        return solved[: len(seeds)], lost[: len(seeds)]
