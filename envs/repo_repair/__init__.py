"""`RepoRepair-v0`: real packages with one bug put in, and their own tests as hidden graders; and what makes them."""

from __future__ import annotations

from .env import RepoRepairEnv
from .generator import Solution, generate

__all__ = ["RepoRepairEnv", "Solution", "generate"]
