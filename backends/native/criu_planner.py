"""What criu can't capture, found before it starts, and named by process and descriptor.

Most of it criu refuses too, in words that name neither; some it leaves out without a word, such as datagrams that wait
to be read. It is read from /proc and asked of the kernel, by duplicates of the guest's descriptors that change nothing.
What is neither here nor in criu's power comes out as criu's own error.
"""

from __future__ import annotations

import ctypes
import os
import re
import select
import socket
import stat
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from sandbox_gym.guest import syscalls

from . import watches
from .criu import Criu
from .node import Node
from .planner import get_descriptor, tells_of_changes
from .sockets import Socket, family_name, has_joined_groups

_PATIENCE = 0.02  # seconds, in which a process that was just started is on its own
_MOST_DESCRIPTORS = 20_000  # looking at more would hold up this client's other sandboxes for too long
_NR_KCMP = {"x86_64": 312, "aarch64": 272}[os.uname().machine]
_KCMP_VM, _KCMP_FILES, _KCMP_FS = 1, 2, 3
# criu takes mount namespaces inside the sandbox's. Not each kernel has all of these.
_NAMESPACES = [
    name for name in ("net", "uts", "ipc", "pid", "cgroup", "time") if os.path.exists(f"/proc/self/ns/{name}")
]
_OF_A_THREAD = ("mnt", "net", "uts", "ipc", "cgroup")
_ANONYMOUS = {"inotify", "[eventfd]", "[eventpoll]", "[signalfd]", "[timerfd]", "[pidfd]"}
_DEVICES = {os.makedev(1, minor) for minor in (3, 5, 7, 8, 9)} | {os.makedev(5, 0), os.makedev(5, 2)}
_DEV_TTY = os.makedev(5, 0)
_MENDS = "scripts/install-criu.sh builds"
_TERMINALS = range(136, 144)  # major numbers of /dev/pts/*
_FAMILIES = {socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK, socket.AF_PACKET}
# From Linux 6.16 on only these answer whether they pass credentials, which an older criu asks of all.
_ASKED_FOR_CREDENTIALS = {socket.AF_UNIX, socket.AF_NETLINK}
_SOCKETS_SINCE = (4, 2) if [int(n) for n in re.findall(r"\d+", os.uname().release)[:2]] >= [6, 16] else ()
_PROTOCOLS = {0, socket.IPPROTO_TCP, socket.IPPROTO_UDP, 136}  # 136: UDP-Lite
_O_DIRECT_PIPE = os.O_DIRECT  # "packet mode", pipe(2)
_FLAGS = re.compile(rb"^flags:\t(\d+)$", re.MULTILINE)
_MOUNT = re.compile(rb"^mnt_id:\t(\d+)$", re.MULTILINE)
_SEMAPHORE = re.compile(rb"^eventfd-semaphore: 1$", re.MULTILINE)
_STATUS = re.compile(rb"^(Name|State|PPid|TracerPid|NSpid|RssAnon|RssShmem|VmSwap):\t(.*)$", re.MULTILINE)
_MEMORY = (b"RssAnon", b"RssShmem", b"VmSwap")
_INODE = re.compile(r"\b(?:0x)?([0-9a-f]{3,})\b")  # as criu's messages have it
_ESTABLISHED, _LISTEN = 1, 10
_CONNECTED = {
    1,
    2,
    4,
    5,
    8,
    9,
    11,
}  # states of TCP (include/net/tcp_states.h) in which two ends know each other
_INFO_UNACKED = struct.Struct(
    "24xI"
)  # struct tcp_info, tcpi_unacked: of a listener, those that wait for accept


@dataclass
class Sight:
    """`refusal`: what criu can't take, None when nothing was found. `memory_bytes`: that it will write. `connected`:
    there are connections of TCP, whose packets must wait while their ends are made anew. `watched`: folders that
    inotify looks at. `sockets`: who holds the socket of an inode.
    """

    refusal: str | None = None
    memory_bytes: int = 0
    connected: bool = False
    watched: list[watches.Watched] = field(default_factory=list)
    sockets: dict[int, str] = field(default_factory=dict)

    def explain(self, reason: str) -> str:
        """criu's own words, and whose descriptor they are of."""
        for number in _INODE.findall(reason):
            holder = self.sockets.get(int(number, 16))
            if holder is not None:
                return f"{reason} ({holder})"
        return reason


