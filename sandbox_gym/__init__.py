"""Gymnasium environments that are isolated containers, to be snapshotted and branched.

Light at import: each name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from sandbox_gym import registration

if TYPE_CHECKING:
    from sandbox_gym._budget import set_budget as set_budget
    from sandbox_gym._snapshot import Snapshot as Snapshot
    from sandbox_gym.api import CodeResult as CodeResult
    from sandbox_gym.api import ErrorInfo as ErrorInfo
    from sandbox_gym.api import ExecResult as ExecResult
    from sandbox_gym.api import FileInfo as FileInfo
    from sandbox_gym.api import Mount as Mount
    from sandbox_gym.api import ProcessInfo as ProcessInfo
    from sandbox_gym.api import ShellResult as ShellResult
    from sandbox_gym.branching import Branch as Branch
    from sandbox_gym.env import SandboxEnv as SandboxEnv
    from sandbox_gym.envs.task import TaskEnv as TaskEnv
    from sandbox_gym.envs.terminal import TerminalEnv as TerminalEnv
    from sandbox_gym.errors import BackendUnavailable as BackendUnavailable
    from sandbox_gym.errors import BudgetExceeded as BudgetExceeded
    from sandbox_gym.errors import GraderError as GraderError
    from sandbox_gym.errors import ImageError as ImageError
    from sandbox_gym.errors import ItemFailed as ItemFailed
    from sandbox_gym.errors import LimitExceeded as LimitExceeded
    from sandbox_gym.errors import ProtocolError as ProtocolError
    from sandbox_gym.errors import SandboxDied as SandboxDied
    from sandbox_gym.errors import SandboxError as SandboxError
    from sandbox_gym.errors import SandboxTimeout as SandboxTimeout
    from sandbox_gym.errors import SnapshotError as SnapshotError
    from sandbox_gym.errors import TaskError as TaskError
    from sandbox_gym.hosting import Trajectory as Trajectory
    from sandbox_gym.images.image import Image as Image
    from sandbox_gym.network import Allow as Allow
    from sandbox_gym.network import NetworkRecord as NetworkRecord
    from sandbox_gym.process import Process as Process
    from sandbox_gym.process import ShellSession as ShellSession
    from sandbox_gym.registration import register_envs as register_envs
    from sandbox_gym.sandbox import Sandbox as Sandbox
    from sandbox_gym.tasks.task import Task as Task
    from sandbox_gym.tasks.verdict import Verdict as Verdict
    from sandbox_gym.template import Template as Template
    from sandbox_gym.vector import SandboxVectorEnv as SandboxVectorEnv

__version__ = "0.1.0"

_HOMES = {
    "Allow": "network",
    "BackendUnavailable": "errors",
    "Branch": "branching",
    "BudgetExceeded": "errors",
    "CodeResult": "api",
    "ErrorInfo": "api",
    "ExecResult": "api",
    "FileInfo": "api",
    "GraderError": "errors",
    "Image": "images.image",
    "ImageError": "errors",
    "ItemFailed": "errors",
    "LimitExceeded": "errors",
    "Mount": "api",
    "NetworkRecord": "network",
    "Process": "process",
    "ProcessInfo": "api",
    "ProtocolError": "errors",
    "Sandbox": "sandbox",
    "SandboxDied": "errors",
    "SandboxEnv": "env",
    "SandboxError": "errors",
    "SandboxTimeout": "errors",
    "SandboxVectorEnv": "vector",
    "ShellResult": "api",
    "ShellSession": "process",
    "Snapshot": "_snapshot",
    "SnapshotError": "errors",
    "Task": "tasks.task",
    "TaskEnv": "envs.task",
    "TaskError": "errors",
    "Template": "template",
    "TerminalEnv": "envs.terminal",
    "Trajectory": "hosting",
    "Verdict": "tasks.verdict",
    "register_envs": "registration",
    "set_budget": "_budget",
}

__all__ = [
    "Allow",
    "BackendUnavailable",
    "Branch",
    "BudgetExceeded",
    "CodeResult",
    "ErrorInfo",
    "ExecResult",
    "FileInfo",
    "GraderError",
    "Image",
    "ImageError",
    "ItemFailed",
    "LimitExceeded",
    "Mount",
    "NetworkRecord",
    "Process",
    "ProcessInfo",
    "ProtocolError",
    "Sandbox",
    "SandboxDied",
    "SandboxEnv",
    "SandboxError",
    "SandboxTimeout",
    "SandboxVectorEnv",
    "ShellResult",
    "ShellSession",
    "Snapshot",
    "SnapshotError",
    "Task",
    "TaskEnv",
    "TaskError",
    "Template",
    "TerminalEnv",
    "Trajectory",
    "Verdict",
    "register_envs",
    "set_budget",
]


def __getattr__(name: str) -> Any:
    if name in ("envs", "errors", "search", "tasks"):
        return importlib.import_module(f"sandbox_gym.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'sandbox_gym' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"sandbox_gym.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


registration.register_when_imported()
