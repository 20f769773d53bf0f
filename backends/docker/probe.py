"""What this machine's docker daemon can do for sandboxes, and what mends the rest: for `sandbox-gym doctor`."""

from __future__ import annotations

import importlib.util
import os
import shutil

from sandbox_gym.backends.native import criu
from sandbox_gym.backends.shared import programs
from sandbox_gym.checks import Check
from sandbox_gym.errors import SandboxError

_USE = 'backend="docker"'


def check() -> Check:
    if importlib.util.find_spec("docker") is None:
        return Check(
            "docker",
            "missing",
            f"the Python package is: {_USE} needs it",
            "pip install 'sandbox-gym[docker]'",
        )
    from .daemon import Daemon
    from .snapshots import ENABLE

    try:
        info = Daemon().info()
    except SandboxError as error:
        why, _, remedy = str(error).partition(": ")
        if shutil.which("dockerd") is not None:
            return Check(
                "docker", "limited", f"{_USE} does not work: {why}", remedy or "systemctl start docker"
            )
        return Check(
            "docker",
            "missing",
            f"no engine: {_USE}, images by name and Dockerfiles need it",
            "apt-get install -y docker.io",
        )
    version = f"{info['ServerVersion']}, runtimes {', '.join(sorted(info['Runtimes']))}"
    lacks = []
    if not info["ExperimentalBuild"]:
        lacks.append("it takes no checkpoints")
    if isinstance(criu.look(), programs.Lack):
        lacks.append("there is no criu for them")
    if os.geteuid() != 0:
        lacks.append("copies of checkpoints, and network rules, are root's")
    if lacks:
        return Check("docker", "limited", f"{version}: {', and '.join(lacks)}", ENABLE)
    return Check("docker", "ok", f"{version}: {_USE} works, with snapshots")
