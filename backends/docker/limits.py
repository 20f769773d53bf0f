"""Which limits this daemon enforces: one of the others that was asked for is an error, a default one a warning."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Mapping
from typing import Any

from sandbox_gym.api import Limits
from sandbox_gym.errors import BackendUnavailable

_FLAGS = {"memory": "MemoryLimit", "cpus": "CpuCfsQuota", "pids": "PidsLimit"}
_DISK = (
    "docker bounds a container's disk only with the storage drivers btrfs and zfs, and overlay2 on xfs mounted with "
    "pquota (a daemon's data-root)"
)


class Enforced:
    def __init__(self, info: Mapping[str, Any]) -> None:
        self._driver = str(info["Driver"])
        self._missing = {limit for limit, flag in _FLAGS.items() if not info.get(flag)}
        self._lock = threading.Lock()
        self._warned = False

    @property
    def disk(self) -> bool:
        """Whether to ask for one: it may turn out that there can be none."""
        return "disk" not in self._missing

    def no_disk(self) -> None:
        self._missing.add("disk")

    def check(self, limits: Limits) -> None:
        """Raises BackendUnavailable; warns once."""
        wanted = {
            "memory": limits.memory_bytes,
            "cpus": limits.cpus,
            "pids": limits.pids,
            "disk": limits.disk_bytes,
        }
        missing = sorted(name for name in self._missing if wanted[name] is not None)
        refused = [name for name in missing if name in limits.explicit]
        if refused:
            raise BackendUnavailable(
                f"{', '.join(refused)} can't be enforced by this docker daemon (storage driver {self._driver}): "
                f"{_DISK if 'disk' in refused else 'its kernel lacks a control group'}. Pass "
                f'{", ".join(f"{name}=None" for name in refused)}, or use backend="native"'
            )
        with self._lock:
            warn, self._warned = bool(missing) and not self._warned, self._warned or bool(missing)
        if warn:
            warnings.warn(
                f"default limits not enforced by this docker daemon: {', '.join(missing)} (storage driver "
                f"{self._driver}). Asking for one explicitly is an error",
                RuntimeWarning,
                stacklevel=8,
            )