@dataclass(frozen=True)
class _Process:
    pid: int
    name: str
    is_zombie: bool
    parent: int
    tracer: int
    memory_bytes: int  # its own and what it shares, swapped out or not
    inner: str  # its pid as the sandbox sees it

    def __str__(self) -> str:
        return f"process {self.inner} ({self.name})"


class _Refused(Exception):
    """Says what."""


def look(node: Node, criu: Criu) -> Sight:
    """At every process of a sandbox; again where something is in the way, since much of that passes in a moment."""
    started = time.monotonic()
    seen: dict[str, float] = {}
    while True:
        sight = _look_once(node, criu)
        now = time.monotonic()
        if sight.refusal is None or now - seen.setdefault(sight.refusal, now) > _PATIENCE:
            return sight
        if now - started > 5 * _PATIENCE:  # always something else: each of it passes before criu needs it
            sight.refusal = None
            return sight
        time.sleep(_PATIENCE / 10)


def _look_once(node: Node, criu: Criu) -> Sight:
    sight = Sight()
    members = node.group.members() or [node.pid]
    looker = _Looker(node, members, criu, sight)
    try:
        for member in members:
            looker.look_at(member)
        looker.look_at_ends()
    except _Refused as refused:
        sight.refusal = str(refused)
    return sight


