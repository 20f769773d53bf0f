"""Host folders in a container stay read-only, in what criu makes again too."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from sandbox_gym.errors import BackendUnavailable


def check_apart(attached: Sequence[tuple[str, str]]) -> None:
    """Raises BackendUnavailable where one mount lies within another. criu takes the inner for a part of the outer, and
    makes it again writable: a copy could write to the host.
    """
    places = [(os.path.realpath(source), target) for source, target in attached]
    for index, (source, target) in enumerate(places):
        for other, (outer, where) in enumerate(places):
            inside = source == outer or source.startswith(outer.rstrip("/") + "/")
            if index != other and inside and os.stat(source).st_dev == os.stat(outer).st_dev:
                raise BackendUnavailable(
                    f"the mount at {target} ({source}) lies within the one at {where} ({outer}), and copies of a "
                    "container can't have both read-only: leave the inner one out (a link leads there), or use "
                    'backend="native"'
                )


def writable_mounts(pid: int, attached: Sequence[tuple[str, str]]) -> list[str]:
    """Those that a container's process sees as anything but read-only (proc_pid_mountinfo(5))."""
    rows = [line.split() for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines()]
    read_only = {
        row[4].encode().decode("unicode_escape").encode("latin-1").decode()
        for row in rows
        if "ro" in row[5].split(",")
    }
    return [target for _, target in attached if target not in read_only]
