"""The one path of the disk that this machine's kernel doesn't take by itself."""

from __future__ import annotations

import os
import subprocess
import sys

_ATTACHED = """
import os, tempfile
from sandbox_gym.backends.native import overlay
from sandbox_gym.guest import syscalls as s

s.unshare(s.CLONE_NEWNS)
s.mount(None, "/", None, s.MS_REC | s.MS_PRIVATE)
with tempfile.TemporaryDirectory() as place:
    s.mount("test", place, "tmpfs")
    for name in ("lower/.root", "lower/hidden", "upper", "work"):
        os.makedirs(f"{place}/{name}")
    open(f"{place}/lower/.root/file", "w").write("below")
    base = overlay.Base((f"{place}/lower",), (), True)
    root, whole = overlay.mount(f"{place}/upper", f"{place}/work", (), base)
    before = open("/proc/self/mounts").read()
    attached = overlay.subtree_attached(whole)
    assert open("/proc/self/mounts").read() == before
    for fd in (root, attached):
        assert os.listdir(f"/proc/self/fd/{fd}") == ["file"], os.listdir(f"/proc/self/fd/{fd}")
    open(f"/proc/self/fd/{attached}/file", "a").write(" above")
    assert open(f"/proc/self/fd/{root}/file").read() == "below above"
    for fd in (root, whole, attached):
        os.close(fd)
    s.umount2(place, 0)
print("fine")
"""


def test_the_root_by_way_of_a_mount_point_as_before_linux_6_15() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _ATTACHED], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "fine\n", done.stderr
    assert not any(name.startswith("sandbox-gym-root-") for name in os.listdir("/tmp"))
