"""Several frozen overlay layers become one that shows the same, over any base.

Layers are added newest first; a name that is there already hides what comes later. So what the merged layer holds is
all the state there is, and one open folder on each side is enough however deep a guest has nested its own. Rules of
overlayfs that this follows (Documentation/filesystems/overlayfs.rst, fs/overlayfs/namei.c and inode.c, Linux 6.18):

- A whiteout, or any other thing that is no folder, ends the merging of folders above and below it. So does "opaque".
- A folder's owner, mode, times and attributes are those of the newest layer that has it.
- Whiteouts stay, since the base may have the name. A folder that is not merged with another lists its whiteouts as
  files unless it has an `origin` attribute: an empty one ("copied up, but origin unknown") is put on each with any.
- Of the other private attributes, `origin` names a file of the layer below, and `impure`, `nlink`, `upper`, `uuid` and
  `protattr` are only read from an upper layer: none is copied. `redirect` and `metacopy` can't be kept without
  the layers that they point into: those are refused.

Not kept: flags of chattr(1), birth and change times, and st_nlink of a name whose other names a newer layer has hidden.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field

from sandbox_gym.guest import syscalls

from .walking import FOLDER, back, into

_FICLONE = 0x40049409
_COPIED_BYTES = (
    16 << 10
)  # up to here a copy takes less time than a clone, which waits for what is not on disk yet
_PENDING = 64  # files whose content is on its way: to wait for many at once, with few descriptors
_DEFAULT_ACL = "system.posix_acl_default"
# How the store keeps a file, and the label that the host's policy gives it: no part of what the guest made.
_OF_THE_HOST = ("btrfs.", "security.selinux")
_SYNC_FILE_RANGE_WRITE = 2

_sync_file_range = syscalls.libc.sync_file_range
_sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


def merge(layers: Sequence[str], target: str, *, userxattr: bool = False) -> None:
    """Fills the empty folder `target` with what `layers` (newest first, as for lowerdir+) show together.

    Nobody may write to the layers meanwhile. Large files share their blocks with the layers where the file system can
    (btrfs). `userxattr`: the layers are of mounts with that option. On failure `target` is left half filled.

    Raises: OSError, as when the disk is full; ValueError for a layer with redirects or metacopies.
    """
    merger = _Merger(target, "user.overlay." if userxattr else "trusted.overlay.")
    try:
        for layer in layers:
            merger.add(layer)
    finally:
        merger.close()


@dataclass
class _Folder:
    """One that is being merged. `status`: the source's where this layer made it, else the target's as it was."""

    source_inode: int
    target_inode: int
    made: bool
    status: os.stat_result
    attributes: list[str]  # of the source
    opaque: bool
    default_acl: bytes | None = None
    whiteouts: bool = False
    folders: list[str] = field(default_factory=list)  # those in it that are still to do


class _Merger:
    def __init__(self, target: str, prefix: str) -> None:
        self._prefix = prefix
        self._opaque, self._origin = f"{prefix}opaque", f"{prefix}origin"
        self._clones = True
        self._first = True
        self._source = -1  # the folders at hand, in the layer and in what is made
        self._target = -1
        self._staging = -1
        self._staging_name = f".merge-{os.urandom(8).hex()}"
        self._pending: list[tuple[int, int, os.stat_result]] = []
        self._root = os.open(target, FOLDER)

    def close(self) -> None:
        for source, target, _ in self._pending:
            os.close(source)
            os.close(target)
        self._pending.clear()
        for fd in (self._source, self._target, self._staging, self._root):
            if fd >= 0:
                os.close(fd)
        self._source = self._target = self._staging = self._root = -1

    def add(self, layer: str) -> None:
        """Adds what no layer so far has hidden."""
        self._source = os.open(layer, FOLDER)
        self._target = os.dup(self._root)
        way = [self._enter(made=self._first)]
        way[0].opaque = False  # the kernel merges all roots
        self._first = False
        while way:
            if way[-1].folders:
                made = self._descend(way[-1].folders.pop())
                if made is not None:
                    way.append(self._enter(made=made))
                continue
            if len(way) == 1:
                self._unstage()
            self._leave(way.pop())
            if way:
                self._source = back(self._source, way[-1].source_inode)
                self._target = back(self._target, way[-1].target_inode)
        self._settle()
        os.close(self._source)
        os.close(self._target)
        self._source = self._target = -1

    def _descend(self, name: str) -> bool | None:
        """Goes to a folder of the layer and its like in the target. Whether that was made; None where it is hidden."""
        made = True
        try:
            os.mkdir(name, 0o700, dir_fd=self._target)
        except FileExistsError:
            made = False
        try:
            below = os.open(name, FOLDER, dir_fd=self._target)
        except NotADirectoryError:
            return None
        if not made and _attribute(below, self._opaque) == b"y":
            os.close(below)
            return None
        os.close(self._target)
        self._target = below
        self._source = into(self._source, name)
        return made

    def _enter(self, *, made: bool) -> _Folder:
        """Takes all but the folders that are in it."""
        names = os.listxattr(self._source)
        opaque = self._opaque in names and os.getxattr(self._source, self._opaque) == b"y"
        source, target = os.fstat(self._source), os.fstat(self._target)
        status = source if made else target
        folder = _Folder(source.st_ino, target.st_ino, made, status, self._kept(names), opaque)
        if not made:
            folder.default_acl = _attribute(self._target, _DEFAULT_ACL)
            if folder.default_acl is not None:  # else what comes from an older layer would inherit it
                os.removexattr(self._target, _DEFAULT_ACL)
        with os.scandir(self._source) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folder.folders.append(entry.name)
                else:
                    self._take(entry.name, entry.stat(follow_symlinks=False), folder)
        return folder

    def _leave(self, folder: _Folder) -> None:
        """Gives the folder its metadata: last, since every name made in it has changed its times."""
        if folder.made:
            _copy_metadata(self._source, self._target, folder.status, folder.attributes)
        else:
            if folder.default_acl is not None:
                os.setxattr(self._target, _DEFAULT_ACL, folder.default_acl)
            os.utime(self._target, ns=(folder.status.st_atime_ns, folder.status.st_mtime_ns))
        if folder.whiteouts:
            os.setxattr(self._target, self._origin, b"")
        if folder.opaque:
            os.setxattr(self._target, self._opaque, b"y")

    def _take(self, name: str, status: os.stat_result, folder: _Folder) -> None:
        try:
            if self._is_whiteout(name, status):
                os.mknod(name, stat.S_IFCHR, os.makedev(0, 0), dir_fd=self._target)
                folder.whiteouts = True
            elif status.st_nlink > 1:
                self._link(name, status)
            else:
                self._make(name, status, self._target, name)
        except FileExistsError:
            self._cut(name)

    def _is_whiteout(self, name: str, status: os.stat_result) -> bool:
        if stat.S_ISCHR(status.st_mode):
            return status.st_rdev == os.makedev(0, 0)
        if not stat.S_ISREG(status.st_mode) or status.st_size:
            return False
        return f"{self._prefix}whiteout" in os.listxattr(_within(self._source, name), follow_symlinks=False)

    def _cut(self, name: str) -> None:
        """A newer layer has `name`, and this one has no folder there: a newer folder ends here."""
        try:
            fd = os.open(name, FOLDER, dir_fd=self._target)
        except NotADirectoryError:
            return
        try:
            os.setxattr(fd, self._opaque, b"y")
        finally:
            os.close(fd)

    def _link(self, name: str, status: os.stat_result) -> None:
        """One of several names of a file. The file is kept by its number beside all names until the layer is done."""
        try:
            os.stat(name, dir_fd=self._target, follow_symlinks=False)
        except FileNotFoundError:
            pass
        else:
            raise FileExistsError(errno.EEXIST, "hidden", name)
        if self._staging < 0:
            os.mkdir(self._staging_name, 0o700, dir_fd=self._root)
            self._staging = os.open(self._staging_name, FOLDER, dir_fd=self._root)
        number = str(status.st_ino)
        try:
            self._make(name, status, self._staging, number)
        except FileExistsError:
            pass
        try:
            self._link_staged(number, name)
        except OSError as error:
            if error.errno != errno.EMLINK:
                raise
            # Its name in staging was one too many: the last of its 65,535 names gets a file of its own.
            os.unlink(number, dir_fd=self._staging)
            self._make(name, status, self._staging, number)
            self._link_staged(number, name)

    def _link_staged(self, number: str, name: str) -> None:
        os.link(number, name, src_dir_fd=self._staging, dst_dir_fd=self._target, follow_symlinks=False)

    def _unstage(self) -> None:
        if self._staging < 0:
            return
        # Opened anew: on btrfs a descriptor lists only what was there when it was opened.
        self._staging = into(self._staging, ".")
        with os.scandir(self._staging) as entries:
            for entry in entries:
                os.unlink(entry.name, dir_fd=self._staging)
        os.rmdir(self._staging_name, dir_fd=self._root)
        os.close(self._staging)
        self._staging = -1

    def _make(self, name: str, status: os.stat_result, folder: int, new: str) -> None:
        """Makes `new` in `folder` like the layer's `name`, which is no folder. Raises FileExistsError."""
        if stat.S_ISREG(status.st_mode):
            self._begin(name, status, folder, new)
            return
        if stat.S_ISLNK(status.st_mode):
            os.symlink(os.readlink(name, dir_fd=self._source), new, dir_fd=folder)
        else:
            os.mknod(new, status.st_mode, status.st_rdev, dir_fd=folder)
        os.chown(new, status.st_uid, status.st_gid, dir_fd=folder, follow_symlinks=False)
        if not stat.S_ISLNK(status.st_mode):
            os.chmod(new, stat.S_IMODE(status.st_mode), dir_fd=folder)
        # These can't be opened, as the calls for attributes need, and have no such call relative to a folder.
        old_path, new_path = _within(self._source, name), _within(folder, new)
        for attribute in self._kept(os.listxattr(old_path, follow_symlinks=False)):
            value = os.getxattr(old_path, attribute, follow_symlinks=False)
            os.setxattr(new_path, attribute, value, follow_symlinks=False)
        times = status.st_atime_ns, status.st_mtime_ns
        os.utime(new, ns=times, dir_fd=folder, follow_symlinks=False)

    def _begin(self, name: str, status: os.stat_result, folder: int, new: str) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        target = os.open(new, flags, 0o600, dir_fd=folder)
        try:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            source = os.open(name, flags, dir_fd=self._source)
        except OSError:
            os.close(target)
            raise
        self._pending.append((source, target, status))
        if self._clones and status.st_size > _COPIED_BYTES:
            # Starts the writes that FICLONE would start and wait for, one file after the other. Only a hint.
            _sync_file_range(source, 0, 0, _SYNC_FILE_RANGE_WRITE)
        if len(self._pending) >= _PENDING:
            self._settle()

    def _settle(self) -> None:
        """Gives pending files their content, and then their metadata: a write takes setuid and capabilities away."""
        for source, target, status in self._pending:
            names = self._kept(os.listxattr(source))
            self._fill(source, target, status)
            _copy_metadata(source, target, status, names)
        for source, target, _ in self._pending:
            os.close(source)
            os.close(target)
        self._pending.clear()

    def _fill(self, source: int, target: int, status: os.stat_result) -> None:
        if self._clones and status.st_size > _COPIED_BYTES:
            try:
                fcntl.ioctl(target, _FICLONE, source)
                return
            except OSError as error:
                # EINVAL: of two files with other flags (chattr).
                if error.errno not in (errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.EINVAL):
                    raise
                self._clones = error.errno == errno.EINVAL
        if status.st_blocks * 512 >= status.st_size:
            _send(source, target, 0, status.st_size)
            return
        os.ftruncate(target, status.st_size)
        end = 0
        while end < status.st_size:
            try:
                start = os.lseek(source, end, os.SEEK_DATA)
            except OSError as error:
                if error.errno != errno.ENXIO:  # a hole up to the end
                    raise
                return
            end = os.lseek(source, start, os.SEEK_HOLE)
            _send(source, target, start, end)

    def _kept(self, names: list[str]) -> list[str]:
        """Those of a file's attributes that the merged one gets. Raises ValueError."""
        kept = []
        for name in names:
            if name.startswith(self._prefix) and not name.startswith(f"{self._prefix}overlay."):
                if name.endswith((".redirect", ".metacopy")):
                    raise ValueError(f"a layer with {name} can't be merged: it needs what lies below")
            elif not name.startswith(_OF_THE_HOST):
                kept.append(name)
        return kept


def _copy_metadata(source: int, target: int, status: os.stat_result, names: list[str]) -> None:
    os.chown(target, status.st_uid, status.st_gid)  # first: it takes setuid away
    os.chmod(target, stat.S_IMODE(status.st_mode))
    for name in names:
        os.setxattr(target, name, os.getxattr(source, name))
    os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))


def _send(source: int, target: int, start: int, end: int) -> None:
    os.lseek(target, start, os.SEEK_SET)
    while start < end:
        sent = os.sendfile(target, source, start, min(end - start, 1 << 30))
        if not sent:
            raise OSError(errno.EIO, "a layer's file became shorter while it was merged")
        start += sent


def _within(fd: int, name: str) -> str:
    """A path of bounded length whose last part alone is looked up, and not followed by calls told so."""
    return f"/proc/self/fd/{fd}/{name}"


def _attribute(fd: int, name: str) -> bytes | None:
    try:
        return os.getxattr(fd, name)
    except OSError as error:
        if error.errno not in (errno.ENODATA, errno.EOPNOTSUPP):
            raise
        return None
