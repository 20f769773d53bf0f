"""What this machine lets the native backend do: each thing is really tried, in a child process, and leaves nothing.

The backend's own code is what is tried, so that a check can't pass where a sandbox would fail.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import os
import platform
import re
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

from sandbox_gym.api import Limits
from sandbox_gym.backends.shared import janitor
from sandbox_gym.checks import Check
from sandbox_gym.errors import BackendUnavailable
from sandbox_gym.guest import syscalls

from . import cgroups, disk, overlay, seccomp
from .population import MAX_DEPTH
from .spawn import make_userns

_SECONDS = 20  # after which a probe has failed
_NOBODY = 65534
_GUEST_ID, _IDS = 1 << 30, 1 << 16
_PR_SET_DUMPABLE = 4
_OLDEST_KERNEL = (6, 8)  # the first whose overlayfs takes lowerdir+; btrfs has simple quotas since 6.7
_LESS_CONFINED = "where this is a container itself: start it with `docker run --privileged`"
_NEWER_KERNEL = (
    "boot a newer kernel; Debian 12 has one: apt-get install -t bookworm-backports linux-image-amd64"
)
_NAMESPACES = {
    "mount": syscalls.CLONE_NEWNS,
    "pid": syscalls.CLONE_NEWPID,
    "network": syscalls.CLONE_NEWNET,
    "ipc": syscalls.CLONE_NEWIPC,
    "uts": syscalls.CLONE_NEWUTS,
    "cgroup": syscalls.CLONE_NEWCGROUP,
}


class _Failed(Exception):
    """A probe's action did not work; the text says why."""


def checks() -> list[Check]:
    """In the order in which a sandbox needs them."""
    privileged = os.geteuid() == 0
    found = [_kernel(), _user_namespaces(privileged), *([_unprivileged()] if privileged else [])]
    found += [_namespaces(privileged), _nesting(privileged), _overlay(privileged)]
    found += [_redirects(), _id_mapped_root()] if privileged else []
    return [*found, _control_groups(privileged), _disk(privileged), _seccomp()]


# ---- the kernel and its namespaces -------------------------------------------------------------------------------


def _kernel() -> Check:
    release = platform.release()
    meaning = f"Linux {release} on {platform.machine()}"
    if tuple(int(part) for part in re.findall(r"\d+", release)[:2]) >= _OLDEST_KERNEL:
        return Check("kernel", "ok", meaning)
    return Check(
        "kernel", "missing", f"{meaning}: {'.'.join(map(str, _OLDEST_KERNEL))} is needed", _NEWER_KERNEL
    )


def _user_namespaces(privileged: bool) -> Check:
    def as_root() -> None:
        os.close(make_userns(f"0 {_GUEST_ID} {_IDS}"))

    action = as_root if privileged else functools.partial(_enter, 0, privileged=False)
    meaning = f"root inside a sandbox is {'nobody' if privileged else 'you'} outside"
    return _check("user namespaces", functools.partial(_attempt, action), meaning, _userns_remedy)


def _unprivileged() -> Check:
    def as_nobody() -> None:
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
        syscalls.prctl(_PR_SET_DUMPABLE, 1)  # else /proc/self still belongs to root after setresuid
        _enter(0, privileged=False)

    attempt = functools.partial(_attempt, as_nobody)
    made = _check("user namespaces (users)", attempt, "ordinary users can make sandboxes too", _userns_remedy)
    if made.state == "ok":
        return made
    return dataclasses.replace(made, state="limited", meaning=f"only root can make sandboxes: {made.meaning}")


def _userns_remedy(_: _Failed) -> str:
    """The sysctl that stands in the way, as far as it can be told."""
    obstacles = (
        ("user.max_user_namespaces", "0", "15000"),
        ("kernel.unprivileged_userns_clone", "0", "1"),  # Debian's
        ("kernel.apparmor_restrict_unprivileged_userns", "1", "0"),  # Ubuntu's
    )
    for name, obstacle, cure in obstacles:
        if _read(f"/proc/sys/{name.replace('.', '/')}") == obstacle:
            return f"sysctl -w {name}={cure}"
    return _LESS_CONFINED


def _namespaces(privileged: bool) -> Check:
    def each() -> None:
        for name, flag in _NAMESPACES.items():
            try:
                _attempt(functools.partial(_enter, flag, privileged=privileged))
            except _Failed as why:
                raise _Failed(f"{name}: {why}") from None

    return _check("namespaces", each, ", ".join(_NAMESPACES), _userns_remedy)


