"""The first guest of a family: from a forked supervisor to process 1 of its own namespaces, in order, then exec."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from sandbox_gym.backends.shared.environment import guest_environment
from sandbox_gym.guest import syscalls
from sandbox_gym.guest.copying import enter_root

from . import seccomp
from .rootfs import GUEST_FOLDER


@dataclass(frozen=True)
class Order:
    """Everything the child needs, made by the supervisor before it forks."""

    userns_fd: int
    netns_fd: int
    join_fds: Sequence[int]  # of the control group's folders
    root_fd: int
    attached: Sequence[tuple[int, str]]
    control_fd: int
    python: str
    path: Sequence[str]
    env: Mapping[str, str]
    workdir: str
    hostname: str


def make_userns(id_map: str) -> int:
    """A user namespace with this map for users and groups, as a descriptor; no process stays in it."""
    ready, go = os.pipe()
    pid = syscalls.clone(syscalls.CLONE_NEWUSER)
    if pid == 0:
        os.close(go)
        os.read(ready, 1)
        os._exit(0)
    try:
        os.close(ready)
        for name in ("uid_map", "gid_map"):
            with open(f"/proc/{pid}/{name}", "w") as file:
                file.write(id_map)
        return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(go)
        os.waitpid(pid, 0)


def spawn(order: Order) -> None:
    """Starts the guest, which announces itself on its control socket. Raises OSError when no process can be made."""
    pid = os.fork()
    if pid == 0:
        _enter(order)
    os.waitpid(pid, 0)  # the middle process, gone at once; the guest is this process's to reap


def _enter(order: Order) -> NoReturn:
    try:
        for fd in order.join_fds:
            os.write(fd, b"0")
        syscalls.setns(order.userns_fd, syscalls.CLONE_NEWUSER)
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)
        syscalls.setns(order.netns_fd, syscalls.CLONE_NEWNET)
        syscalls.unshare(syscalls.CLONE_SANDBOX | syscalls.CLONE_NEWCGROUP)
        with contextlib.suppress(OSError):  # without time namespaces, clocks run on while frozen
            syscalls.unshare(syscalls.CLONE_NEWTIME)
        if os.fork():
            os._exit(0)
        syscalls.mount(None, "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
        os.umask(0o022)
        enter_root(order.root_fd, [fd for fd, _ in order.attached], [target for _, target in order.attached])
        socket.sethostname(order.hostname)
        os.makedirs(order.workdir, exist_ok=True)
        os.chdir(order.workdir)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        _reset_signals()
        _keep_only(order.control_fd)
        syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
        syscalls.seccomp_filter(seccomp.program())
        environment = guest_environment(order.python, order.env)
        argv = [order.python, "-s", f"{GUEST_FOLDER}/start.py", str(order.control_fd), *order.path]
        os.execve(order.python, argv, environment)
    except BaseException as error:
        os.write(order.control_fd, f"{type(error).__name__}: {error}".encode()[:4000])
    os._exit(127)


def _reset_signals() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    ours = {signal.SIGCHLD, signal.SIGPIPE, signal.SIGINT, signal.SIGTERM}
    # A client that runs in a shell's background, or by nohup, ignores more, and its children inherit that.
    ignored = {number for number in signal.valid_signals() if signal.getsignal(number) == signal.SIG_IGN}
    for number in ours | ignored:
        signal.signal(number, signal.SIG_DFL)


def _keep_only(control: int) -> None:
    """Descriptors 0-2 on /dev/null and the control socket: nothing of the supervisor's goes in."""
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        if fd > 2 and fd != control:
            try:
                os.close(fd)
            except OSError:
                pass
    os.set_inheritable(control, True)
