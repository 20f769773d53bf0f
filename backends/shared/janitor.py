"""How a supervisor starts and what is cleared when it ends.

The process that the client started (the janitor) makes the namespaces, forks the supervisor into them as process 1,
waits for its end, and removes the control groups and the run folder. Both end with the client: the supervisor watches
its lifeline and its owner's pidfd, and dies with the janitor. A third, which does nothing but wait, clears up where the
janitor itself was killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from sandbox_gym.errors import BackendUnavailable
from sandbox_gym.guest import syscalls

from . import registry
from .loop import Loop


@dataclass(frozen=True)
class Service:
    """A supervisor that is ready: `facts` for its client, what takes a connection of that, and what runs for ever."""

    facts: dict[str, Any]
    loop: Loop
    accept: Callable[[socket.socket], None]
    run: Callable[[], object]


Supervise = Callable[[Path], Service]
"""Called in the new namespaces with the run folder. Raises BackendUnavailable."""


def run(
    supervise: Supervise, *, groups: Sequence[str], mounts: Sequence[str], scratch: Path | None = None
) -> NoReturn:
    """`argv`: the lifeline's descriptor, the run folder. `groups`: where control groups are made; `mounts`: names in
    the run folder on which the supervisor mounts; `scratch`: a folder elsewhere, which goes with the run folder.
    """
    lifeline = socket.socket(fileno=int(sys.argv[1]))
    folder = Path(sys.argv[2])
    owner = os.pidfd_open(os.getppid())
    registry.write(folder, groups=list(groups), scratch=None if scratch is None else str(scratch))
    sweeper = _start_sweeper(folder, [lifeline.fileno(), owner])
    try:
        uid, gid = os.geteuid(), os.getegid()
        flags = syscalls.CLONE_NEWNS | syscalls.CLONE_NEWPID
        if uid != 0:
            flags |= syscalls.CLONE_NEWUSER
        syscalls.unshare(flags)
        if uid != 0:
            map_self(uid, gid)
        pid = os.fork()
    except OSError as error:
        _tell(
            lifeline, f"no namespaces can be made here ({error}): `sandbox-gym doctor` tells what is missing"
        )
        _clear(folder, sweeper, mounts)
        sys.exit(1)
    if pid == 0:
        _supervise(supervise, lifeline, owner, folder)
    registry.write(folder, supervisor_pid=pid)
    lifeline.close()
    os.close(owner)
    os.waitpid(pid, 0)
    _clear(folder, sweeper, mounts)
    sys.exit(0)


def _start_sweeper(folder: Path, not_its: list[int]) -> int:
    janitor = os.pidfd_open(os.getpid())
    pid = os.fork()
    if pid == 0:
        for fd in not_its:  # the lifeline's end is a signal: nobody but the supervisor may hold it open
            os.close(fd)
        select.select([janitor], [], [])
        registry.clear(folder)
        os._exit(0)
    os.close(janitor)
    return pid


def _clear(folder: Path, sweeper: int, mounts: Sequence[str]) -> None:
    # The supervisor's mounts, which outlive it in the mount namespace that this one shares.
    for name in mounts:
        with contextlib.suppress(OSError):
            syscalls.umount2(str(folder / name), syscalls.MNT_DETACH)
    registry.clear(folder)
    os.kill(sweeper, signal.SIGKILL)
    os.waitpid(sweeper, 0)


def map_self(uid: int, gid: int) -> None:
    """In a new user namespace: these become root there."""
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        Path(f"/proc/self/{name}").write_text(text)


def _supervise(supervise: Supervise, lifeline: socket.socket, owner: int, folder: Path) -> NoReturn:
    try:
        syscalls.prctl(syscalls.PR_SET_PDEATHSIG, 9)
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # some for each of many sandboxes
        syscalls.mount(None, "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
        syscalls.mount("proc", "/proc", "proc", syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC)
        service = supervise(folder)
        loop = service.loop
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(str(folder / "socket"))
        os.chmod(folder / "socket", 0o600)
        listener.listen(128)
        loop.watch(listener.fileno(), lambda: service.accept(listener.accept()[0]))
        loop.watch(lifeline.fileno(), lambda: os._exit(0))
        loop.watch(owner, lambda: os._exit(0))
        lifeline.send(json.dumps(service.facts).encode())
    except BackendUnavailable as error:
        _tell(lifeline, str(error))
        os._exit(1)
    except BaseException:
        _tell(lifeline, f"the supervisor could not start:\n{traceback.format_exc()}")
        os._exit(1)
    try:
        service.run()
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def _tell(lifeline: socket.socket, message: str) -> None:
    lifeline.send(json.dumps({"error": message}).encode()[:60_000])
