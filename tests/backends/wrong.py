"""Backends that do one thing wrong each, for the suite to find out."""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Sequence
from typing import Any

from sandbox_gym.api import Deviation, Live, SandboxSpec, Taken
from sandbox_gym.backends.native.client import NativeBackend
from sandbox_gym.channel import Channel
from sandbox_gym.errors import SnapshotError


class Shares(NativeBackend):
    """Copies that are made at once are one and the same guest."""

    def restore(self, snapshot_id: str, *, names: Sequence[str | None], **how: Any) -> list[Live]:
        (first,) = super().restore(snapshot_id, names=names[:1], **how)
        others = [
            Live(f"{first.id}-{number}", name or "", Channel(first.channel.sock.dup(), name or ""))
            for number, name in enumerate(names[1:])
        ]
        return [first, *others]

    def terminate(self, live: Live, reason: str | None = None) -> None:
        if "-" not in live.id:
            super().terminate(live, reason)
        else:
            live.channel.close()


class Patient(NativeBackend):
    """Takes its time."""

    def create(self, spec: SandboxSpec, *, name: str | None, timeout: float) -> Live:
        return super().create(spec, name=name, timeout=timeout + 60)


class Deaf(NativeBackend):
    """Interrupts nothing."""

    def interrupt(self, live: Live) -> None:
        pass


class Generous(NativeBackend):
    """Enforces no limit of memory or disk."""

    def create(self, spec: SandboxSpec, *, name: str | None, timeout: float) -> Live:
        limits = dataclasses.replace(spec.limits, memory_bytes=4 << 30, disk_bytes=None)
        return super().create(dataclasses.replace(spec, limits=limits), name=name, timeout=timeout)


class Talkative(NativeBackend):
    """Gives guests the host's environment."""

    def create(self, spec: SandboxSpec, *, name: str | None, timeout: float) -> Live:
        env = {**os.environ, **spec.env}
        return super().create(dataclasses.replace(spec, env=env), name=name, timeout=timeout)


class Careless(NativeBackend):
    """Copies have their origin's network, whatever they were to have."""

    def restore(self, snapshot_id: str, **how: Any) -> list[Live]:
        return super().restore(snapshot_id, **{**how, "network": "same"})


class Littering(NativeBackend):
    """Makes one sandbox more than it was asked for."""

    def create(self, spec: SandboxSpec, *, name: str | None, timeout: float) -> Live:
        super().create(spec, name=None, timeout=timeout)
        return super().create(spec, name=name, timeout=timeout)


class Vain(NativeBackend):
    """Can do what it says that it can't."""

    deviations = (Deviation("fork.siblings_are_sealed", "copies are not made here"),)


class Confused(NativeBackend):
    """Speaks of a check that there is not."""

    deviations = (Deviation("fork.makes_coffee", "there is no kitchen"),)


class Refuses(NativeBackend):
    """Takes no snapshots, and doesn't say so beforehand."""

    def snapshot(self, live: Live, **how: Any) -> Taken:
        raise SnapshotError(f"sandbox {live.name}: memory can't be captured here")


class Honest(Refuses):
    """Takes no snapshots, as it says."""

    deviations = Vain.deviations


class Breaks(Honest):
    """Ends what it can't copy."""

    def snapshot(self, live: Live, **how: Any) -> Taken:
        if how["settled"]:
            self.terminate(live)
        return super().snapshot(live, **how)


class Crashes(Honest):
    """Says what it can't do by failing somehow."""

    def snapshot(self, live: Live, **how: Any) -> Taken:
        live.channel.sock.shutdown(socket.SHUT_RDWR)
        return NativeBackend.snapshot(self, live, **how)
