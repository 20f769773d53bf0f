"""Where this machine's criu is, and what is lacking where the CRIU engine can't use one.

It is looked for with the client's environment, which the supervisor has too: SANDBOX_GYM_CRIU and nothing else where
that is set; else the first that is new enough, on PATH and then in the system's own folders, which a PATH may lack.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
from dataclasses import dataclass

from sandbox_gym import errors
from sandbox_gym.backends.shared import programs
from sandbox_gym.backends.shared.programs import Lack

_OLDEST = (4, 1)
_VERSION = r"^Version: *(\d[\w.-]*)"  # such as 4.2.1-sandbox-gym


@dataclass(frozen=True)
class Criu:
    """A criu that the engine can use."""

    path: str
    version: tuple[int, ...]
    mended: bool = False  # whether it has what scripts/criu-patches brings

    def __str__(self) -> str:
        return f"{self.path} {_dotted(self.version)}"


@functools.cache  # a failure is not kept: criu may be installed meanwhile
def find() -> Criu:
    """The criu to use.

    Raises:
        BackendUnavailable: there is none, none is new enough, or this is not root.
    """
    found = look()
    if isinstance(found, Lack):
        raise errors.BackendUnavailable(f"{found.why}; what mends it: {found.remedy}")
    return found


def installed() -> bool:
    """Whether there seems to be one, without asking it for its version."""
    return programs.is_root() and bool(os.environ.get("SANDBOX_GYM_CRIU") or programs.candidates("criu"))


def look() -> Criu | Lack:
    """The same, looked up each time."""
    if not programs.is_root():
        return Lack("criu works for root only, and here an ordinary user makes the sandboxes", "run as root")
    chosen = os.environ.get("SANDBOX_GYM_CRIU")
    unfit = []
    for path in [chosen] if chosen else programs.candidates("criu"):
        stated = programs.stated(path, _VERSION)
        version = tuple(map(int, re.findall(r"\d+", stated.split("-")[0])))
        if version >= _OLDEST:
            return Criu(path, version, mended=stated.endswith("-sandbox-gym"))
        unfit.append(f"{path} is {_dotted(version)}" if version else f"{path} does not tell its version")
    needed = f"criu {_dotted(_OLDEST)} or newer is needed"
    if chosen:
        return Lack(f"SANDBOX_GYM_CRIU: {unfit[0]}, and {needed}", "unset SANDBOX_GYM_CRIU, or name another")
    return Lack(f"{', '.join(unfit) or 'there is no criu'}, and {needed}", _install())


def complaint(criu: Criu) -> str:
    """What `criu check` says this kernel lacks; "" when it lacks nothing that criu can't do without."""
    try:
        result = subprocess.run(
            [criu.path, "check"],
            check=False,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=30,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    if result.returncode == 0:
        return ""
    lines = f"{result.stdout}\n{result.stderr}".split("\n")
    wrong = [line.strip() for line in lines if "Error" in line] or [line.strip() for line in lines if line]
    return wrong[0] if wrong else f"it ended with {result.returncode}"


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _install() -> str:
    return str(
        programs.installer("install-criu.sh")
        or "apt-get install -y criu (Debian 13 has 4.1), or scripts/install-criu.sh of sandbox-gym's repository"
    )
