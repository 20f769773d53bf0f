"""Where sandboxes' writable layers lie, and what bounds them.

As root: subvolumes of one btrfs file system in a sparse, already unlinked file on a loop device, each under a simple
quota; so the bytes are on disk, a full one is EDQUOT, and nothing survives the last process that has it open.
Otherwise: one tmpfs for each layer, sized to the limit; its bytes are memory.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import struct
import subprocess
import uuid
from collections.abc import Callable
from pathlib import Path

from sandbox_gym.api import Limits
from sandbox_gym.errors import BackendUnavailable, SnapshotError
from sandbox_gym.guest import syscalls

from . import numbers
from .overlay import SUBDIR
from .walking import FOLDER, back, into

_BTRFS = 0x94


def _ioctl(number: int, size: int, direction: int) -> int:
    return direction << 30 | size << 16 | _BTRFS << 8 | number


_SUBVOL_CREATE = _ioctl(14, 4096, 1)
_SNAP_DESTROY = _ioctl(15, 4096, 1)
_SNAP_CREATE = _ioctl(23, 4096, 1)  # BTRFS_IOC_SNAP_CREATE_V2
_SYNC = _ioctl(8, 0, 0)
_QUOTA_CTL = _ioctl(40, 16, 3)
_QGROUP_LIMIT = _ioctl(43, 48, 2)
_ENABLE_SIMPLE_QUOTA = 4  # since Linux 6.7
_LIMIT_MAX_RFER = 1
_NO_LIMIT = 2**64 - 1
_LOOP_SET_DIRECT_IO = 0x4C08  # <linux/loop.h>
_SPARSE_BYTES = 1 << 40
# A disk that is smaller keeps files and what tells where they are in one place: else the former, taking a gigabyte each
# time, leave the latter none, and nothing can be made any more.
_MIXED_BELOW = 8 << 30
_KEPT_FREE = 64 << 20  # bytes
_LEAST_BYTES = 1 << 20  # that a copy of a full disk may still write: overlayfs mounts read-only on less


class Layer:
    """One sandbox's writable layer; once frozen, a read-only layer under the copies of its snapshot."""

    def __init__(self, folder: str, drop: Callable[[], None]) -> None:
        self.folder = folder
        self.upper, self.work, self.frozen = f"{folder}/u", f"{folder}/w", f"{folder}/f"
        self.lower: str | None = None  # once frozen, what to stack above; None where nothing was ever written
        self.used = 0  # bytes that the frozen layer holds
        self.start = 0  # its inode numbers are above; 0 where they are of a file system of their own
        self.top = 0  # once frozen, and not empty: above all its inode numbers
        self.bound: int | None = None  # bytes that may be written to it
        self.set_limit: Callable[[int | None], None] = lambda most: None
        self.merged: Layer | None = None  # what it and all below it show together, where that was made ahead
        self.dropped: Callable[[], object] = lambda: None  # is called when it is gone
        self._drop = drop
        self._holders = 1

    def make_folders(self, owner: int) -> None:
        for path in (self.upper, self.work):
            os.mkdir(path)
            os.chown(path, owner, owner)

    def freeze(self) -> None:
        """Puts what was written in `lower`: a folder that no mount has as its upper one, since overlayfs logs a kernel
        warning for each mount that stacks on another's upper folder. Again after a thaw, when more was written.
        """
        try:
            self._freeze()
        except OSError as error:
            if not is_full(error):
                raise
            self.set_limit(None)  # an ordinary state of a disk, and from now on nobody writes
            self._freeze()

    def _freeze(self) -> None:
        content = f"{self.upper}/{SUBDIR}"
        if self.lower is None and os.path.isdir(content):
            os.makedirs(self.frozen, exist_ok=True)
            os.rename(content, f"{self.frozen}/{SUBDIR}")
            self.lower = self.frozen
        if self.lower is not None:
            self.used = used_bytes(self.lower)
            self.count_inodes()

    def share_with(self, clone: Layer) -> None:
        """While a clone holds what this layer has written, that counts here even where it is removed: so much more may
        be written meanwhile.
        """
        shared = clone.used
        self._move_bound(shared)
        clone.dropped = lambda: self._move_bound(-shared)

    def _move_bound(self, by: int) -> None:
        if self.bound is not None and self._holders:
            self.bound += by
            if self.lower is None:
                self.set_limit(self.bound)

    def thaw(self) -> None:
        """It is written to again."""
        self.set_limit(self.bound)

    def count_inodes(self) -> None:
        self.top = numbers.highest(self.folder) if self.start else 0

    def hold(self) -> None:
        """One more guest or image stands on it."""
        self._holders += 1

    def release(self) -> None:
        """One less; the last takes it from the disk."""
        self._holders -= 1
        if not self._holders:
            self._drop()
            self.dropped()
            if self.merged is not None:
                self.merged.release()


