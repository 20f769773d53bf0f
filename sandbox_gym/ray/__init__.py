"""sandbox_gym over a cluster, by Ray: jobs, a policy's scores, searches.

Light at import: each name is loaded when it is first used, and Ray with it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sandbox_gym.ray.jobs import Job as Job
    from sandbox_gym.ray.jobs import job as job
    from sandbox_gym.ray.scorer import PolicyScorer as PolicyScorer
    from sandbox_gym.ray.search import leaf_parallel as leaf_parallel
    from sandbox_gym.ray.search import root_parallel as root_parallel
    from sandbox_gym.ray.search import search_all as search_all

_HOMES = {
    "Job": "jobs",
    "PolicyScorer": "scorer",
    "job": "jobs",
    "leaf_parallel": "search",
    "root_parallel": "search",
    "search_all": "search",
}

__all__ = ["Job", "PolicyScorer", "job", "leaf_parallel", "root_parallel", "search_all"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'sandbox_gym.ray' has no attribute {name!r}")
    try:
        home = importlib.import_module(f"sandbox_gym.ray.{_HOMES[name]}")
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ImportError(
            "sandbox_gym.ray needs Ray: pip install 'sandbox-gym[ray]' (in the repository, .venv-oldest has it)"
        ) from None
    value = getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
