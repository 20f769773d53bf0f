"""Files and processes of the host and of other sandboxes."""

from __future__ import annotations

import contextlib
import ctypes
import glob
import hashlib
import os
import socket

from .words import CONTAINED, POSSIBLE, REFUSED, Known, Outcome, attempt, libc, opening, reading, shared

_SYSTEM = ("/proc", "/sys", "/dev", "/usr", "/lib", "/bin", "/sbin", "/opt")
_MOST = 2000  # files that are looked at


@attempt("a host file by its path")
def _(known: Known) -> Outcome:
    return reading(known["files"], known)


@attempt("a host file through /proc/*/root and cwd")
def _(known: Known) -> Outcome:
    ways = (
        glob.glob("/proc/[0-9]*/root")
        + glob.glob("/proc/[0-9]*/cwd")
        + ["/proc/self/root", "/proc/self/cwd/../.."]
    )
    return reading([way + path for way in ways for path in known["files"]], known)


@attempt("a host file by climbing out of a chroot")
def _(known: Known) -> Outcome:
    os.makedirs("/tmp/jail", exist_ok=True)
    child = os.fork()
    if child == 0:
        try:
            os.chroot("/tmp/jail")
            for _ in range(64):
                os.chdir("..")
            os.chroot(".")
            os._exit({REFUSED: 1, CONTAINED: 1, POSSIBLE: 0}[reading(known["files"], known)[0]])
        except OSError:
            os._exit(2)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return ((POSSIBLE, "read"), (CONTAINED, "at the sandbox's own root"), (REFUSED, "no chroot"))[status]


@attempt("files below the mounts' own sources")
def _(known: Known) -> Outcome:
    """What /proc/self/mountinfo tells of layers and host folders."""
    words = open("/proc/self/mountinfo").read().replace("=", " ").replace(",", " ").replace(":", " ").split()
    folders = {
        word for word in words if word.startswith("/") and not word.startswith(_SYSTEM) and word != "/"
    }
    found = []
    for folder in folders:
        for place, _, names in os.walk(folder):
            found += [f"{place}/{name}" for name in names]
            if len(found) > _MOST:
                break
    return reading(found, known)


@attempt("the host's password hashes")
def _(known: Known) -> Outcome:
    try:
        with open("/etc/shadow", "rb") as file:
            same = hashlib.sha256(file.read()).hexdigest() == known["shadow"]
    except OSError as error:
        return REFUSED, str(error)
    return (POSSIBLE if same else CONTAINED), "/etc/shadow was read"


@attempt("files in home folders")
def _(known: Known) -> Outcome:
    names = glob.glob("/root/.*") + glob.glob("/root/*") + glob.glob("/home/*/*") + glob.glob("/home/*/.*")
    return reading([name for name in names if os.path.isfile(name)], known)


@attempt("sockets of container engines and of the system")
def _(known: Known) -> Outcome:
    paths = [
        "docker.sock",
        "containerd/containerd.sock",
        "podman/podman.sock",
        "dbus/system_bus_socket",
        "crio/crio.sock",
    ]
    for path in [f"{folder}/{path}" for folder in ("/run", "/var/run") for path in paths] + known["sockets"]:
        with socket.socket(socket.AF_UNIX) as sock:
            if sock.connect_ex(path) == 0:
                return POSSIBLE, path
    return REFUSED, "none can be connected to"


@attempt("environment variables of other processes")
def _(known: Known) -> Outcome:
    return reading(glob.glob("/proc/[0-9]*/environ"), known)


@attempt("command lines of other processes")
def _(known: Known) -> Outcome:
    return reading(glob.glob("/proc/[0-9]*/cmdline"), known)


@attempt("signals to processes outside")
def _(known: Known) -> Outcome:
    """The host sees whether these live on."""
    for pid in filter(_outside, known["pids"]):
        with contextlib.suppress(OSError):
            os.kill(pid, 0)
            return POSSIBLE, f"process {pid}"
    return REFUSED, "no such process"


@attempt("ptrace of a process outside")
def _(known: Known) -> Outcome:
    return _ptrace([*filter(_outside, known["pids"]), 1 << 21], POSSIBLE)


@attempt("ptrace of process 1 inside")
def _(known: Known) -> Outcome:
    return _ptrace([1], CONTAINED) if os.getpid() != 1 else (CONTAINED, "it is process 1")


def _ptrace(pids: list[int], done: str) -> Outcome:
    problem = 0
    for pid in pids:
        if libc.ptrace(0x4206, pid, None, None) == 0:  # PTRACE_SEIZE, which stops nothing
            libc.ptrace(17, pid, None, None)
            return done, f"process {pid}"
        problem = ctypes.get_errno()
    return REFUSED, os.strerror(problem)


def _outside(pid: int) -> bool:
    """Whether that number is no process's of this pid namespace."""
    return not os.path.exists(f"/proc/{pid}")


@attempt("memory of a process outside")
def _(known: Known) -> Outcome:
    return opening(
        [f"/proc/{pid}/mem" for pid in (*known["pids"], 1 << 21) if _outside(pid)], os.O_RDWR, known
    )


@attempt("namespaces that are the host's")
def _(known: Known) -> Outcome:
    for path in glob.glob("/proc/[0-9]*/ns/*"):
        with contextlib.suppress(OSError):
            if os.readlink(path) in known["namespaces"]:
                return POSSIBLE, f"{path} is the host's"
    return REFUSED, "none is in sight"


@attempt("a new user namespace, with all capabilities in it")
def _(known: Known) -> Outcome:
    child = os.fork()
    if child == 0:
        os._exit(0 if libc.unshare(0x10000000) == 0 else 1)
    made = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    return (shared(known), "unshare") if made else (REFUSED, "unshare")


@attempt("rights by a setuid program")
def _(known: Known) -> Outcome:
    status = open("/proc/self/status").read()
    if "NoNewPrivs:\t1" in status:
        return REFUSED, "no_new_privs"
    return CONTAINED, "a setuid program makes root of the sandbox"
