"""The same for an ordinary user: in a user namespace, on tmpfs, with attributes that are user.overlay's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_AS_USER = """
import os, sys
sys.path.insert(0, os.getcwd())
from sandbox_gym.guest import syscalls as s
user = os.geteuid()
s.unshare(s.CLONE_NEWUSER | s.CLONE_NEWNS)
for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {user} 1")):
    open(f"/proc/self/{name}", "w").write(text)
from sandbox_gym.api import Limits
from sandbox_gym.backends.native import disk, merge, overlay
store = disk.TmpfsStore()

def mount(lowers):
    layer = store.make(Limits(), 0)
    root, whole = overlay.mount(layer.upper, layer.work, lowers, base)
    return layer, f"/proc/self/fd/{root}", (root, whole)

below = store.make(Limits(), 0)
base = overlay.Base((below.upper,), (), False)
os.makedirs(f"{below.upper}/.root/folder/sub")
for name in ("folder/a", "folder/b", "folder/sub/c", "d"):
    open(f"{below.upper}/.root/{name}", "w").write("base")
first, root, fds = mount([])
os.unlink(f"{root}/folder/a")
os.unlink(f"{root}/folder/sub/c")
os.rmdir(f"{root}/folder/sub")
os.mkdir(f"{root}/folder/sub")
os.mkdir(f"{root}/new")
open(f"{root}/new/gone", "w").write("gone")
os.setxattr(f"{root}/d", "user.overlay.opaque", b"y")
open(f"{root}/large", "wb").write(b"large" * 100_000)
os.link(f"{root}/large", f"{root}/folder/again")
open(f"{root}/sparse", "wb").truncate(1 << 24)
for fd in fds: os.close(fd)
first.freeze()
second, root, fds = mount([first.lower])
os.unlink(f"{root}/new/gone")
open(f"{root}/folder/sub/e", "w").write("later")
for fd in fds: os.close(fd)
second.freeze()
merged = store.make(Limits(), 0)
target = f"{merged.folder}/merged"
os.mkdir(target)
merge.merge([second.lower, first.lower], target, userxattr=True)
from tests.native.trees import tree
(_, stack, _), (_, alone, _) = mount([second.lower, first.lower]), mount([target])
old, new = tree(stack), tree(alone)
assert old == new, [(name, old[name], new[name]) for name in old if old[name] != new[name]]
assert os.stat(f"{target}/.root/sparse").st_blocks == 0
assert sorted(os.listxattr(f"{target}/.root/d")) == ["user.overlay.overlay.opaque"]
print("fine", sorted(name.decode() for name in new))
"""


def test_as_an_ordinary_user_on_tmpfs() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _AS_USER],
        cwd=Path(__file__).parents[2],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    names = [
        "",
        "d",
        "folder",
        "folder/again",
        "folder/b",
        "folder/sub",
        "folder/sub/e",
        "large",
        "new",
        "sparse",
    ]
    assert done.stdout == f"fine {names}\n", done.stderr
