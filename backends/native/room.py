"""Whether more fits: under the cap and the budget, in this process's descriptors, with names that are free."""

from __future__ import annotations

import resource
from typing import Any

from sandbox_gym.backends.egress.gateway import Gateway
from sandbox_gym.errors import BackendUnavailable, BudgetExceeded, LimitExceeded, SandboxError

from .population import Population
from .spares import Spares

_DESCRIPTORS_EACH, _DESCRIPTORS_KEPT = 5, 256
_WHAT_HELPS = {
    "memory": "delete snapshots and terminate sandboxes, or let set_budget(evict=True) put snapshots on disk",
    "disk": "delete snapshots and terminate sandboxes",
}


class Room:
    def __init__(self, guests: Population, spares: Spares, gateway: Gateway, cap: int) -> None:
        self._guests = guests
        self._gateway = gateway
        self._cap = cap
        self._groups = spares.groups
        self._measures = {"memory": spares.groups.resident_bytes, "disk": spares.store.total_bytes}
        self._budget: dict[str, int] = {}

    def set_budget(self, budget: dict[str, int | None]) -> None:
        """Bytes of "memory" and of "disk". Raises BackendUnavailable where nothing counts them."""
        wanted = {what: most for what, most in budget.items() if most is not None}
        for what in wanted:
            if self._measures[what]() is None:
                raise BackendUnavailable(
                    f"the {what} of sandboxes can't be counted here: `sandbox-gym doctor` tells why"
                )
        self._budget = wanted

    def check_budget(self, request: dict[str, Any]) -> None:
        """Before more is made. Raises BudgetExceeded."""
        if not request["budgeted"]:
            return
        for what, most in self._budget.items():
            held = self._measures[what]() or 0
            if held >= most and what == "memory":
                held = min(held, self._groups.resident_bytes_now())
            if held >= most:
                raise BudgetExceeded(
                    f"the sandboxes and snapshots of this process hold {held} bytes of {what}, and its budget is "
                    f"{most}: {_WHAT_HELPS[what]}"
                )

    def check(self, names: list[str | None], *, replaced: str | None = None) -> None:
        """For that many more, less the one that is replaced. Raises LimitExceeded, SandboxError for a taken name."""
        self.check_descriptors(len(names))
        live = self._guests.living - (replaced in self._guests.sandboxes)
        if live + len(names) > self._cap:
            raise LimitExceeded(
                f"{live} sandboxes live here and {len(names)} more would pass the cap of {self._cap}: terminate some, "
                "or set SANDBOX_GYM_MAX_SANDBOXES before the first one"
            )
        taken = {node.name for node in self._guests.sandboxes.values()}
        for name in names:
            if name is not None and (name in taken or names.count(name) > 1):
                raise SandboxError(
                    f"a sandbox named {name!r} lives already: names are unique among the living"
                )

    def check_descriptors(self, more: int) -> None:
        """Every guest, snapshots included, holds some; without a check the first to fail would be anyone's."""
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        guests = len(self._guests.loop)  # a little more than they are
        kept = _DESCRIPTORS_KEPT + self._gateway.descriptors
        if (guests + more) * _DESCRIPTORS_EACH + kept > most:
            raise LimitExceeded(
                f"{guests} sandboxes and snapshots live here and {more} more would need more open files than the "
                f"{most} allowed: delete snapshots, or raise the hard limit (ulimit -Hn)"
            )
