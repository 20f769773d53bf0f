"""How a supervisor starts and what is cleared when it ends.

The process that the client started (the janitor) makes the namespaces, forks the supervisor into them as process 1,
waits for its end, and removes the control groups and the run folder. Both end with the client: the supervisor watches
its lifeline and its pidfd, and dies with the janitor. A third, which does nothing but wait, clears up where the janitor
itself was killed.
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
from pathlib import Path
from typing import NoReturn

from sandbox_gym.backends.egress.gateway import Gateway
from sandbox_gym.backends.shared import registry
from sandbox_gym.backends.shared.jobs import Jobs
from sandbox_gym.backends.shared.loop import Loop
from sandbox_gym.errors import BackendUnavailable
from sandbox_gym.guest import syscalls

from . import cgroups, criu, disk
from .copies import Maker
from .images import Imager
from .spares import Spares, Userns
from .spawn import make_userns
from .supervisor import Supervisor

_FIRST_ID = 1 << 30  # user and group ids of guests, far from any real account
_ID_COUNT = 1 << 16


def main() -> NoReturn:
    """`argv`: the lifeline's descriptor, the run folder, the cap on live sandboxes."""
    lifeline = socket.socket(fileno=int(sys.argv[1]))
    folder = Path(sys.argv[2])
    cap = int(sys.argv[3])
    owner = os.pidfd_open(os.getppid())
    supervisor_id = folder.name
    hierarchy = cgroups.find()
    privileged = os.geteuid() == 0
    registry.write(folder, groups=[str(path) for path in hierarchy.roots.values()])
    sweeper = _start_sweeper(folder, [lifeline.fileno(), owner])
    try:
        uid, gid = os.geteuid(), os.getegid()
        flags = syscalls.CLONE_NEWNS | syscalls.CLONE_NEWPID
        if not privileged:
            flags |= syscalls.CLONE_NEWUSER
        syscalls.unshare(flags)
        if not privileged:
            _map_self(uid, gid)
        pid = os.fork()
    except OSError as error:
        _tell(
            lifeline, f"no namespaces can be made here ({error}): `sandbox-gym doctor` tells what is missing"
        )
        _clear(folder, sweeper)
        sys.exit(1)
    if pid == 0:
        _supervise(lifeline, owner, folder, cap, hierarchy, supervisor_id, privileged)
    registry.write(folder, supervisor_pid=pid)
    lifeline.close()
    os.close(owner)
    os.waitpid(pid, 0)
    _clear(folder, sweeper)
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


def _clear(folder: Path, sweeper: int) -> None:
    # The supervisor's mounts, which outlive it in the mount namespace that this one shares.
    for name in ("base", "disk"):
        with contextlib.suppress(OSError):
            syscalls.umount2(str(folder / name), syscalls.MNT_DETACH)
    registry.clear(folder)
    os.kill(sweeper, signal.SIGKILL)
    os.waitpid(sweeper, 0)


def _map_self(uid: int, gid: int) -> None:
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        Path(f"/proc/self/{name}").write_text(text)


def _supervise(
    lifeline: socket.socket,
    owner: int,
    folder: Path,
    cap: int,
    hierarchy: cgroups.Hierarchy,
    supervisor_id: str,
    privileged: bool,
) -> NoReturn:
    try:
        syscalls.prctl(syscalls.PR_SET_PDEATHSIG, 9)
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # some for each of many sandboxes
        syscalls.mount(None, "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
        syscalls.mount("proc", "/proc", "proc", syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC)
        (folder / "base").mkdir()
        syscalls.mount("sandbox-gym", str(folder / "base"), "tmpfs", syscalls.MS_NOSUID, "mode=755")
        store = _store(folder, privileged)
        first = _FIRST_ID if privileged else 0
        userns = Userns(make_userns(f"0 {first} {_ID_COUNT if privileged else 1}"))
        groups = cgroups.Groups(hierarchy, supervisor_id)
        unenforced = [name for name, c in cgroups.LIMITS.items() if c not in hierarchy.roots]
        jobs = Jobs(Loop())
        imager = Imager(jobs, folder, store)
        maker = Maker(Spares(store, groups, first), userns, imager, Gateway(jobs))
        supervisor = Supervisor(
            folder, jobs, maker, imager, userns.fd, privileged=privileged, cap=cap, unenforced=unenforced
        )
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(str(folder / "socket"))
        os.chmod(folder / "socket", 0o600)
        listener.listen(128)
        supervisor.loop.watch(listener.fileno(), lambda: supervisor.accept(listener.accept()[0]))
        supervisor.loop.watch(lifeline.fileno(), lambda: os._exit(0))
        supervisor.loop.watch(owner, lambda: os._exit(0))
        facts = {"disk": store.kind, "unenforced": unenforced, "any_depth": criu.installed()}
        lifeline.send(json.dumps(facts).encode())
    except BackendUnavailable as error:
        _tell(lifeline, str(error))
        os._exit(1)
    except BaseException:
        _tell(lifeline, f"the supervisor could not start:\n{traceback.format_exc()}")
        os._exit(1)
    try:
        supervisor.run()
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def _store(folder: Path, privileged: bool) -> disk.Store:
    if not privileged:
        return disk.TmpfsStore()
    place = folder / "disk"
    place.mkdir()
    return disk.BtrfsStore(place)


def _tell(lifeline: socket.socket, message: str) -> None:
    lifeline.send(json.dumps({"error": message}).encode()[:60_000])
