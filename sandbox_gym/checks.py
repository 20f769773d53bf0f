"""One thing that a machine has, has in part, or lacks: what `sandbox-gym doctor` shows and backends' probes return."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Check:
    """`meaning`: what was found, and what follows. `remedy`: the command that mends it; "" where none is needed."""

    name: str
    state: Literal["ok", "limited", "missing"]
    meaning: str
    remedy: str = ""
