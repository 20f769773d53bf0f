"""Gymnasium's registry entry, made as soon as both packages are imported, in either order."""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

ENV_ID = "Sandbox-v0"
# Environments that come with it, each a plain one or one that makes its own sandbox.
_SHIPPED = {
    "CallAgent-v0": "sandbox_gym.envs.call_agent:CallAgentEnv",
    "RepoRepair-v0": "sandbox_gym.envs.repo_repair:RepoRepairEnv",
    "SandboxTask-v0": "sandbox_gym.envs.task:TaskEnv",
    "ShellQuest-v0": "sandbox_gym.envs.shell_quest:ShellQuestEnv",
}


def register_envs() -> None:
    """Registers Sandbox-v0, and what comes with it, with Gymnasium. Idempotent; imports none of what it registers."""
    import gymnasium

    if ENV_ID not in gymnasium.registry:
        gymnasium.register(
            id=ENV_ID,
            entry_point="sandbox_gym.env:make_env",
            vector_entry_point="sandbox_gym.vector:SandboxVectorEnv",
        )
    for env_id, entry_point in _SHIPPED.items():
        if env_id not in gymnasium.registry:
            gymnasium.register(id=env_id, entry_point=entry_point)


def register_when_imported() -> None:
    """Registers now if Gymnasium is imported, else right after it is: sandbox_gym itself stays light."""
    if "gymnasium" in sys.modules:
        register_envs()
    else:
        sys.meta_path.insert(0, _Watch())


class _Watch(MetaPathFinder):
    """Finds Gymnasium where it is, and adds a last step to its import."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != "gymnasium":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenRegister(spec.loader)
        return spec


class _ThenRegister(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        register_envs()