def _nesting(privileged: bool) -> Check:
    """pid namespaces nest 32 deep (pid_namespaces(7)); the supervisor and the first guest take one each."""

    def deepest() -> str:
        _enter(0, privileged=privileged)
        read, write = os.pipe()
        levels = 0
        while True:
            try:
                pid = syscalls.clone(syscalls.CLONE_NEWPID)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EINVAL):
                    raise
                os.write(write, bytes([levels]))
                break
            if pid:
                os.waitpid(pid, 0)
                break
            levels += 1
        if levels:
            os._exit(0)
        os.close(write)
        return str(os.read(read, 1)[0])

    try:
        levels = int(_attempt(deepest))
    except _Failed as why:
        return Check("nesting", "missing", f"no pid namespace: {why}", _userns_remedy(why))
    chain = min(MAX_DEPTH, max(0, levels - 2))
    meaning = f"a chain of up to {chain} snapshots, each taken in a copy of the one before"
    if chain == MAX_DEPTH:
        return Check("nesting", "ok", meaning)
    return Check(
        "nesting",
        "limited",
        f"{meaning}: this process is {32 - levels} levels down already",
        "run it outside",
    )


# ---- file systems ------------------------------------------------------------------------------------------------


def _overlay(privileged: bool) -> Check:
    def write_above(place: Path) -> None:
        below = place / "below" / overlay.SUBDIR / "folder"
        below.mkdir(parents=True)
        (below / "file").write_text("below")
        root = _mount(place, (str(place / "below"),), privileged)
        Path(f"{root}/folder/file").write_text("above")
        _expect((below / "file").read_text() == "below", "a write went through to the layer below")

    attempt = functools.partial(_attempt_in_scratch, write_above, privileged=privileged)
    return _check("overlayfs", attempt, "each sandbox's disk is a copy-on-write layer", _overlay_remedy)


def _overlay_remedy(why: _Failed) -> str:
    return _kernel_remedy(why) if "overlay" in _read("/proc/filesystems") else "modprobe overlay"


def _redirects() -> Check:
    def look_through(place: Path) -> None:
        (place / "below/hidden").mkdir(parents=True)
        (place / "below/hidden/file").write_text("seen")
        shown = place / "skeleton" / overlay.SUBDIR / "shown"
        shown.mkdir(parents=True)
        os.setxattr(shown, "trusted.overlay.redirect", b"/hidden")
        root = _mount(place, (str(place / "skeleton"), str(place / "below")), True)
        _expect(Path(f"{root}/shown/file").read_text() == "seen", "a redirect was not followed")
        _expect(os.listdir(root) == ["shown"], "more than the listed folders is visible")

    attempt = functools.partial(_attempt_in_scratch, look_through, privileged=True)
    return _check(
        "overlay redirects", attempt, "a sandbox sees listed host folders and no others", _overlay_remedy
    )


def _id_mapped_root() -> Check:
    def map_root() -> None:
        tree = syscalls.open_tree("/")
        userns = make_userns(f"0 {_GUEST_ID} {_IDS}")
        syscalls.mount_setattr(tree, syscalls.MOUNT_ATTR_IDMAP, userns_fd=userns)
        _expect(os.stat(f"/proc/self/fd/{tree}").st_uid == _GUEST_ID, "the map has no effect")

    attempt = functools.partial(_attempt, map_root)
    return _check("id-mapped mounts", attempt, "the host's files belong to root inside a sandbox")


def _disk(privileged: bool) -> Check:
    limits = Limits(disk_bytes=1 << 20)

    def on_btrfs(place: Path) -> None:
        (place / "disk").mkdir()
        _fill(disk.BtrfsStore(place / "disk").make(limits, 0).upper)

    def in_memory() -> None:
        _enter(syscalls.CLONE_NEWNS, privileged=False)
        _fill(disk.TmpfsStore().make(limits, 0).upper)

    name = "disk limits"
    if privileged:
        attempt = functools.partial(_attempt_in_scratch, on_btrfs, privileged=True)
        return _check(
            name, attempt, "sandboxes' files are on disk, each bounded by a btrfs quota", _btrfs_remedy
        )
    meaning = "sandboxes' files are in memory (tmpfs); root's are on disk"
    made = _check(name, functools.partial(_attempt, in_memory), meaning)
    return dataclasses.replace(made, state="limited", remedy="run as root") if made.state == "ok" else made


def _btrfs_remedy(why: _Failed) -> str:
    if "apt-get" in str(why):
        return "apt-get install -y btrfs-progs mount"
    if "btrfs" not in _read("/proc/filesystems"):
        return "modprobe btrfs"
    return "modprobe loop" if "loop device" in str(why) else _kernel_remedy(why)


def _kernel_remedy(why: _Failed) -> str:
    return _LESS_CONFINED if re.search("permi(tted|ssion)", str(why)) else _NEWER_KERNEL


