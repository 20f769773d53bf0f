"""What of a machine a process that was written there relies on, and what another one lacks to go on with it.

criu itself checks every file that a process has mapped, by its size and build id, when it restores it. Here is what it
would find out late, in words that nobody understands, or not at all.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import sandbox_gym
from sandbox_gym.api import SandboxSpec

from . import criu

# Flags of /proc/cpuinfo that stand for instructions which a process finds and then relies on. The others are the
# kernel's own affair, and come and go with its version.
_INSTRUCTIONS = re.compile(
    "mmx.*|3dnow.*|sse.*|ssse.*|pni|avx.*|amx.*|fma.*|f16c|aes|vaes|v?pclmulqdq|gfni|sha_ni|sha512|sm[34]|adx|bmi[12]|abm|"
    "tbm|xop|lwp|movbe|popcnt|lahf_lm|cmov|cx8|cx16|fxsr.*|fpu|xsave.*|xgetbv1|rdrand|rdseed|rdpid|rdtscp|fsgsbase|"
    "clflush.*|clwb|cldemote|movdir.*|enqcmd|serialize|waitpkg|hle|rtm|tsxldtrk|pku|ospke|apx.*|user_shstk"
)
_LIBRARIES = ("libpython", "libc.so", "libc-", "ld-linux", "ld-musl")


def facts(spec: SandboxSpec) -> dict[str, Any]:
    """What a snapshot of such a sandbox relies on here. Raises BackendUnavailable where there can be no image."""
    found = {
        "sandbox_gym": sandbox_gym.__version__,
        "guest": _guest(),
        "machine": platform.machine(),
        "kernel": platform.release(),
        "criu": ".".join(map(str, criu.find().version)),
        "cpu_flags": sorted(_cpu_flags()),
    }
    return {**found, "python": _python()} if spec.rootfs is None else found


def lacks(facts_there: Mapping[str, Any], spec: SandboxSpec) -> list[str]:
    """What stands in the way here of a snapshot from elsewhere. Raises BackendUnavailable, and KeyError, TypeError or
    ValueError for what are no facts.
    """
    here, there = facts(spec), facts_there
    found = []
    if there["machine"] != here["machine"]:
        found.append(f"it was made on {there['machine']}, and this machine is {here['machine']}")
    missing = sorted(set(there["cpu_flags"]) - set(here["cpu_flags"]))
    if missing:
        found.append(f"this processor lacks {', '.join(missing)}")
    if _numbers(there["criu"]) > _numbers(here["criu"]):
        found.append(f"criu {there['criu']} wrote it, and here is the older {here['criu']}")
    if there["guest"] != here["guest"]:
        found.append(
            f"sandbox_gym {there['sandbox_gym']} made it, with other code inside the guest than this "
            f"{here['sandbox_gym']} has"
        )
    if spec.rootfs is None:
        found += _other_python(there["python"], here["python"])
        found += [
            f"{path}, of its sys.path, is not here"
            for path in (*(spec.python_path or ()), *spec.in_place)
            if not os.path.isdir(path)
        ]
    elif spec.image is not None and not os.path.isdir(spec.rootfs):
        found.append(
            f"its image with the digest {spec.image} is not here: unpack the same (Image.from_oci_archive) first"
        )
    elif not os.path.isdir(spec.rootfs):
        found.append(f"its root file system {spec.rootfs} is not here")
    for mount in spec.mounts:
        if not os.path.exists(mount.source):
            found.append(f"{mount.source}, which it is shown, is not here")
    return found


def _other_python(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Its root file system is the host's own Python environment: it must be the same."""
    for what in ("version", "executable", "prefix", "base_prefix"):
        if there[what] != here[what]:
            return [f"it runs in a Python whose {what} is {there[what]}, and here that is {here[what]}"]
    files = {**dict.fromkeys(there["files"]), **here["files"]}
    return [
        f"{path} is another build than there"
        for path in sorted(files)
        if there["files"].get(path) != here["files"].get(path)
    ]


@functools.cache
def _python() -> dict[str, Any]:
    files = {os.path.realpath(sys.executable)}
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line[73:].strip()
        if path.startswith("/") and os.path.basename(path).startswith(_LIBRARIES):
            files.add(path)
    return {
        "version": platform.python_version(),
        "executable": sys.executable,
        "prefix": sys.prefix,
        "base_prefix": sys.base_prefix,
        "files": {path: _hash(path) for path in sorted(files)},
    }


def _hash(path: str | Path) -> str:
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


@functools.cache
def _guest() -> str:
    """Of the code that a guest runs, a part of which it may yet load: it must be that of the host's side."""
    folder = Path(sandbox_gym.__file__).parent / "guest"
    listing = "".join(f"{path.name} {_hash(path)}\n" for path in sorted(folder.glob("*.py")))
    return hashlib.sha256(listing.encode()).hexdigest()


@functools.cache
def _cpu_flags() -> frozenset[str]:
    text = Path("/proc/cpuinfo").read_text()
    listed = re.search(r"^(?:flags|Features|isa)\s*: *(.*)$", text, re.MULTILINE)
    flags = listed[1].split() if listed else []
    if platform.machine() not in ("x86_64", "i686"):
        return frozenset(flags)  # there each stands for instructions
    return frozenset(flag for flag in flags if _INSTRUCTIONS.fullmatch(flag))


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")][:2]
