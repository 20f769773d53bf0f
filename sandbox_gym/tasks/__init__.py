"""Tasks for agents: what they are asked, and how what they left is judged, out of their reach."""

from __future__ import annotations

from sandbox_gym.tasks.prepared import Prepared
from sandbox_gym.tasks.task import PROTECTED, Task
from sandbox_gym.tasks.verdict import Verdict

__all__ = ["PROTECTED", "Prepared", "Task", "Verdict"]