class BtrfsStore:
    kind = "btrfs"

    def total_bytes(self) -> int | None:
        """What all layers and images hold together, with what still waits to be written out."""
        status = os.fstatvfs(self._root)
        waiting = 0
        for name in ("bytes_may_use", "bytes_reserved"):
            try:
                with open(f"/sys/fs/btrfs/{self._uuid}/allocation/{self._kind_of_space}/{name}") as file:
                    waiting += int(file.read())
            except OSError:  # no sysfs: it counts a few seconds later
                pass
        return (status.f_blocks - status.f_bfree) * status.f_frsize + waiting

    def room(self, wanted: int) -> int:
        """Bytes that are left, a little kept for all that live. Where they are too few, the kernel is made to count
        what was given back, which it puts off for half a minute.
        """
        for _ in range(2):
            # The disk is a file in the other.
            disk, below = os.fstatvfs(self._root), os.statvfs(image_folder())
            unused = disk.f_blocks * disk.f_frsize - (self.total_bytes() or 0)
            left = min(unused, below.f_bavail * below.f_frsize) - _KEPT_FREE
            if left >= wanted:
                break
            fcntl.ioctl(self._root, _SYNC)
        return max(0, left)

    def __init__(self, folder: Path) -> None:
        """Makes and mounts the file system on `folder`, in this mount namespace. Raises BackendUnavailable."""
        self._folder = str(folder)
        self._count = 0
        self._numbers: numbers.Numbers | None = None
        self._uuid = str(uuid.uuid4())
        # Never with a name, which a kill would leave; the loop device keeps it until the last mount of it is gone.
        image = os.open(image_folder(), os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        path = f"/proc/self/fd/{image}"
        try:
            size = min(_SPARSE_BYTES, max(1 << 30, shutil.disk_usage(image_folder()).free))
            os.truncate(image, size)
            command = ["mkfs.btrfs", "-q", "-K", "-U", self._uuid, "-m", "single", "-d", "single", path]
            self._kind_of_space = "mixed" if size < _MIXED_BELOW else "data"
            if size < _MIXED_BELOW:
                command.append("--mixed")
            subprocess.run(command, check=True, capture_output=True, timeout=30, pass_fds=[image])
            options = ["--no-canonicalize", "-o", "loop,noatime,nodatasum"]
            command = ["mount", "-t", "btrfs", *options, path, self._folder]
            subprocess.run(command, check=True, capture_output=True, timeout=30, pass_fds=[image])
        except FileNotFoundError as error:
            raise BackendUnavailable(
                f"{error.filename} is missing: apt-get install btrfs-progs mount"
            ) from None
        except subprocess.CalledProcessError as error:
            raise BackendUnavailable(
                f"{command[0]} failed: {error.stderr.decode(errors='replace').strip()}"
            ) from None
        finally:
            os.close(image)
        _bypass_cache(self._folder)
        self._root = os.open(self._folder, os.O_RDONLY)
        try:
            fcntl.ioctl(self._root, _QUOTA_CTL, struct.pack("QQ", _ENABLE_SIMPLE_QUOTA, 0))
        except OSError as error:
            raise BackendUnavailable(f"this kernel's btrfs has no simple quotas ({error.strerror})") from None

    def make(self, limits: Limits, owner: int, above: int = 0) -> Layer:
        """A layer whose inode numbers are all above the `top` of those that it is to lie on. Raises OSError."""
        name = self._next()
        layer = Layer(f"{self._folder}/{name}", lambda: self._destroy(name))
        if above:
            self._numbers = self._numbers or numbers.Numbers(self._folder, self._make_subvolume)
            layer.start = self._numbers.reach(above)
            self._snapshot(self._numbers.fd, name)
        else:
            layer.start = numbers.FIRST
            self._make_subvolume(name)
        layer.set_limit = lambda most: self._set_limit(layer.folder, most)
        layer.make_folders(owner)
        limit(layer, limits, 0)
        return layer

    def clone(self, layer: Layer) -> Layer:
        """A frozen layer with what `layer` holds at this instant, also while it is in use: a snapshot of its subvolume.
        The kernel first writes out what of it is only in memory, and waits: 2 ms, and the time that the disk takes.
        """
        copy = self._copy(layer)
        if layer.lower is not None:
            copy.lower = copy.frozen
        copy.freeze()
        return copy

    def branch(self, layer: Layer, owner: int) -> Layer:
        """A writable copy of a frozen layer, in an instant, to go on with in its place: files that are open for writing
        would be copied whole into a layer on top.
        """
        copy = self._copy(layer)
        shutil.rmtree(copy.work)  # as an earlier mount has left it
        os.rmdir(copy.upper)
        copy.make_folders(owner)
        if layer.lower is not None:
            if os.path.isdir(f"{copy.frozen}/{SUBDIR}"):  # not where layers were merged that held nothing
                os.rename(f"{copy.frozen}/{SUBDIR}", f"{copy.upper}/{SUBDIR}")
            os.rmdir(copy.frozen)
        return copy

    def _copy(self, layer: Layer) -> Layer:
        name = self._next()
        fd = os.open(layer.folder, os.O_RDONLY)
        try:
            self._snapshot(fd, name)
        finally:
            os.close(fd)
        copy = Layer(f"{self._folder}/{name}", lambda: self._destroy(name))
        copy.start = layer.start
        copy.set_limit = lambda most: self._set_limit(copy.folder, most)
        return copy

    def _make_subvolume(self, name: str) -> None:
        fcntl.ioctl(self._root, _SUBVOL_CREATE, bytearray(struct.pack("q4088s", 0, name.encode())))

    def _snapshot(self, subvolume: int, name: str) -> None:
        request = struct.pack("qQQ32x4040s", subvolume, 0, 0, name.encode())
        fcntl.ioctl(self._root, _SNAP_CREATE, bytearray(request))

    def _next(self) -> str:
        self._count += 1
        return f"{self._count}"

    def _set_limit(self, folder: str, most: int | None) -> None:
        fd = os.open(folder, os.O_RDONLY)
        try:
            value = _NO_LIMIT if most is None else most
            fcntl.ioctl(fd, _QGROUP_LIMIT, struct.pack("QQQQQQ", 0, _LIMIT_MAX_RFER, value, 0, 0, 0))
        finally:
            os.close(fd)

    def _destroy(self, name: str) -> None:
        fcntl.ioctl(self._root, _SNAP_DESTROY, bytearray(struct.pack("q4088s", 0, name.encode())))


class TmpfsStore:
    kind = "tmpfs"

    def total_bytes(self) -> int | None:
        """Nothing counts it: each layer is a file system of its own, of memory."""
        return None

    def room(self, wanted: int) -> int:
        """No image ever lies on one."""
        return wanted

    def make(self, limits: Limits, owner: int, above: int = 0) -> Layer:
        context = syscalls.fsopen("tmpfs")
        try:
            if limits.disk_bytes is not None:
                syscalls.fsconfig_string(context, "size", str(limits.disk_bytes))
            syscalls.fsconfig_create(context)
            fd = syscalls.fsmount(context)
        finally:
            os.close(context)
        layer = Layer(f"/proc/self/fd/{fd}", lambda: os.close(fd))
        layer.set_limit = lambda most: _set_size(fd, most)
        layer.bound = limits.disk_bytes
        layer.make_folders(owner)
        return layer

    def clone(self, layer: Layer) -> Layer:
        """Raises SnapshotError."""
        raise SnapshotError(
            "a tmpfs can't be copied while it is in use: disks on btrfs can, which needs root and btrfs-progs"
        )

    def branch(self, layer: Layer, owner: int) -> Layer:
        """Raises SnapshotError."""
        return self.clone(layer)


def _set_size(fd: int, most: int | None) -> None:
    context = syscalls.fspick(fd)
    try:
        syscalls.fsconfig_string(context, "size", str(most or 0))  # 0: none
        syscalls.fsconfig_reconfigure(context)
    finally:
        os.close(context)


Store = BtrfsStore | TmpfsStore


def _bypass_cache(mounted: str) -> None:
    """Has a loop device read and write its file directly: else all lies in memory twice, and what the second copy still
    has to write out holds up whoever waits for the first.
    """
    with open("/proc/thread-self/mountinfo") as file:  # a test mounts in a thread of its own
        fields = next(line.split() for line in file if line.split()[4] == mounted)
    device = os.open(fields[fields.index("-") + 2], os.O_RDONLY)
    try:
        fcntl.ioctl(device, _LOOP_SET_DIRECT_IO, 1)
    except OSError as error:
        if error.errno != errno.EINVAL:  # the file lies on a file system that can't, such as tmpfs
            raise
    finally:
        os.close(device)


def limit(layer: Layer, limits: Limits, used: int) -> None:
    """Bounds a layer to what the disk limit leaves after `used` bytes of frozen layers below it."""
    if limits.disk_bytes is not None:
        layer.bound = max(_LEAST_BYTES, limits.disk_bytes - used)
        layer.set_limit(layer.bound)


def used_bytes(path: str) -> int:
    """What a frozen layer holds, in bytes on disk. Raises OSError (ESTALE) when its folders are moved meanwhile.

    Counted file by file: a btrfs quota group counts what its subvolume has itself allocated. That is nothing for blocks
    shared with another (`clone`, `merge`), and for long too much, since a removed file counts until the next commit.
    """
    fd = os.open(path, FOLDER)
    try:
        total, below = _used_in(fd)
        way = [(os.fstat(fd).st_ino, below)]  # each folder's number, and the names in it that are still to do
        while way:
            if way[-1][1]:
                try:
                    fd = into(fd, way[-1][1].pop())
                except (FileNotFoundError, NotADirectoryError):  # the guest may still be running
                    continue
                used, below = _used_in(fd)
                total += used
                way.append((os.fstat(fd).st_ino, below))
            else:
                way.pop()
                if way:
                    fd = back(fd, way[-1][0])
        return total
    finally:
        os.close(fd)


def _used_in(fd: int) -> tuple[int, list[str]]:
    """The bytes of a folder's own files, and the names of the folders in it."""
    total, folders = 0, []
    with os.scandir(fd) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                folders.append(entry.name)
                continue
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            total += status.st_blocks * 512 // max(1, status.st_nlink)
    return total, folders


def image_folder() -> str:
    """Where the file lies that the disk is. Raises BackendUnavailable."""
    folder = os.environ.get("SANDBOX_GYM_DISK_DIR", "/var/tmp")
    if not os.access(folder, os.W_OK):
        raise BackendUnavailable(f"{folder} is not writable: set SANDBOX_GYM_DISK_DIR to a folder on a disk")
    return folder


def is_full(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, errno.EDQUOT)
