"""What a sandbox sees below its own writes: an explicit list of host folders, or a directory.

A skeleton holds the few files that are ours (devices, /etc, the guest's code). As root, each listed host folder is a
folder of the skeleton with an overlayfs redirect to its host path: so one overlay mount shows the listed folders and
nothing else of the host, and what the sandbox writes goes to its own layer. The skeleton's content lies below `.root`,
and only that becomes the sandbox's /; the host's own top folders, which merge beside it, are never reachable. An
ordinary user may not use redirects: there the folders are read-only bind mounts.
"""

from __future__ import annotations

import os
import py_compile
import shutil
import stat
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import cache_from_source
from pathlib import Path

from sandbox_gym.api import SandboxSpec
from sandbox_gym.errors import BackendUnavailable
from sandbox_gym.guest import syscalls
from sandbox_gym.images import store

from .overlay import SUBDIR, Base

GUEST_FOLDER = "/.sandbox-gym"
NEEDED = "A root file system of your own needs Python 3.10 or newer, for this machine's processor"
WORKSPACE = "/workspace"
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_CONFIG_FOLDERS = (
    "/etc/alternatives",
    "/etc/ssl/certs",
    "/etc/fonts",
    "/etc/terminfo",
    "/etc/ld.so.conf.d",
    "/etc/chromium.d",
)
_CONFIG_FILES = (
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/localtime",
    "/etc/os-release",
    "/etc/debian_version",
    "/etc/mime.types",
    "/etc/nsswitch.conf",
    "/etc/protocols",
    "/etc/services",
    "/etc/bash.bashrc",
    "/etc/profile",
)
_DEVICES = {
    "null": (1, 3),
    "zero": (1, 5),
    "full": (1, 7),
    "random": (1, 8),
    "urandom": (1, 9),
    "tty": (5, 0),
}
_FOLDERS = {"tmp": 0o1777, "var/tmp": 0o1777, "run": 0o755, "home": 0o755, "root": 0o700, "workspace": 0o755}
_EMPTY = ("proc", "sys", "mnt", "opt", "srv", "media", "dev/pts", "var/lib", "var/cache", "var/log")
_PASSWD = "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
_HOSTS = "127.0.0.1 localhost\n::1 localhost\n"
_RESOLVER = "nameserver 127.0.0.1\n"  # there, if anywhere: see `proxy`
_GROUP = "root:x:0:\nnogroup:x:65534:\n"


@dataclass
class Rootfs:
    """A root file system, ready to be mounted any number of times. `python`: the guest's interpreter, inside."""

    python: str
    path: list[str]  # what goes on the guest's sys.path
    skeleton: Path
    lower: str | None = None  # the layer below the skeleton, a host path
    attached: list[tuple[str, str]] = field(default_factory=list)  # (host path, target), bound read-only

    def base(self, userns_fd: int, privileged: bool) -> Base:
        """The layers as descriptors, id-mapped into the sandbox's user namespace, for this process's life."""
        paths = [str(self.skeleton)] + ([self.lower] if self.lower else [])
        lowers = []
        for path in paths:
            if not privileged:
                lowers.append(path)
                continue
            fd = syscalls.open_tree(path)
            syscalls.mount_setattr(
                fd, syscalls.MOUNT_ATTR_IDMAP | syscalls.MOUNT_ATTR_RDONLY, userns_fd=userns_fd
            )
            lowers.append(f"/proc/self/fd/{fd}")
        attached: list[tuple[str, str]] = []
        for source, target in self.attached:
            fd = syscalls.open_tree(source, recursive=not privileged)
            _make_read_only(fd, userns_fd, privileged)
            place = self.skeleton.parent / f"{self.skeleton.name}-mount-{len(attached)}"
            if os.path.isdir(source):
                place.mkdir()
            else:
                place.touch()
            syscalls.move_mount(fd, str(place))
            os.close(fd)
            attached.append((str(place), target))
        return Base(tuple(lowers), tuple(attached), privileged)


def _make_read_only(fd: int, userns_fd: int, privileged: bool) -> None:
    syscalls.mount_setattr(
        fd, syscalls.MOUNT_ATTR_RDONLY | syscalls.MOUNT_ATTR_NOSUID, recursive=not privileged
    )
    if privileged:
        try:
            syscalls.mount_setattr(fd, syscalls.MOUNT_ATTR_IDMAP, userns_fd=userns_fd)
        except OSError:  # a file system that can't be id-mapped: its files then belong to nobody inside
            pass


