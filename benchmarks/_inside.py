"""What must be measured among a supervisor's own mounts and processes: criu's bare commands, the planner.

`measure` is for benchmarks; it runs this file there, which prints milliseconds as JSON.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from sandbox_gym.backends.native import criu, planner
from sandbox_gym.guest import syscalls
from sandbox_gym.sandbox import Sandbox

_RUN, _ROOT, _CONTROL_FD = Path("/run"), "/run/root", 100
_PR_SET_CHILD_SUBREAPER = 36
# As backends/native/swrk.py has them.
_FLAGS = ["--manage-cgroups=ignore", "--network-lock", "skip", "--tcp-established", "--file-locks"]
_FLAGS += ["--empty-ns", "net", "--link-remap", "-v2"]


def measure(box: Sandbox, what: str, rounds: int) -> list[float]:
    """`what`: "restore" (of the newest image there is), "dump" or "plan". Milliseconds of each round, sorted."""
    folder = box._backend._folder  # type: ignore[attr-defined]
    supervisor = json.loads((folder / "info.json").read_text())["supervisor_pid"]
    (pid,) = [row["pid"] for row in box._backend.list() if row["id"] == box.id]
    command = ["nsenter", "-t", str(supervisor), "-m", "-p", "--", sys.executable, "-m", "benchmarks._inside"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    said = subprocess.run(
        [*command, what, str(folder), str(pid), str(rounds)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if said.returncode:
        raise RuntimeError(f"{what}: {said.stderr[-2000:]}")
    times: list[float] = sorted(json.loads(said.stdout))
    return times


# ---- inside -------------------------------------------------------------------------------------------------------


def bare_restore(folder: Path, pid: int, rounds: int) -> list[float]:
    """`criu restore`, on the root of the sandbox that the image is of."""
    image = max((folder / "disk").glob("image-*"), key=lambda path: path.stat().st_mtime)
    _enter(folder, pid)
    syscalls.prctl(
        _PR_SET_CHILD_SUBREAPER, 1
    )  # what a criu that has ended leaves is this process's to wait for
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    os.dup2(theirs.fileno(), _CONTROL_FD)
    command = [criu.find().path, "restore", "-d", "-D", str(image), "-W", "/run/work", "-o", "log", *_FLAGS]
    command += ["--root", _ROOT, "--pidfile", "/run/work/pid"]
    command += ["--inherit-fd", f"fd[{_CONTROL_FD}]:socket:[{_control(pid)}]", *_shown(folder)]
    times = []
    for _ in range(rounds + 1):
        (_RUN / "work").mkdir()
        times.append(_run(command))
        _kill(int((_RUN / "work/pid").read_text()))
        shutil.rmtree(_RUN / "work")
    ours.close()
    return times[1:]  # the first has found out about the kernel


def bare_dump(folder: Path, pid: int, rounds: int) -> list[float]:
    """`criu dump -R` of the sandbox."""
    place = folder / "disk/bare"
    mounts = [line.split()[4] for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines()]
    outside = [mount for mount in mounts if mount not in {"/", "/proc"}]
    _enter(folder, pid)
    command = [criu.find().path, "dump", "-t", str(pid), "-R", "-D", str(place), "-W", "/run/work"]
    command += ["-o", "log", *_FLAGS, "--external", f"unix[{_control(pid)}]"]
    for number, mount in enumerate(outside):
        command += ["--external", f"mnt[{mount}]:{number}"]
    times = []
    for _ in range(rounds + 1):
        (_RUN / "work").mkdir()
        place.mkdir()
        times.append(_run(command))
        shutil.rmtree(place)
        shutil.rmtree(_RUN / "work")
    return times[1:]


def plan(folder: Path, pid: int, rounds: int) -> list[float]:
    """The supervisor's look at a guest that a fork captures, before each snapshot."""
    inode, times = _control(pid), []
    for _ in range(rounds):
        start = time.perf_counter()
        refusal = planner.refusal(pid, inode, [pid], [])
        times.append(1e3 * (time.perf_counter() - start))
        if refusal is not None:
            raise RuntimeError(refusal)
    return times


def _run(command: list[str]) -> float:
    start = time.perf_counter()
    fds = [_CONTROL_FD] if "restore" in command else []
    null = subprocess.DEVNULL
    process = subprocess.run(command, pass_fds=fds, stdout=null, stderr=null, timeout=60, check=False)
    spent = 1e3 * (time.perf_counter() - start)
    if process.returncode:
        raise RuntimeError(f"{command[:2]}: {(_RUN / 'work/log').read_text()[-1500:]}")
    return spent


def _control(pid: int) -> int:
    """The inode of the guest's only socket."""
    links = [os.readlink(entry.path) for entry in os.scandir(f"/proc/{pid}/fd")]
    (inode,) = [int(link[8:-1]) for link in links if link.startswith("socket:[")]
    return inode


def _enter(folder: Path, pid: int) -> None:
    """Mounts as the supervisor gives them to criu: a /run of its own, and there the sandbox's root."""
    own, its = (os.open(f"/proc/{name}/ns/mnt", os.O_RDONLY) for name in ("self", pid))
    syscalls.setns(its, syscalls.CLONE_NEWNS)
    root = syscalls.open_tree("/")
    syscalls.setns(own, syscalls.CLONE_NEWNS)
    syscalls.unshare(syscalls.CLONE_NEWNS)
    ours = syscalls.open_tree(str(folder), recursive=True)
    for place in ("/tmp", "/run"):
        syscalls.mount("bare", place, "tmpfs", 0, "mode=755")
    folder.mkdir(parents=True)
    syscalls.move_mount(ours, str(folder))
    os.mkdir(_ROOT)
    syscalls.move_mount(root, _ROOT)


def _shown(folder: Path) -> list[str]:
    """Options for the host's folders that the sandbox shows."""
    options: list[str] = []
    for source in sorted((folder / "base").glob("*-mount-*")):
        key = f"{'d' if source.is_dir() else 'f'}{source.name.rpartition('-')[2]}"
        target = _RUN / key
        target.mkdir() if source.is_dir() else target.touch()
        syscalls.move_mount(syscalls.open_tree(str(source), recursive=True), str(target))
        options += ["--external", f"mnt[{key}]:{target}"]
    return options


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


if __name__ == "__main__":
    functions = {"restore": bare_restore, "dump": bare_dump, "plan": plan}
    json.dump(functions[sys.argv[1]](Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])), sys.stdout)
