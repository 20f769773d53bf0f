"""Where this machine's runsc is, and what is lacking where there is none to use.

It is looked for with the client's environment: SANDBOX_GYM_RUNSC and nothing else where that is set; else the first
that is new enough, on PATH and then in the system's own folders, which a PATH may lack.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from sandbox_gym import errors
from sandbox_gym.backends.shared import programs
from sandbox_gym.backends.shared.programs import Lack

_OLDEST = 20240101  # versions are dates; that of 2022 loses a container that it checkpoints
_VERSION = r"^runsc version (\S+)"  # such as 0.0~20240729.0 or release-20240729.0


@dataclass(frozen=True)
class Runsc:
    """One that the backend can use."""

    path: str
    version: str

    def __str__(self) -> str:
        return f"{self.path} {self.version}"


def find() -> Runsc:
    """The one to use. Raises BackendUnavailable: there is none, none is new enough, or this is not root."""
    found = look()
    if isinstance(found, Lack):
        raise errors.BackendUnavailable(
            f"the gvisor backend can't start: {found.why}; what mends it: {found.remedy}"
        )
    return found


def look() -> Runsc | Lack:
    if not programs.is_root():
        return Lack("runsc restores sandboxes for root only", "run as root, or use backend='native'")
    chosen = os.environ.get("SANDBOX_GYM_RUNSC")
    unfit = []
    for path in [chosen] if chosen else programs.candidates("runsc"):
        version = programs.stated(path, _VERSION)
        date = re.search(r"[-~](20\d{6})\.", version)
        if date and int(date[1]) >= _OLDEST:
            return Runsc(path, version)
        unfit.append(f"{path} is {version}" if version else f"{path} does not tell its version")
    needed = "gVisor's runsc of 2024 or newer is needed"
    if chosen:
        return Lack(
            f"SANDBOX_GYM_RUNSC: {unfit[0]}, and {needed}", "unset SANDBOX_GYM_RUNSC, or name another"
        )
    return Lack(f"{', '.join(unfit) or 'there is no runsc'}, and {needed}", _install())


def _install() -> str:
    return str(
        programs.installer("install-runsc.sh")
        or "apt-get install -y runsc (Debian 13 has it), or scripts/install-runsc.sh of sandbox-gym's repository"
    )
