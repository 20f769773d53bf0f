"""Programs that a backend runs: where they are looked for, and what they say of themselves."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

_SYSTEM_FOLDERS = ("/usr/local/sbin", "/usr/sbin", "/sbin")  # which a PATH may lack
_SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"  # in a checkout of the repository
_FIRST_USER_NAMESPACE = 0xEFFFFFFD  # its inode: PROC_USER_INIT_INO
_SECONDS = 20  # for a program to tell its version, which takes 20 ms


@dataclass(frozen=True)
class Lack:
    """Why there is no program to use, and what mends it."""

    why: str
    remedy: str


def is_root() -> bool:
    """An ordinary user's supervisor has user id 0 too, in a user namespace of its own."""
    return os.geteuid() == 0 and os.stat("/proc/self/ns/user").st_ino == _FIRST_USER_NAMESPACE


def candidates(name: str) -> list[str]:
    """Programs of that name, on PATH and then in the system's own folders."""
    folders = [*os.environ.get("PATH", os.defpath).split(":"), *_SYSTEM_FOLDERS]
    # Absolute ones only: a supervisor and its jobs stand in other folders than the client.
    found = [f"{folder}/{name}" for folder in dict.fromkeys(folders) if folder.startswith("/")]
    return [path for path in found if os.access(path, os.X_OK)]


def stated(path: str, pattern: str) -> str:
    """What a program says for `--version` at the first group of a pattern (`re.MULTILINE`); "" where it can't be run,
    or says no such thing.
    """
    try:
        result = subprocess.run(
            [path, "--version"],
            check=True,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    match = re.search(pattern, result.stdout, re.MULTILINE)
    return match[1] if match else ""


def installer(script: str) -> Path | None:
    """That script of the repository, where this is a checkout of it."""
    path = _SCRIPTS / script
    return path if path.exists() else None
