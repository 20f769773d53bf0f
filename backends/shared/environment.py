"""The environment variables that a guest's process starts with, on every backend."""

from __future__ import annotations

import os
from collections.abc import Mapping

_DEFAULT = {
    "HOME": "/root",
    "LANG": "C.UTF-8",
    "TERM": "xterm",
    # One thread in each guest: BLAS would start a pool on import, and the fork engine takes no threads along.
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",  # sets iterate alike in every guest: same seed, same trajectory
    "PYTHONDONTWRITEBYTECODE": "1",
}
_STANDARD_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def guest_environment(python: str, own: Mapping[str, str]) -> dict[str, str]:
    """`python`: the guest's interpreter; `own`: what the sandbox was asked to have, which goes over the rest."""
    return {**_DEFAULT, "PATH": f"{os.path.dirname(python)}:{_STANDARD_PATH}", **own}
