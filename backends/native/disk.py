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
import tempfile
from collections.abc import Callable
from pathlib import Path

from sandbox_gym.api import Limits
from sandbox_gym.errors import BackendUnavailable
from sandbox_gym.guest import syscalls

from .overlay import SUBDIR

_BTRFS = 0x94


def _ioctl(number: int, size: int, direction: int) -> int:
    return direction << 30 | size << 16 | _BTRFS << 8 | number


_SUBVOL_CREATE = _ioctl(14, 4096, 1)
_SNAP_DESTROY = _ioctl(15, 4096, 1)
_QUOTA_CTL = _ioctl(40, 16, 3)
_QGROUP_LIMIT = _ioctl(43, 48, 2)
_ENABLE_SIMPLE_QUOTA = 4  # since Linux 6.7
_LIMIT_MAX_RFER = 1
_SPARSE_BYTES = 1 << 40
_LEAST_BYTES = 1 << 16


class Layer:
    """One sandbox's writable layer; once frozen, a read-only layer under the copies of its snapshot."""

    def __init__(self, folder: str, owner: int, drop: Callable[[], None], fd: int = -1) -> None:
        self.folder = folder
        self.fd = fd  # of the mount that it is, where it is one of its own
        self.upper, self.work = f"{folder}/u", f"{folder}/w"
        self.lower: str | None = None  # once frozen, what to stack above; None where nothing was ever written
        self.used = 0  # bytes that the frozen layer holds
        self._drop = drop
        self._holders = 1
        for path in (self.upper, self.work):
            os.mkdir(path)
            os.chown(path, owner, owner)

    def freeze(self) -> None:
        """Puts what was written in `lower`: a folder that no mount has as its upper one, since overlayfs logs a kernel
        warning for each mount that stacks on another's upper folder. Again after a thaw, when more was written.
        """
        content = f"{self.upper}/{SUBDIR}"
        if self.lower is None and os.path.isdir(content):
            self.lower = f"{self.folder}/f"
            os.mkdir(self.lower)
            os.rename(content, f"{self.lower}/{SUBDIR}")
        self.used = used_bytes(self.lower) if self.lower is not None else 0

    def hold(self) -> None:
        """One more guest or image stands on it."""
        self._holders += 1

    def release(self) -> None:
        """One less; the last takes it from the disk."""
        self._holders -= 1
        if not self._holders:
            self._drop()


class BtrfsStore:
    kind = "btrfs"

    def __init__(self, folder: Path) -> None:
        """Makes and mounts the file system on `folder`, in this mount namespace. Raises BackendUnavailable."""
        self._folder = str(folder)
        self._count = 0
        image = tempfile.NamedTemporaryFile(prefix="sandbox-gym-disk-", dir=_image_folder())
        try:
            os.truncate(image.name, min(_SPARSE_BYTES, max(1 << 30, shutil.disk_usage(image.name).free)))
            command = ["mkfs.btrfs", "-q", "-K", "-m", "single", "-d", "single", image.name]
            subprocess.run(command, check=True, capture_output=True, timeout=30)
            command = ["mount", "-t", "btrfs", "-o", "loop,noatime,nodatasum", image.name, self._folder]
            subprocess.run(command, check=True, capture_output=True, timeout=30)
        except FileNotFoundError as error:
            raise BackendUnavailable(
                f"{error.filename} is missing: apt-get install btrfs-progs mount"
            ) from None
        except subprocess.CalledProcessError as error:
            raise BackendUnavailable(
                f"{command[0]} failed: {error.stderr.decode(errors='replace').strip()}"
            ) from None
        finally:
            image.close()  # unlinked: the loop device keeps the file until the last mount of it is gone
        self._root = os.open(self._folder, os.O_RDONLY)
        try:
            fcntl.ioctl(self._root, _QUOTA_CTL, struct.pack("QQ", _ENABLE_SIMPLE_QUOTA, 0))
        except OSError as error:
            raise BackendUnavailable(f"this kernel's btrfs has no simple quotas ({error.strerror})") from None

    def make(self, limits: Limits, owner: int) -> Layer:
        self._count += 1
        name = f"{self._count}"
        fcntl.ioctl(self._root, _SUBVOL_CREATE, bytearray(struct.pack("q4088s", 0, name.encode())))
        layer = Layer(f"{self._folder}/{name}", owner, lambda: self._destroy(name))
        self.limit(layer, limits, 0)
        return layer

    def limit(self, layer: Layer, limits: Limits, used: int) -> None:
        """Bounds a layer to what the disk limit leaves after `used` bytes of frozen layers below it."""
        if limits.disk_bytes is None:
            return
        fd = os.open(layer.folder, os.O_RDONLY)
        try:
            left = max(_LEAST_BYTES, limits.disk_bytes - used)
            fcntl.ioctl(fd, _QGROUP_LIMIT, struct.pack("QQQQQQ", 0, _LIMIT_MAX_RFER, left, 0, 0, 0))
        finally:
            os.close(fd)

    def _destroy(self, name: str) -> None:
        fcntl.ioctl(self._root, _SNAP_DESTROY, bytearray(struct.pack("q4088s", 0, name.encode())))


class TmpfsStore:
    kind = "tmpfs"

    def make(self, limits: Limits, owner: int) -> Layer:
        context = syscalls.fsopen("tmpfs")
        try:
            if limits.disk_bytes is not None:
                syscalls.fsconfig_string(context, "size", str(limits.disk_bytes))
            syscalls.fsconfig_create(context)
            fd = syscalls.fsmount(context)
        finally:
            os.close(context)
        return Layer(f"/proc/self/fd/{fd}", owner, lambda: os.close(fd), fd)

    def limit(self, layer: Layer, limits: Limits, used: int) -> None:
        if limits.disk_bytes is None:
            return
        context = syscalls.fspick(layer.fd)
        try:
            syscalls.fsconfig_string(context, "size", str(max(_LEAST_BYTES, limits.disk_bytes - used)))
            syscalls.fsconfig_reconfigure(context)
        finally:
            os.close(context)


Store = BtrfsStore | TmpfsStore


def used_bytes(path: str) -> int:
    """What a frozen layer holds, in bytes on disk."""
    total = 0
    for folder, _, files in os.walk(path):
        for name in files:
            try:
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
            except FileNotFoundError:
                continue
    return total


def _image_folder() -> str:
    folder = os.environ.get("SANDBOX_GYM_DISK_DIR", "/var/tmp")
    if not os.access(folder, os.W_OK):
        raise BackendUnavailable(f"{folder} is not writable: set SANDBOX_GYM_DISK_DIR to a folder on a disk")
    return folder


def is_full(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, errno.EDQUOT)
