"""A value for states where rewards are too rare to guide a search: how seldom their rarest feature was seen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import numpy as np

from sandbox_gym.search.tree import Floats


class Novelty:
    """An `evaluate` function: the value of a state is `scale / sqrt(n)`, n being how often its rarest feature was seen.

    A state that shows something for the first time, such as a door that stands open, is worth `scale`, and those
    that show it again ever less. It is the count-based bonus of Bellemare et al. 2016, over the features of width-1
    novelty search (Lipovetzky and Geffner 2012). Priors are uniform.

        MCTS(evaluate=Novelty(), key=observation_key, action_selection=PUCT(pb_c_init=5)).search(env)

    The values and q-values of the search then hold these bonuses beside the rewards: choose `scale` below the rewards
    that matter. Bonuses shrink as search goes on, so it wants more exploration than PUCT's usual constants give.
    The counts live as long as the object: make a new one for each search that must not depend on the last.

    Args:
        features: from an observation to what it shows. None: each element with its place, which suits observations
            of few distinct values (grids, RAM, flags), not continuous ones, where every number is new.
        scale: the greatest bonus.
    """

    def __init__(
        self, features: Callable[[Any], Iterable[Hashable]] | None = None, *, scale: float = 1.0
    ) -> None:
        self._features = features or elements
        self._scale = scale
        self._counts: Counter[Hashable] = Counter()

    def __call__(self, observations: list[Any]) -> tuple[None, Floats]:
        values = np.zeros(len(observations))
        for i, observation in enumerate(observations):
            features = list(self._features(observation))
            self._counts.update(features)
            rarest = min((self._counts[feature] for feature in features), default=0)
            values[i] = self._scale / np.sqrt(rarest) if rarest else 0.0
        return None, values


def elements(observation: Any) -> Iterable[Hashable]:
    """Each element of an observation with its place, through dicts, tuples, lists and arrays."""
    if isinstance(observation, Mapping):
        parts: Iterable[tuple[Any, Any]] = observation.items()
    elif isinstance(observation, (tuple, list)):
        parts = enumerate(observation)
    elif isinstance(observation, np.ndarray) and observation.ndim:
        yield from enumerate(observation.ravel().tolist())
        return
    else:
        yield observation.item() if isinstance(observation, np.ndarray) else observation
        return
    for place, part in parts:
        for element in elements(part):
            yield place, element