def build(spec: SandboxSpec, folder: Path, privileged: bool) -> Rootfs:
    """Makes the skeleton in `folder`. Raises BackendUnavailable when the root file system can't hold a guest."""
    root = folder / SUBDIR
    root.mkdir(parents=True)
    if spec.rootfs is None:
        rootfs = _host(spec, folder, root, privileged)
    else:
        rootfs = _directory(spec, folder, root, privileged)
    _devices(root / "dev", privileged, rootfs)
    furnish(root, spec.rootfs)
    if spec.rootfs is not None:
        _resemble(root, Path(spec.rootfs), privileged)
    for mount in spec.mounts:
        _mountpoint(root, mount.source, mount.target)
        rootfs.attached.append((mount.source, mount.target))
    return rootfs


def _host(spec: SandboxSpec, folder: Path, root: Path, privileged: bool) -> Rootfs:
    rootfs = Rootfs(_interpreter(), list(spec.python_path or ()), folder, "/" if privileged else None)
    device = os.stat("/").st_dev
    for path in (*_SYSTEM, *_CONFIG_FOLDERS):
        _show(path, root, rootfs, device, privileged)
    for path in python_folders([*(spec.python_path or ()), *spec.in_place]):
        _show(path, root, rootfs, device, privileged)
    return rootfs


def _directory(spec: SandboxSpec, folder: Path, root: Path, privileged: bool) -> Rootfs:
    assert spec.rootfs is not None
    directory = Path(spec.rootfs).resolve()
    held = store.hold(spec.rootfs) if spec.image is not None else -1  # to the end of this process
    if held < 0 and not privileged:
        raise BackendUnavailable(
            "a folder as root file system needs root (overlayfs redirects): run as root, or take an image out of an "
            "archive"
        )
    try:
        python = find_python(spec)
    except BackendUnavailable:
        if held >= 0:
            os.close(held)
        raise
    rootfs = Rootfs(python, [], folder, str(directory.parent))
    if directory.name != SUBDIR:
        os.setxattr(root, "trusted.overlay.redirect", f"/{directory.name}".encode())
    return rootfs


def find_python(spec: SandboxSpec) -> str:
    """The interpreter in a root file system that is a directory. Raises BackendUnavailable where it has none."""
    assert spec.rootfs is not None
    directory = Path(spec.rootfs).resolve()
    path = [entry for entry in spec.env.get("PATH", "").split(":") if entry.startswith("/")]
    for candidate in (f"{entry}/python3" for entry in (*path, "/usr/local/bin", "/usr/bin")):
        if _exists_in(directory, candidate):
            return candidate
    raise BackendUnavailable(
        f"{directory} has no /usr/bin/python3, nor one on its PATH, and the guest's own process runs in one: "
        f"install it there (apt-get install python3-minimal, apk add python3). {NEEDED}"
    )


def _exists_in(directory: Path, path: str) -> bool:
    """Whether `path` exists below `directory`, with links read as the sandbox would (absolute ones from its own /)."""
    current = directory / path.lstrip("/")
    for _ in range(16):
        if not current.is_symlink():
            return current.exists() or _exists_in_parent(directory, current)
        target = os.readlink(current)
        current = directory / target.lstrip("/") if target.startswith("/") else current.parent / target
    return False


def _exists_in_parent(directory: Path, path: Path) -> bool:
    parts = path.relative_to(directory).parts
    real = directory
    for part in parts:
        real = real / part
        if real.is_symlink():
            target = os.readlink(real)
            real = directory / target.lstrip("/") if target.startswith("/") else real.parent / target
    return real.exists()


def _show(path: str, root: Path, rootfs: Rootfs, device: int, privileged: bool) -> None:
    """Makes a host folder visible at its own path; a link stays a link."""
    target = root / path.lstrip("/")
    if target.is_symlink() or not os.path.lexists(path):
        return
    if os.path.islink(path):
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(os.readlink(path))
        return
    if target.exists():
        return
    target.mkdir(parents=True)
    if privileged and os.stat(path).st_dev == device:
        os.setxattr(target, "trusted.overlay.redirect", path.encode())
        shutil.copystat(path, target)
    else:
        rootfs.attached.append((path, path))


def _interpreter() -> str:
    """This Python by a path without links in its folders, since links outside of what is shown lead nowhere inside. The
    last part may be one: from it a virtual environment knows itself.
    """
    folder, name = os.path.split(sys.executable)
    return os.path.join(os.path.realpath(folder), name)


