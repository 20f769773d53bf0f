"""The host's side of probe.py: plants secrets, has the attempts made in a sandbox, sees that nothing came of them."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import pwd
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sandbox_gym.sandbox import Sandbox
from tests.backends import bombs

HERE = Path(__file__).parent
VERDICTS = HERE / "verdicts.json"
_RANK = ("refused", "contained", "possible")
_libc = ctypes.CDLL(None, use_errno=True)


def kept(backend: str) -> dict[str, str]:
    """The verdict on each attempt in that backend, as the tables have it."""
    found: dict[str, str] = json.loads(VERDICTS.read_text())[backend]
    return found


def keep(backend: str, verdicts: dict[str, str]) -> None:
    everything = json.loads(VERDICTS.read_text()) if VERDICTS.exists() else {}
    VERDICTS.write_text(json.dumps({**everything, backend: verdicts}, indent=2) + "\n")


@dataclass
class Planted:
    """What attempts are told of this host, and what of that must not be found or changed."""

    known: dict[str, Any] = field(default_factory=dict)
    folder: Path = Path()
    listeners: list[socket.socket] = field(default_factory=list)
    process: subprocess.Popen[bytes] | None = None

    def told(self) -> dict[str, Any]:
        """What the attempts are told; the secrets backwards, or they would find them in their own arguments."""
        told = {key: value for key, value in self.known.items() if key not in ("settings", "epoch")}
        return {**told, "secrets": [secret[::-1] for secret in self.known["secrets"]]}

    def unharmed(self) -> None:
        """Raises AssertionError where an attempt has reached something."""
        for listener in self.listeners:
            listener.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                sock, _ = listener.accept()
                sock.close()
                raise AssertionError(f"{listener.getsockname()!r} was connected to")
        assert self.process is not None and self.process.poll() is None, "a process of the host was killed"
        assert (self.folder / "secret").read_text() == self.known["secrets"][0]
        assert sorted(os.listdir(self.folder / "mount")) == [], "a read-only mount was written to"
        assert _settings() == self.known["settings"], "settings of the host were changed"
        assert abs(time.time() - time.monotonic() - self.known["epoch"]) < 60, "the clock was set"

    def silent_in(self, text: str) -> None:
        """Raises AssertionError where a secret is in a text."""
        for secret in self.known["secrets"]:
            assert secret not in text, f"a secret came out: {text[max(0, text.index(secret) - 200) :][:500]}"


@contextlib.contextmanager
def planted() -> Iterator[Planted]:
    """Secrets in files, variables, a process's arguments; servers; shared memory. All gone at the end."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sandbox-gym-probe-")))
        secret = secrets.token_hex(16)
        at_home = Path(pwd.getpwuid(os.getuid()).pw_dir) / f".sandbox-gym-probe-{secrets.token_hex(4)}"
        for path in (folder / "secret", at_home):
            path.write_text(secret)
        stack.callback(at_home.unlink)
        (folder / "mount").mkdir()
        os.environ["SANDBOX_GYM_PROBE"] = secret
        stack.callback(os.environ.pop, "SANDBOX_GYM_PROBE")
        process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", secret])
        stack.callback(process.wait)
        stack.callback(process.kill)
        name, key = f"sandbox-gym-probe-{secrets.token_hex(4)}", 0x5B000000 + secrets.randbelow(1 << 24)
        listeners = [
            _listening(stack, socket.AF_UNIX, address) for address in (f"\0{name}", str(folder / "socket"))
        ]
        listeners += [_listening(stack, socket.AF_INET, (host, 0)) for host in _addresses()]
        segment = _libc.shmget(key, 4096, 0o1600)
        assert segment >= 0
        stack.callback(_libc.shmctl, segment, 0, None)
        known = {
            "secrets": [secret],
            "files": [str(folder / "secret"), str(at_home)],
            "sockets": [str(folder / "socket")],
            "abstract": [name],
            "servers": [listener.getsockname() for listener in listeners[2:]],
            "shm": [key],
            "pids": [process.pid, os.getpid(), os.getppid()],
            "mount": "/mnt/given",
            "epoch": time.time() - time.monotonic(),
            "settings": _settings(),
            **_machine(),
        }
        yield Planted(known, folder, listeners, process)


