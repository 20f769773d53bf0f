"""Root file systems of one's own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from sandbox_gym.images.image import Image
from sandbox_gym.testing.subject import Subject, check, expect, output, value

_SKIPPED = (
    "__pycache__",
    "test",
    "tests",
    "idlelib",
    "tkinter",
    "lib2to3",
    "ensurepip",
    "config-*",
    "*-packages",
)


def small_root(folder: Path, *, compiled: bool = False) -> Path:
    """A root file system in `folder`, of this interpreter, its standard library (with its bytecode where `compiled`), a
    shell, and what these link to.
    """
    root = folder / "root"
    library = sysconfig.get_path("stdlib")
    binary = os.path.realpath(sys.executable)
    skipped = shutil.ignore_patterns(*_SKIPPED, *(() if compiled else ("__pycache__",)))
    shutil.copytree(library, root / library.lstrip("/"), ignore=skipped, symlinks=True)
    programs = {binary: binary}
    for name in ("sh", "cat", "ls", "pwd"):
        found = shutil.which(name, path="/usr/bin:/bin")
        assert found, f"this host has no {name} to make an image of"
        programs[f"/bin/{name}"] = found
    extensions = (root / library.lstrip("/")).glob("lib-dynload/*.so")
    for path in _libraries([*programs.values(), *map(str, extensions)]):
        programs[path] = path
    for place, source in programs.items():
        target = root / place.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(os.path.realpath(source), target)
    for place in ("usr/bin", "tmp", "etc", "proc", "dev", "sys"):
        (root / place).mkdir(parents=True, exist_ok=True)
    if not (root / "usr/bin/python3").exists():
        (root / "usr/bin/python3").symlink_to(binary)
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (root / "etc/motd").write_text("from the image\n")
    return root


def _libraries(files: list[str]) -> set[str]:
    """What the loader would load for these files: no failure where one links to nothing."""
    listing = subprocess.run(["ldd", *files], capture_output=True, text=True, check=False, timeout=60).stdout
    words = {word for line in listing.splitlines() if not line.endswith(":") for word in line.split()}
    return {word for word in words if word.startswith("/") and os.path.exists(word)}


def _listing(folder: Path) -> str:
    return "".join(f"{name}\n" for name in sorted(os.listdir(folder)))


@check("image")
def folder(subject: Subject) -> None:
    """A folder's root file system is all that there is, with the image's variables and work folder; env= comes over
    them; nothing that is written inside, or in copies, changes it.
    """
    root = small_root(subject.folder())
    image = Image(str(root), None, {"ONE": "image", "TWO": "image"}, "/srv/app")
    box = subject.create(image=image, env={"TWO": "given"})
    expect(output(box, "cat /etc/motd; ls /usr"), "from the image\n" + _listing(root / "usr"), "inside")
    look = "import os; os.environ['ONE'], os.environ['TWO'], os.getcwd()"
    expect(value(box, look), "('image', 'given', '/srv/app')", "in a cell")
    output(box, "echo changed > /etc/motd; echo more > /etc/more")
    (copy,) = subject.fork(box)
    for sandbox in (box, copy):
        expect(output(sandbox, "cat /etc/motd /etc/more"), "changed\nmore\n", "what was written")
        expect(output(sandbox, "echo $ONE $TWO; pwd"), "image given\n/srv/app\n", "in a command")
    expect((root / "etc/motd").read_text(), "from the image\n", "the host's file")
    assert not (root / "etc/more").exists() and not (root / "srv").exists()
    expect(
        output(subject.create(image=root), "cat /etc/motd; pwd"), "from the image\n/workspace\n", "another's"
    )