def python_folders(extra: Sequence[str] = ()) -> list[str]:
    """The running Python's own folders that lie outside the system's, outermost first: prefixes and what of sys.path is
    installed. Never the working directory, a script's folder or a home folder: those may hold secrets.
    """
    wanted = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix}
    wanted |= {os.path.dirname(os.path.realpath(sys.executable)), *extra}
    environment = os.path.dirname(os.path.dirname(_interpreter()))
    # `sys.prefix` misses it here: no `site` (-S) ran.
    if os.path.exists(os.path.join(environment, "pyvenv.cfg")):
        wanted.add(environment)
    found: list[str] = []
    for entry in sorted({os.path.realpath(path) for path in wanted if os.path.isdir(path)}):
        inside_system = any(entry == s or entry.startswith(s + "/") for s in _SYSTEM)
        if not inside_system and not any(entry == f or entry.startswith(f + "/") for f in found):
            found.append(entry)
    return found


def furnish(root: Path, directory: str | None) -> None:
    """Puts into the empty folder `root` the files that are ours: empty folders, some of /etc, the guest's code. They go
    over the root file system `directory`; None: over this host's folders.
    """
    from_host = directory is None
    for name, mode in _FOLDERS.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        os.chmod(root / name, mode)
    for name in _EMPTY:
        (root / name).mkdir(parents=True, exist_ok=True)
    if directory is None:
        _etc(root / "etc")
    else:
        _hosts(root / "etc", Path(directory) / "etc")
    (root / "etc").mkdir(exist_ok=True)
    (root / "etc/resolv.conf").write_text(_RESOLVER)
    package = root / GUEST_FOLDER.lstrip("/") / "sandbox_gym_guest"
    package.mkdir(parents=True)
    for source in Path(syscalls.__file__).parent.glob("*.py"):
        shutil.copyfile(source, package / source.name)
        if from_host:  # the guest's Python is this one: spares each guest 13 ms of compiling
            compiled = cache_from_source(str(package / source.name))
            py_compile.compile(
                str(source),
                compiled,
                str(Path(GUEST_FOLDER, package.name, source.name)),
                doraise=True,
                invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
            )
    (package.parent / "start.py").write_text("from sandbox_gym_guest.agent import main\n\nmain()\n")


def _etc(etc: Path) -> None:
    etc.mkdir(exist_ok=True)
    (etc / "passwd").write_text(_PASSWD)
    (etc / "group").write_text(_GROUP)
    (etc / "hosts").write_text(_HOSTS)
    (etc / "hostname").write_text("sandbox\n")
    for path in _CONFIG_FILES:
        target = etc.parent / path.lstrip("/")
        if os.path.isfile(path) and not target.exists():
            shutil.copyfile(path, target)


def _hosts(etc: Path, there: Path) -> None:
    """Without it localhost has no address. Images leave it empty, since docker gives one to each container."""
    hosts = there / "hosts"
    if not there.is_symlink() and not hosts.is_symlink() and not (hosts.exists() and hosts.stat().st_size):
        etc.mkdir(exist_ok=True)
        (etc / "hosts").write_text(_HOSTS)


def _resemble(root: Path, directory: Path, privileged: bool) -> None:
    """Gives the skeleton's folders, which are seen in place of those below, the modes and owners of those."""
    for folder, below, _ in os.walk(root):
        there = directory / Path(folder).relative_to(root)
        status = there.lstat()
        if privileged:
            os.chown(folder, status.st_uid, status.st_gid)
        os.chmod(folder, stat.S_IMODE(status.st_mode))
        # Never through a link: only folders that are merged.
        below[:] = [name for name in below if (there / name).is_dir() and not (there / name).is_symlink()]


def _devices(dev: Path, privileged: bool, rootfs: Rootfs) -> None:
    dev.mkdir(exist_ok=True)
    (dev / "shm").mkdir(exist_ok=True)
    os.chmod(dev / "shm", 0o1777)
    for name, link in (("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        (dev / name).symlink_to(link)
    (dev / "ptmx").symlink_to("pts/ptmx")
    for name, (major, minor) in _DEVICES.items():
        if privileged:
            os.mknod(dev / name, stat.S_IFCHR | 0o666, os.makedev(major, minor))
            os.chmod(dev / name, 0o666)
        else:  # no mknod in a user namespace: each node is bound from the host's
            (dev / name).touch()
            rootfs.attached.append((f"/dev/{name}", f"/dev/{name}"))


def _mountpoint(root: Path, source: str, target: str) -> None:
    place = root / target.lstrip("/")
    if os.path.isdir(source):
        place.mkdir(parents=True, exist_ok=True)
    else:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch()
