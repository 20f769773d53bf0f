"""Where this machine's runsc is, and what is lacking where there is none to use.

It is looked for with the client's environment: SANDBOX_GYM_RUNSC and nothing else where that is set; else the first
that is new enough, on PATH and then in the system's own folders, which a PATH may lack.
"""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from sandbox_gym import errors

_OLDEST = 20240101  # versions are dates; that of 2022 loses a container that it checkpoints
_SYSTEM_FOLDERS = ("/usr/local/sbin", "/usr/sbin", "/sbin")
_SECONDS = 20  # for `runsc --version`, which takes 20 ms
_FIRST_USER_NAMESPACE = 0xEFFFFFFD  # its inode: PROC_USER_INIT_INO
_INSTALLER = (
    Path(__file__).resolve().parents[2] / "scripts/install-runsc.sh"
)  # in a checkout of the repository


@dataclass(frozen=True)
class Runsc:
    """One that the backend can use."""

    path: str
    version: str

    def __str__(self) -> str:
        return f"{self.path} {self.version}"


@dataclass(frozen=True)
class Lack:
    """Why there is none to use, and what mends it."""

    why: str
    remedy: str


def find() -> Runsc:
    """The one to use. Raises BackendUnavailable: there is none, none is new enough, or this is not root."""
    found = look()
    if isinstance(found, Lack):
        raise errors.BackendUnavailable(
            f"the gvisor backend can't start: {found.why}; what mends it: {found.remedy}"
        )
    return found


def look() -> Runsc | Lack:
    if os.geteuid() != 0 or os.stat("/proc/self/ns/user").st_ino != _FIRST_USER_NAMESPACE:
        return Lack("runsc restores sandboxes for root only", "run as root, or use backend='native'")
    chosen = os.environ.get("SANDBOX_GYM_RUNSC")
    unfit = []
    for path in [chosen] if chosen else _candidates():
        version = _version(path)
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


def _candidates() -> list[str]:
    folders = [*os.environ.get("PATH", os.defpath).split(":"), *_SYSTEM_FOLDERS]
    # Absolute ones only: the supervisor stands in another folder than the client.
    found = [f"{folder}/runsc" for folder in dict.fromkeys(folders) if folder.startswith("/")]
    return [path for path in found if os.access(path, os.X_OK)]


def _version(path: str) -> str:
    """Such as "0.0~20240729.0" or "release-20240729.0"; "" where it can't be run, or prints none."""
    try:
        result = subprocess.run(
            [path, "--version"], check=True, capture_output=True, timeout=_SECONDS, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    stated = re.search(rb"^runsc version (\S+)", result.stdout, re.MULTILINE)
    return stated[1].decode(errors="replace") if stated else ""


def _install() -> str:
    if _INSTALLER.exists():
        return str(_INSTALLER)
    return (
        "apt-get install -y runsc (Debian 13 has it), or scripts/install-runsc.sh of sandbox-gym's repository"
    )
