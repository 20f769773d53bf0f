"""What guests see of this process's Python where nothing else was asked for: what is installed, and PYTHONPATH."""

from __future__ import annotations

import dataclasses
import os
import site
import sys

from sandbox_gym.api import SandboxSpec


def seen(spec: SandboxSpec) -> SandboxSpec:
    """The spec with that in it; as it is where it says what its Python sees, or has a root file system of its own."""
    if spec.rootfs is not None or spec.python_path is not None:
        return spec
    return dataclasses.replace(spec, python_path=python_path(), in_place=in_place())


def python_path() -> list[str]:
    """What of this process's sys.path the guest gets too: what is installed, and what PYTHONPATH names. Nothing that
    Python, Ray or pytest put there by themselves (a script's folder, the working directory), and no home folder: those
    may hold secrets (`python_path=` is for code of yours).
    """
    home = os.path.expanduser("~")
    given = {os.path.realpath(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry}
    given |= _added_by_pth_files()
    prefixes = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix, *_site_folders()}
    installed = tuple(os.path.join(os.path.realpath(prefix), "") for prefix in prefixes)
    found: list[str] = []
    for entry in sys.path:
        path = os.path.realpath(entry)
        above_home = home == path or home.startswith(path.rstrip("/") + "/")
        wanted = path in given or f"{path}/".startswith(installed)
        if entry and wanted and os.path.isdir(path) and not above_home and entry not in found:
            found.append(entry)
    return found


def in_place() -> list[str]:
    """The packages that setuptools' editable installs lead to by an import hook, which runs in the guest as well; with
    folders beside them that they link to.
    """
    found: list[str] = []
    for name, module in sorted(sys.modules.items()):
        mapping = getattr(module, "MAPPING", None) if name.startswith("__editable__") else None
        for path in mapping.values() if isinstance(mapping, dict) else ():
            if os.path.isdir(path):
                found += [path, *map(os.path.realpath, _linked_folders(path))]
    return list(dict.fromkeys(found))


def _linked_folders(folder: str) -> list[str]:
    return sorted(entry.path for entry in os.scandir(folder) if entry.is_symlink() and entry.is_dir())


def _site_folders() -> list[str]:
    return [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]


def _added_by_pth_files() -> set[str]:
    """The folders that .pth files put on sys.path: other editable installs."""
    found: set[str] = set()
    for folder in _site_folders():
        for name in os.listdir(folder) if os.path.isdir(folder) else ():
            if name.endswith(".pth"):
                with open(os.path.join(folder, name), errors="replace") as file:
                    lines = [
                        line.strip() for line in file if not line.startswith(("#", "import ", "import\t"))
                    ]
                found |= {os.path.realpath(os.path.join(folder, line)) for line in lines if line}
    return found
