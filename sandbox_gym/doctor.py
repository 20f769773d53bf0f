"""What works on this machine, what does not, and the command that mends it."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import shutil
import subprocess
import sys
import time
import warnings
from pathlib import Path

from sandbox_gym._table import size, table
from sandbox_gym.checks import Check
from sandbox_gym.errors import SandboxError

_OLDEST_PYTHON, _OLDEST_GYMNASIUM = (3, 10), (1, 2, 2)
_MACHINES = ("x86_64", "aarch64")
_LITTLE_SHM = 64 << 20
_FORKS_ONLY = "without it, snapshots work only where a fork captures all: one process with one thread"


def diagnose() -> tuple[list[Check], bool]:
    """Every check, and whether the native backend works here: a sandbox was made, and a copy of it answered."""
    found = [_python(), _gymnasium()]
    if sys.platform != "linux" or platform.machine() not in _MACHINES:
        here = (
            f"{platform.system()} on {platform.machine()}: sandboxes need Linux on {' or '.join(_MACHINES)}"
        )
        return [*found, Check("machine", "missing", here, "use a Linux machine, or a virtual one")], False
    from sandbox_gym.backends.native import probe

    found += probe.checks()
    trial = _trial()
    found += [trial, _leftovers(), _hugepages(), _shared_memory(), _criu(), _docker(), _gvisor()]
    return found, trial.state == "ok"


def report() -> int:
    """Prints the checks. The exit status: 1 when the native backend can't work here."""
    found, works = diagnose()
    rows: list[tuple[str, str, str]] = []
    for check in found:
        rows.append((check.state, check.name, check.meaning))
        if check.remedy:
            rows.append(("", "", f"-> {check.remedy}"))
    print(table(("STATE", "CHECK", "MEANING"), rows))
    print(f"\nThe native backend {'works' if works else 'does not work'} here.")
    return 0 if works else 1


def _python() -> Check:
    version = platform.python_version()
    if sys.version_info >= _OLDEST_PYTHON:
        return Check("python", "ok", version)
    return Check("python", "missing", f"{version}: 3.10 or newer is needed", "apt-get install -y python3")


def _gymnasium() -> Check:
    remedy = "pip install --upgrade gymnasium"
    try:
        version = importlib.metadata.version("gymnasium")
    except importlib.metadata.PackageNotFoundError:
        return Check("gymnasium", "missing", "not installed: Sandbox works, environments do not", remedy)
    if _numbers(version) >= _OLDEST_GYMNASIUM:
        return Check("gymnasium", "ok", version)
    return Check("gymnasium", "limited", f"{version}: environments need 1.2.2 or newer", remedy)


def _trial() -> Check:
    from sandbox_gym.sandbox import Sandbox

    name = "native backend"
    try:
        start = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # limits that can't be set: another line says so
            created = Sandbox.create()
        with created as box:
            made = time.perf_counter()
            box.run_code("x = 6 * 7")
            forked = time.perf_counter()
            with box.fork(1)[0] as copy:
                answer = copy.run_code("x").value
                answered = time.perf_counter()
    except (SandboxError, OSError) as error:
        return Check(name, "missing", f"no sandbox could be made: {error}", "see the lines above")
    if answer != "42":
        return Check(name, "missing", f"a copy of a sandbox answered {answer}, not 42", "report it as a bug")
    times = f"made in {(made - start) * 1e3:.0f} ms, snapshot and copy in {(answered - forked) * 1e3:.1f} ms"
    return Check(name, "ok", f"a sandbox was {times}")


def _leftovers() -> Check:
    from sandbox_gym.backends.shared import registry

    found = registry.collect(dry_run=True)
    if found:
        return Check(
            "leftovers", "limited", f"dead clients have left {len(found)} run folder(s)", "sandbox-gym gc"
        )
    return Check("leftovers", "ok", "dead clients have left nothing")


def _hugepages() -> Check:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    mode = re.search(r"\[(\w+)\]", setting.read_text()) if setting.exists() else None
    name, meaning = "huge pages", mode[1] if mode else "not in this kernel"
    if meaning == "always":
        return Check(name, "ok", meaning)
    meaning += ": copying a guest takes about 0.02 ms for each MB of its memory, far less with `always`"
    return Check(name, "limited", meaning, f"echo always > {setting}" if mode else "")


def _shared_memory() -> Check:
    name = "/dev/shm"
    try:
        usage = shutil.disk_usage(name)
    except OSError as error:
        return Check(name, "missing", str(error), "mount -t tmpfs tmpfs /dev/shm")
    meaning = f"{size(usage.free)} free of {size(usage.total)}"
    if usage.free >= _LITTLE_SHM:
        return Check(name, "ok", meaning)
    return Check(
        name, "limited", f"{meaning}: little for large observations", "mount -o remount,size=1G /dev/shm"
    )


def _criu() -> Check:
    from sandbox_gym.backends.native import criu
    from sandbox_gym.backends.shared import programs

    found = criu.look()
    if isinstance(found, programs.Lack):
        return Check("criu", "missing", f"{found.why}; {_FORKS_ONLY}", found.remedy)
    complaint = criu.complaint(found)
    if complaint:
        meaning = f"{found}, but `criu check` says: {complaint}; {_FORKS_ONLY}"
        return Check("criu", "limited", meaning, "boot a newer kernel; a container: docker run --privileged")
    return Check("criu", "ok", f"{found}, `criu check` passes: threads and children are captured too")


def _docker() -> Check:
    from sandbox_gym.backends.docker import probe

    return probe.check()


def _gvisor() -> Check:
    from sandbox_gym.backends.gvisor import probe

    return probe.check()


def _answer(*command: str) -> str | None:
    """What a program prints; None when it isn't there, fails or hangs."""
    try:
        result = subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=10, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])
