"""An environment whose state is in a database: customers are to be moved to another layout, and none may be lost."""

from __future__ import annotations

from collections import Counter
from typing import Any

import gymnasium
import numpy as np

from examples.database.redis import Server

CUSTOMERS = 8
_FIRST = ("Ada", "Alan", "Barbara", "Donald", "Edsger", "Grace", "Leslie", "Tony")
_LAST = ("Lovelace", "Turing", "Liskov", "Knuth", "Dijkstra", "Hopper", "Lamport", "Hoare")
_EACH = "for _, key in ipairs(redis.call('KEYS', 'customer:*')) do {} end"
_MIGRATIONS = {
    "drop name": "redis.call('HDEL', key, 'name')",
    "split name": """
        local first, last = string.match(redis.call('HGET', key, 'name') or '', '(%S+) (%S+)')
        if first then redis.call('HSET', key, 'first', first, 'last', last) end""",
    "index by last name": """
        local last = redis.call('HGET', key, 'last')
        if last then redis.call('SADD', 'last:' .. last, key) end""",
}
ACTIONS = (*_MIGRATIONS, "audit")
_AUDIT = ACTIONS.index("audit")
_DOWNTIME = 0.1  # what a migration costs
_PASSED = 10.0

Observation = np.ndarray[Any, np.dtype[np.int32]]


class MigrationEnv(gymnasium.Env[Observation, np.int64]):
    """From `customer:N {name}` to `customer:N {first, last}`, and a set `last:L` of customers for each last name.

    A migration does its work on what it finds, and what it drops is gone. Its reward is how many entries went away for
    each customer, less those that came. The audit ends the episode, and is worth more than all else if every customer
    is there as the new layout has it, and nothing of the old one.

    Observation: [3], how many customers have a name, a last name, a place in the index. `info`: the number of the
    connection that it is read by, and how many connections the server was ever asked for.
    """

    observation_space = gymnasium.spaces.Box(0, CUSTOMERS, (3,), np.int32)
    action_space = gymnasium.spaces.Discrete(len(ACTIONS))

    def __init__(self) -> None:
        self.server = Server()
        self.redis = self.server.connect()
        self._customers: dict[str, tuple[str, str]] = {}

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed)
        self.redis("FLUSHALL")
        for number in range(CUSTOMERS):
            first, last = (str(self.np_random.choice(names)) for names in (_FIRST, _LAST))
            self._customers[f"customer:{number}"] = first, last
            self.redis("HSET", f"customer:{number}", "name", f"{first} {last}")
        return self._look(), self._tell()

    def step(self, action: np.int64) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        before = self._look()
        if action == _AUDIT:
            return before, _PASSED if self._passes() else 0.0, True, False, self._tell()
        self.redis("EVAL", _EACH.format(_MIGRATIONS[ACTIONS[action]]), 0)
        after = self._look()
        return after, float(np.sum(before - after)) / CUSTOMERS - _DOWNTIME, False, False, self._tell()

    def _look(self) -> Observation:
        fields = Counter[str]()
        for key in self.redis("KEYS", "customer:*"):
            fields.update(self.redis("HKEYS", key))
        indexed = sum(self.redis("SCARD", key) for key in self.redis("KEYS", "last:*"))
        return np.array([fields["name"], fields["last"], indexed], np.int32)

    def _tell(self) -> dict[str, Any]:
        asked = self.redis("INFO", "stats").partition("total_connections_received:")[2].split()[0]
        return {"connection": self.redis("CLIENT", "ID"), "connections": int(asked)}

    def _passes(self) -> bool:
        return all(
            self.redis("HMGET", key, "name", "first", "last") == [None, first, last]
            and self.redis("SISMEMBER", f"last:{last}", key)
            for key, (first, last) in self._customers.items()
        )
