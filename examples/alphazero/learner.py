"""The learner: a replay buffer of what searches found, and gradient steps towards it."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from examples.alphazero.network import Network, mirrored
from examples.alphazero.selfplay import Episode

_BATCH = 128
_CAPACITY = 20_000  # positions; the oldest go first


class Learner:
    """Moves the policy towards the actions of the lines that searches found, and the value towards their returns.

    AlphaZero's own target, the root's visit counts, says little before a reward is known: a search for what is new
    spreads its visits evenly. The line to the goal is where a search ends up better than its prior (expert iteration,
    Anthony et al. 2017). Its actions are smoothed, so that the next search still looks at others.

    Attributes:
        network: what plays and scores: the mean of the latest weights, which is steadier than the latest.
    """

    def __init__(self, network: Network) -> None:
        torch.set_num_threads(1)  # the other cores search
        self._latest = network
        self._mean = AveragedModel(network, multi_avg_fn=get_ema_multi_avg_fn(0.98))
        self.network: Network = self._mean.module
        self._optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, weight_decay=1e-4)
        self._replay: list[torch.Tensor] = []  # views, actions, returns; all [positions, ...]

    def add(self, episode: Episode) -> None:
        if episode.solved:
            new = [torch.tensor(part) for part in (episode.views, episode.actions, episode.returns)]
            old = self._replay or [part[:0] for part in new]
            self._replay = [torch.cat(parts)[-_CAPACITY:] for parts in zip(old, new)]

    def update(self) -> tuple[float, float] | None:
        """One gradient step; (policy loss, value loss), or None where there is nothing to learn from yet."""
        if not self._replay:
            return None
        chosen = torch.randint(len(self._replay[0]), (_BATCH,))
        views, actions, returns = (part[chosen] for part in self._replay)
        half = _BATCH // 2
        turned_views, turned_actions = mirrored(views[:half], actions[:half])
        logits, values = self._latest(torch.cat([turned_views, views[half:]]))
        policy_loss = torch.nn.functional.cross_entropy(
            logits, torch.cat([turned_actions, actions[half:]]), label_smoothing=0.1
        )
        value_loss = torch.nn.functional.mse_loss(values, returns)
        self._optimizer.zero_grad()
        (policy_loss + value_loss).backward()
        self._optimizer.step()
        self._mean.update_parameters(self._latest)
        return policy_loss.item(), value_loss.item()

    def state(self) -> dict[str, Any]:
        """All that `load` needs to go on."""
        return {
            "latest": self._latest.state_dict(),
            "mean": self._mean.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "replay": self._replay,
        }

    def load(self, state: dict[str, Any]) -> None:
        self._latest.load_state_dict(state["latest"])
        self._mean.load_state_dict(state["mean"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._replay = state["replay"]