def run(backend: str) -> dict[str, str]:
    """Has every attempt made in a sandbox of that backend, by a command and by a cell, and in a copy. Returns the worse
    verdict on each. Raises AssertionError where a secret came out or something of the host's was touched.
    """
    with planted() as plant, contextlib.ExitStack() as stack:
        mounts = [(plant.folder / "mount", plant.known["mount"])]
        box = stack.enter_context(Sandbox.create(backend=backend, mounts=mounts))
        other = stack.enter_context(Sandbox.create(backend=backend))
        _plant_inside(other, plant.known)
        box.upload(HERE / "probe", "/tmp/probe")
        known = json.dumps(
            {key: value for key, value in plant.known.items() if key not in ("settings", "epoch")}
        )
        command = box.exec(["python3", "-m", "probe", known], timeout=120, cwd="/tmp")
        assert command.ok, command
        code = (
            f"import runpy, sys\nsys.path.insert(0, '/tmp')\nsys.argv[1:] = [{known!r}]\n"
            "runpy.run_module('probe', run_name='__main__') and None"
        )
        cell = box.run_code(code, timeout=120)
        assert cell.ok, cell
        (copy,) = box.fork(1)
        stack.enter_context(copy)
        again = copy.run_code(code, timeout=120)
        assert again.ok, again
        worst: dict[str, str] = {}
        for output in (command.stdout, cell.stdout, again.stdout):
            plant.silent_in(output)
            for line in output.splitlines():
                row = json.loads(line)
                before = worst.get(row["attempt"], "refused")
                worst[row["attempt"]] = max(before, row["verdict"], key=_RANK.index)
        plant.unharmed()
        assert other.run_code("kept").value == "'here'" and other.shell("cat /tmp/secret").ok
    return {**worst, **bombs.run(backend)}


def on_the_host(plant: Planted, names: Sequence[str]) -> dict[str, str]:
    """The verdicts on some attempts that are made outside of any sandbox."""
    command = [sys.executable, "-m", "probe", json.dumps(plant.told()), *names]
    result = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=True, timeout=60)
    return {row["attempt"]: row["verdict"] for row in map(json.loads, result.stdout.splitlines())}


def _plant_inside(other: Sandbox, known: dict[str, Any]) -> None:
    """The same in a sandbox beside it."""
    secret, name = secrets.token_hex(16), f"sandbox-gym-probe-{secrets.token_hex(4)}"
    key = 0x5B000000 + secrets.randbelow(1 << 24)
    other.write_file("/tmp/secret", secret)
    other.write_file("/dev/shm/sandbox-gym-probe", secret)
    other.start(["python3", "-c", "import time; time.sleep(600)", secret], env={"SECRET": secret})
    code = (
        f"import ctypes, socket\nkept = 'here'\ns = socket.socket(socket.AF_UNIX)\ns.bind('\\0{name}')\ns.listen()\n"
        f"ctypes.CDLL(None).shmget({key}, 4096, 0o1600) >= 0"
    )
    assert other.run_code(code).value == "True"
    known["secrets"].append(secret)
    known["files"].append("/tmp/secret")
    known["abstract"].append(name)
    known["shm"].append(key)


def _machine() -> dict[str, Any]:
    """What tells the host's own from a sandbox's."""
    disks = [line.split() for line in Path("/proc/partitions").read_text().splitlines()[2:]]
    shadow = Path("/etc/shadow")
    return {
        "kernel": os.uname().version,
        "cmdline": Path("/proc/cmdline").read_text(),
        "namespaces": [os.readlink(path) for path in Path("/proc/self/ns").iterdir()],
        "interfaces": [name for _, name in socket.if_nameindex()],
        "disks": [[int(major), int(minor)] for major, minor, *_ in disks],
        "devices": [f"/dev/{row[3]}" for row in disks],
        "shadow": hashlib.sha256(shadow.read_bytes()).hexdigest() if os.access(shadow, os.R_OK) else "",
    }


def _settings() -> dict[str, str]:
    """Of the host, which a guest must not change."""
    names = (
        "kernel/core_pattern",
        "kernel/modprobe",
        "kernel/hostname",
        "vm/overcommit_memory",
        "fs/file-max",
    )
    paths = [Path("/proc/sys") / name for name in names]
    return {str(path): path.read_text() for path in [*paths, Path("/proc/modules")] if path.exists()}


def _listening(stack: contextlib.ExitStack, family: int, address: Any) -> socket.socket:
    sock = stack.enter_context(socket.socket(family))
    sock.bind(address)
    sock.listen()
    return sock


def _addresses() -> list[str]:
    found = {"127.0.0.1"}
    with contextlib.suppress(OSError):
        found |= {str(row[4][0]) for row in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}
    return sorted(found)
