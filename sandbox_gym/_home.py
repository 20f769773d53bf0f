"""Where this user's templates and images lie: $SANDBOX_GYM_HOME, else a folder of the user's data."""

from __future__ import annotations

import os
from contextlib import suppress

from sandbox_gym.errors import SandboxError


def folder(what: str) -> str:
    """Of `what`, "templates" or "images". It may not be there yet."""
    home = os.environ.get("SANDBOX_GYM_HOME")
    if not home:
        data = os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")
        home = os.path.join(data, "sandbox-gym")
    return os.path.join(os.path.abspath(home), what)


def make(*folders: str) -> None:
    """Makes folders that are closed to others, and what is above the first."""
    os.makedirs(os.path.dirname(folders[0]), exist_ok=True)
    for path in folders:
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)


def check_owner(path: str) -> None:
    """Raises SandboxError where others may write: sandboxes, and criu as root, run what is there."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise SandboxError(
            f"{os.path.basename(path)} in {path} may be another user's, and would run as root: chmod 700 it, or set "
            "SANDBOX_GYM_HOME to a folder of your own"
        )