class _Looker:
    def __init__(self, node: Node, members: Sequence[int], criu: Criu, sight: Sight) -> None:
        self._criu = criu
        self._node = node
        self._first = node.pid
        self._members = set(members)
        # Of all: a program that was run before its process got other mounts lies in those of before.
        self._mounts = {mount for pid in members for mount in _mount_ids(pid)}
        self._control = f"socket:[{node.control_inode}]"
        self._sight = sight
        self._descriptors = 0
        self._ends: dict[
            tuple[bytes, bytes], tuple[int, str]
        ] = {}  # of TCP: own and peer's address to state and holder

    def look_at(self, pid: int) -> None:
        try:
            process = _process(pid)
            if process.is_zombie:
                return
            self._sight.memory_bytes += process.memory_bytes
            self._check(process)
            self._check_program(process)
            for name in os.listdir(f"/proc/{pid}/fd"):
                self._descriptors += 1
                if self._descriptors > _MOST_DESCRIPTORS:
                    raise _Refused(f"more than {_MOST_DESCRIPTORS} descriptors are open")
                try:
                    self._check_descriptor(process, int(name))
                except OSError:  # closed meanwhile
                    continue
        except (FileNotFoundError, ProcessLookupError):  # it has ended, which harms no dump
            return

    def look_at_ends(self) -> None:
        """A connection of which this sandbox has one end only. Those to the proxy go on here, and end in copies."""
        outside = self._node.outlet.addresses() if self._node.outlet is not None else set()
        for (own, peer), (state, holder) in self._ends.items():
            if state == _ESTABLISHED and (peer, own) not in self._ends and peer not in outside:
                raise _Refused(f"{holder} is a connection whose other end no process of the sandbox holds")

    # ---- processes ------------------------------------------------------------------------------------------------

    def _check(self, process: _Process) -> None:
        pid = process.pid
        if process.tracer:
            raise _Refused(f"{process} is traced by another (ptrace)")
        if process.parent in self._members and _shares(pid, process.parent, _KCMP_VM):
            raise _Refused(f"{process} has its parent's memory (vfork)")
        for name in _NAMESPACES:
            if _namespace(pid, name) != _namespace(self._first, name):
                raise _Refused(f"{process} has a namespace of its own ({name})")
        try:
            children = _namespace(pid, "pid_for_children")
        except FileNotFoundError:  # one that has no process yet
            children = ""
        if children != _namespace(pid, "pid"):
            raise _Refused(f"{process} starts its children in another pid namespace")
        for thread in map(int, os.listdir(f"/proc/{pid}/task")):
            if thread != pid:
                try:
                    self._check_thread(process, thread)
                except (FileNotFoundError, ProcessLookupError):  # it has ended
                    continue

    def _check_thread(self, process: _Process, thread: int) -> None:
        pid = process.pid
        if not _shares(pid, thread, _KCMP_FILES):
            raise _Refused(f"{process}: a thread has descriptors of its own (unshare)")
        if not _shares(pid, thread, _KCMP_FS):
            raise _Refused(f"{process}: a thread has a working folder of its own (unshare)")
        for name in _OF_A_THREAD:
            if _namespace(pid, name, thread) != _namespace(pid, name):
                raise _Refused(f"{process}: a thread has a namespace of its own ({name})")

    def _check_program(self, process: _Process) -> None:
        """Of a process that a copy's native code forked: its memory is still of the origin's mounts (guest/rebind)."""
        try:
            path = os.readlink(f"/proc/{process.pid}/exe")
            program = os.open(f"/proc/{process.pid}/exe", os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:  # a zombie
            return
        try:
            with open(f"/proc/self/fdinfo/{program}", "rb") as info:
                found = _MOUNT.search(info.read())
        finally:
            os.close(program)
        if found and found[1] not in self._mounts and not path.startswith("/memfd:"):
            raise _Refused(f"{process} runs {path} of the snapshot that the sandbox came from")

    # ---- descriptors ----------------------------------------------------------------------------------------------

    def _check_descriptor(self, process: _Process, fd: int) -> None:
        target = os.readlink(f"/proc/{process.pid}/fd/{fd}")
        if target == self._control:
            return
        holder = f"{process}: descriptor {fd}"
        with open(f"/proc/{process.pid}/fdinfo/{fd}", "rb") as file:
            info = file.read()
        kind, _, rest = target.partition(":")
        if target.startswith("/"):
            self._check_file(process, fd, target, info)
        elif kind == "socket":
            self._sight.sockets[int(rest[1:-1])] = holder
            with Socket(process.pid, fd) as sock:
                self._check_socket(sock, holder)
        elif kind == "pipe" and _flags(info) & _O_DIRECT_PIPE:
            raise _Refused(f"{holder} is a pipe in packet mode")
        elif kind == "anon_inode":
            self._check_anonymous(process.pid, fd, rest, info, holder)

    def _check_file(self, process: _Process, fd: int, target: str, info: bytes) -> None:
        holder = f"{process}: descriptor {fd}"
        status = os.stat(f"/proc/{process.pid}/fd/{fd}")
        mount = _MOUNT.search(info)
        if stat.S_ISBLK(status.st_mode) or (stat.S_ISCHR(status.st_mode) and not _is_known(status.st_rdev)):
            number = f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
            raise _Refused(f"{holder} is a device ({target}, {number})")
        if stat.S_ISDIR(status.st_mode) and tells_of_changes(process.pid, fd):
            raise _Refused(f"{holder} is a folder that signals its changes ({target}, F_NOTIFY)")
        if mount and mount[1] not in self._mounts and not target.startswith("/memfd:"):
            raise _Refused(f"{holder} is of a file system that is not mounted in the sandbox ({target})")
        if self._criu.mended:
            return
        if status.st_rdev == _DEV_TTY:
            raise _Refused(f"{holder} is /dev/tty, which only a criu that {_MENDS} takes")
        if b": POSIX " in info and _has_mapped(process.pid, target):
            raise _Refused(
                f"{holder} holds a lock on {target}, which is mapped too: only a criu that {_MENDS} keeps it"
            )

    def _check_anonymous(self, pid: int, fd: int, kind: str, info: bytes, holder: str) -> None:
        if kind not in _ANONYMOUS:
            raise _Refused(f"{holder} is of a kind that criu does not know (anon_inode:{kind})")
        if _SEMAPHORE.search(info):
            raise _Refused(f"{holder} is an eventfd that counts as a semaphore")
        if kind == "inotify":
            ours = get_descriptor(pid, fd)
            try:
                if select.select([ours], [], [], 0)[0]:
                    raise _Refused(f"{holder} is an inotify with events that wait to be read")
            finally:
                os.close(ours)
            try:
                self._sight.watched += watches.find(self._node, info)
            except watches.UnknownWatchError as unknown:
                raise _Refused(f"{holder} is an inotify that watches {unknown}") from None

    def _check_socket(self, sock: Socket, holder: str) -> None:
        if sock.family not in _FAMILIES:
            raise _Refused(f"{holder} is a socket that criu does not know ({family_name(sock.family)})")
        if self._criu.version < _SOCKETS_SINCE and sock.family not in _ASKED_FOR_CREDENTIALS:
            raise _Refused(
                f"{holder} is a socket that {self._criu} can't take on this kernel: 4.2 or newer can"
            )
        ready = sock.poll()
        if ready & select.POLLPRI:
            raise _Refused(f"{holder} is a socket with urgent data")
        if sock.family == socket.AF_UNIX:
            if ready & select.POLLIN and sock.passes_credentials():
                raise _Refused(f"{holder} is a socket with messages that carry credentials")
        elif sock.kind == socket.SOCK_STREAM:
            self._check_stream(sock, holder)
        elif ready & select.POLLIN and not ready & select.POLLRDHUP:
            raise _Refused(f"{holder} is a socket with packets that wait to be read")
        elif sock.family not in (socket.AF_NETLINK, socket.AF_PACKET):
            if sock.kind != socket.SOCK_RAW:
                self._check_protocol(sock, holder)
            if has_joined_groups(self._first):
                raise _Refused(f"{holder} may be one that has joined a multicast group")

    def _check_stream(self, sock: Socket, holder: str) -> None:
        self._check_protocol(sock, holder)
        info = sock.tcp_info()
        if info[0] == _LISTEN and _INFO_UNACKED.unpack_from(info)[0]:
            raise _Refused(f"{holder} is a socket with connections that wait to be accepted")
        if info[0] in _CONNECTED:
            self._sight.connected = True
            self._ends[sock.addresses()] = info[0], holder

    def _check_protocol(self, sock: Socket, holder: str) -> None:
        if sock.protocol not in _PROTOCOLS:
            raise _Refused(f"{holder} is a socket of a protocol that criu does not know ({sock.protocol})")


def _process(pid: int) -> _Process:
    with open(f"/proc/{pid}/status", "rb") as file:
        fields = dict(_STATUS.findall(file.read()))
    return _Process(
        pid,
        fields[b"Name"].decode(errors="replace"),
        fields[b"State"].startswith(b"Z"),
        int(fields[b"PPid"]),
        int(fields[b"TracerPid"]),
        1024 * sum(int(fields[name].split()[0]) for name in _MEMORY if name in fields),
        fields[b"NSpid"].split()[-1].decode(),
    )


def _has_mapped(pid: int, path: str) -> bool:
    with open(f"/proc/{pid}/maps", errors="surrogateescape") as maps:
        return any(mapping.rstrip("\n").endswith(f" {path}") for mapping in maps)


def _mount_ids(pid: int) -> set[bytes]:
    try:
        with open(f"/proc/{pid}/mountinfo", "rb") as mounts:
            return {mount.split(b" ", 1)[0] for mount in mounts}
    except OSError:  # it has ended
        return set()


def _namespace(pid: int, name: str, thread: int | None = None) -> str:
    """Raises FileNotFoundError when it has ended."""
    return os.readlink(f"/proc/{pid}/task/{thread or pid}/ns/{name}")


def _shares(one: int, other: int, what: int) -> bool:
    """kcmp(2): whether two processes or threads have the same of it. Raises ProcessLookupError when one has ended."""
    result = syscalls.libc.syscall(_NR_KCMP, one, other, what, 0, 0)
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return bool(result == 0)


def _flags(info: bytes) -> int:
    found = _FLAGS.search(info)
    return int(found[1], 8) if found else 0


def _is_known(device: int) -> bool:
    return device in _DEVICES or os.major(device) in _TERMINALS