def _fill(folder: str) -> None:
    """Writes past the limit of one MiB."""
    try:
        with open(f"{folder}/file", "wb", buffering=0) as file:
            for _ in range(64):
                file.write(os.urandom(1 << 16))
                os.fsync(file)
    except OSError as error:
        if not disk.is_full(error):
            raise
        return
    raise _Failed("four times the limit could be written")


# ---- limits and the system call filter ---------------------------------------------------------------------------


def _control_groups(privileged: bool) -> Check:
    hierarchy = cgroups.find()
    remedy = "run as root, or in a delegated group: systemd-run --user --scope -p Delegate=yes COMMAND"
    try:
        if hierarchy.roots:
            _make_group(hierarchy)
    except OSError as error:
        return Check("control groups", "missing", f"a group can't be made: {error}", remedy)
    lacking = [limit for limit, controller in cgroups.LIMITS.items() if controller not in hierarchy.roots]
    if lacking:
        if privileged:
            remedy = f"mount the controllers of {', '.join(lacking)} (kernel command line: cgroup_enable=...)"
        return Check("control groups", "limited", f"no limits can be set on: {', '.join(lacking)}", remedy)
    return Check("control groups", "ok", f"v{hierarchy.version}: limits on {', '.join(cgroups.LIMITS)}")


def _make_group(hierarchy: cgroups.Hierarchy) -> None:
    groups = cgroups.Groups(hierarchy, f"doctor-{os.getpid()}")
    try:
        groups.make("probe", Limits()).remove()
    finally:
        for folder in groups.folders:
            for left in [path for path in folder.iterdir() if path.is_dir()]:
                left.rmdir()
            folder.rmdir()


def _seccomp() -> Check:
    def filtered() -> None:
        syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
        syscalls.seccomp_filter(seccomp.program())
        try:
            syscalls.unshare(syscalls.CLONE_NEWUSER)
        except OSError as error:
            _expect(error.errno == errno.EPERM, f"a denied call gave {error.strerror}")
        else:
            raise _Failed("a denied call went through")

    attempt = functools.partial(_attempt, filtered)
    return _check("seccomp", attempt, "dangerous system calls are refused in sandboxes")


# ---- how a thing is tried ----------------------------------------------------------------------------------------


def _check(
    name: str,
    attempt: Callable[[], object],
    meaning: str,
    remedy: Callable[[_Failed], str] = _kernel_remedy,
) -> Check:
    try:
        attempt()
    except _Failed as why:
        return Check(name, "missing", str(why), remedy(why))
    return Check(name, "ok", meaning)


def _attempt(action: Callable[[], str | None]) -> str:
    """Runs `action` in a child process; its answer. Raises _Failed with what it raised, or when it takes too long."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(_SECONDS)
        try:
            answer = f"+{action() or ''}"
        except (OSError, _Failed, BackendUnavailable) as error:
            answer = f"-{error}"
        except BaseException as error:  # a bug here is a finding too: nothing may unwind past the fork
            answer = f"-{type(error).__name__}: {error}"
        os.write(write, answer.encode()[:4000])
        os._exit(0)
    os.close(write)
    with open(read, "rb") as pipe:
        answer = pipe.read().decode(errors="replace")
    os.waitpid(pid, 0)
    if not answer.startswith("+"):
        raise _Failed(" ".join(answer[1:].split()) or f"it did not end within {_SECONDS} s")
    return answer[1:]


def _expect(condition: bool, otherwise: str) -> None:
    if not condition:
        raise _Failed(otherwise)


def _enter(flags: int, *, privileged: bool) -> None:
    """Into new namespaces, for good; an ordinary user comes by the right to them in a user namespace."""
    uid, gid = os.geteuid(), os.getegid()
    syscalls.unshare(flags | (0 if privileged else syscalls.CLONE_NEWUSER))
    if not privileged:
        janitor.map_self(uid, gid)


def _attempt_in_scratch(action: Callable[[Path], None], *, privileged: bool) -> None:
    """The same with a folder on a tmpfs that only the child sees."""

    def in_child() -> None:
        _enter(syscalls.CLONE_NEWNS, privileged=privileged)
        syscalls.mount(None, "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
        syscalls.mount("doctor", place, "tmpfs")
        action(Path(place))

    with tempfile.TemporaryDirectory(prefix="sandbox-gym-doctor-") as place:
        _attempt(in_child)


def _mount(place: Path, lowers: tuple[str, ...], privileged: bool) -> str:
    for name in ("upper", "work"):
        (place / name).mkdir()
    root, _ = overlay.mount(
        str(place / "upper"), str(place / "work"), (), overlay.Base(lowers, (), privileged)
    )
    return f"/proc/self/fd/{root}"


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
