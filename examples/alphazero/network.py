"""What the network sees of a level, and the network: a policy and a value from the agent's own point of view."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Views = npt.NDArray[np.uint8]

# MiniGrid's numbers of things (minigrid.core.constants.OBJECT_TO_IDX), and of actions.
_UNSEEN, _EMPTY, _DOOR, _AGENT = 0, 1, 4, 10
_NUM_OBJECTS = 10  # without the agent, who is always in the middle of the view
_NUM_KINDS = (
    _NUM_OBJECTS + 2
)  # an open door keeps the door's number; a closed and a locked one have their own
_TURN_LEFT, _TURN_RIGHT = 0, 1


def view(observation: npt.NDArray[Any]) -> Views:
    """A whole level [width, height, 3] as the agent in it has it: [side, side] kinds of things, with the agent in the
    middle, looking along the first axis. What is learnt in one place so holds in all others.

    Colours are left out: in the levels meant here there is one thing of a kind. What the agent carries shows by its
    absence.
    """
    objects, states = observation[..., 0], observation[..., 2]
    (x, y), *_ = np.argwhere(objects == _AGENT)
    kinds = np.where((objects == _DOOR) & (states > 0), _NUM_OBJECTS - 1 + states, objects)
    kinds[x, y] = _EMPTY
    width, height = kinds.shape
    middle = max(width, height) - 1
    seen = np.full((2 * middle + 1, 2 * middle + 1), _UNSEEN, np.uint8)
    seen[middle - x : middle - x + width, middle - y : middle - y + height] = kinds
    return np.ascontiguousarray(np.rot90(seen, -int(states[x, y])))


def mirrored(views: Any, actions: Any) -> tuple[Any, Any]:
    """Tensors of views [b, side, side] and actions [b], as a mirror shows them: left is right."""
    turned = torch.where(
        actions == _TURN_LEFT, _TURN_RIGHT, torch.where(actions == _TURN_RIGHT, _TURN_LEFT, actions)
    )
    return views.flip(2), turned


class Network(torch.nn.Module):
    """Views [b, side, side] to `(logits [b, num_actions], values [b])`: two hidden layers over one-hot kinds.

    It starts with equal logits and values of 0, so that the first searches explore alike in all directions.
    """

    def __init__(self, side: int, num_actions: int, hidden: int = 128) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Linear(side * side * (_NUM_KINDS - 1), hidden),
            torch.nn.ReLU(),
            torch.nn.Linear(hidden, hidden),
            torch.nn.ReLU(),
        )
        self.policy = torch.nn.Linear(hidden, num_actions)
        self.value = torch.nn.Linear(hidden, 1)
        for head in (self.policy, self.value):
            torch.nn.init.zeros_(head.weight)
            torch.nn.init.zeros_(head.bias)

    def forward(self, views: Any) -> tuple[Any, Any]:
        kinds = torch.nn.functional.one_hot(views.long(), _NUM_KINDS)[..., 1:]  # unseen is all zeros
        hidden = self.body(kinds.flatten(1).float())
        return self.policy(hidden), self.value(hidden).squeeze(-1)
