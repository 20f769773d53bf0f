"""Whether more sandboxes fit: under the cap, in this process's descriptors, with names that are free."""

from __future__ import annotations

import resource

from sandbox_gym.errors import LimitExceeded, SandboxError

from .population import Population

_DESCRIPTORS_EACH, _DESCRIPTORS_KEPT = 5, 256


class Room:
    def __init__(self, guests: Population, cap: int) -> None:
        self._guests = guests
        self._cap = cap

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
        if (guests + more) * _DESCRIPTORS_EACH + _DESCRIPTORS_KEPT > most:
            raise LimitExceeded(
                f"{guests} sandboxes and snapshots live here and {more} more would need more open files than the "
                f"{most} allowed: delete snapshots, or raise the hard limit (ulimit -Hn)"
            )
