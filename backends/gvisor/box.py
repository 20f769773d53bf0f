"""One sandbox: gVisor's kernel as a process (the sentry), one that opens files for it (the gofer), what they hold."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sandbox_gym.backends.egress.gateway import Outlet
from sandbox_gym.backends.native.cgroups import Group
from sandbox_gym.network import Allow

from .bundle import Family
from .wires import Wires

_MOST_SAID = 4000  # bytes kept of what runsc prints


@dataclass(eq=False)
class Box:
    """`key`: runsc's name for it, and its folder's; `id`: the sandbox that it is, which a restore in place hands on.
    `ends`: of the guest's standard input and output, until a client has them.
    """

    key: str
    folder: Path
    family: Family
    group: Group
    name: str = ""
    id: str = ""
    ends: tuple[int, ...] = ()
    messages: int = -1  # what runsc, and a guest that can't start, print
    said: bytes = b""
    pid: int = 0
    pidfd: int = -1
    created: float = field(default_factory=time.time)
    dies_at: float | None = None  # monotonic
    origin: str | None = None  # the snapshot that it came from
    reason: str = ""  # why it was killed, when it was
    network: Allow | None = None
    wires: Wires | None = None
    outlet: Outlet | None = None
    on_exit: list[Callable[[], object]] = field(default_factory=list)

    def arrived(self) -> None:
        """Its process is there. Raises OSError when it is gone already."""
        self.pid = int((self.folder / "pid").read_text())
        self.pidfd = os.pidfd_open(self.pid)

    def hear(self) -> bool:
        """Reads what was printed. False at its end."""
        block = os.read(self.messages, 1 << 16)
        self.said = (self.said + block)[-_MOST_SAID:]
        return bool(block)

    def close_ends(self) -> None:
        for fd in self.ends:
            os.close(fd)
        self.ends = ()

    def close(self) -> None:
        """Gives up its descriptors. Idempotent."""
        self.close_ends()
        if self.wires is not None:
            self.wires.close()
        if self.outlet is not None:
            self.outlet.close()
        for fd in (self.messages, self.pidfd):
            if fd >= 0:
                os.close(fd)
        self.messages = self.pidfd = -1

    def kill(self, reason: str = "") -> None:
        self.reason = self.reason or reason
        if self.pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        self.group.kill()

    def remove(self) -> bool:
        """What it has left. False while a process of it is still there: call again."""
        if not self.group.remove():
            self.group.kill()
            return False
        shutil.rmtree(self.folder, ignore_errors=True)
        return True

    def usage(self) -> dict[str, int]:
        """Its disk lies in its memory, and is counted there."""
        kills, memory = self.group.oom_kills(), self.group.memory_bytes()
        return {"oom_kills": kills, "memory_bytes": memory, "disk_bytes": 0, "children": 0}

    def row(self) -> dict[str, Any]:
        """What `list` shows."""
        return {
            "id": self.id,
            "name": self.name,
            "state": "running",
            "age": time.time() - self.created,
            "parent": self.origin,
            "memory_bytes": self.group.memory_bytes(),
            "pid": self.pid,
        }


@dataclass(eq=False)
class Image:
    """A snapshot: files of gVisor's, from which any number of sandboxes are restored. It goes when nobody needs it."""

    id: str
    folder: Path
    family: Family
    network: Allow | None
    held: bool = True  # a client has a handle
    readers: int = 0  # restores under way
    disk_bytes: int = 0
    created: float = field(default_factory=time.time)
    origin: str | None = None

    def is_whole(self) -> bool:
        """A checkpoint that failed leaves files too, and one that claims success may lack some."""
        files = [self.folder / name for name in ("checkpoint.img", "pages.img", "pages_meta.img")]
        if not all(file.exists() and file.stat().st_size for file in files):
            return False
        self.disk_bytes = sum(file.stat().st_size for file in files)
        return True

    def drop_unneeded(self) -> None:
        if not self.held and not self.readers:
            shutil.rmtree(self.folder, ignore_errors=True)

    def usage(self) -> dict[str, int]:
        return {"oom_kills": 0, "memory_bytes": 0, "disk_bytes": self.disk_bytes, "children": 0}

    def row(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "name": self.id,
            "state": "snapshot",
            "age": time.time() - self.created,
            "parent": self.origin,
            "memory_bytes": 0,
            "pid": 0,
        }
