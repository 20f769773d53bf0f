"""The client's side of a backend whose sandboxes a supervisor of ours makes: that is started once, asked over its
socket, and ends with the lifeline.
"""

from __future__ import annotations

import builtins
import json
import os
import socket
import subprocess
import sys
import threading
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import sandbox_gym
from sandbox_gym import errors
from sandbox_gym.api import Live, SandboxSpec
from sandbox_gym.network import Allow, NetworkRecord

from . import host_python, protocol, registry

_START_TIMEOUT = 30.0
_BOOT = "import sys; sys.path.insert(0, {root!r}); from {module} import main; main()"


class Supervised:
    """What is alike in all of them. `name`: the backend's; `launch`: the module whose `main` is the supervisor, which
    gets the lifeline's descriptor, the run folder and `arguments`; `batch`: how many copies one request takes. Raises
    BackendUnavailable where it can't start.
    """

    name: str
    launch: str
    batch: int

    def __init__(self, *arguments: str) -> None:
        self._folder = registry.make_folder()
        self._facts: dict[str, Any] = {}  # what the supervisor tells of itself when it starts
        self._pid = os.getpid()
        self._warned = False
        self._idle: builtins.list[socket.socket] = []
        self._lock = threading.Lock()
        # Snapshots whose last handle was garbage: released with the next request.
        self._unreferenced: deque[str] = deque()
        self._process: subprocess.Popen[bytes] | None = None
        self._lifeline, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            try:
                self._process = self._start(theirs, arguments)
            finally:
                theirs.close()  # or a supervisor that ended at once would not be noticed
            self._await_supervisor()
        except BaseException:
            self.close()
            raise

    def _start(self, theirs: socket.socket, arguments: tuple[str, ...]) -> subprocess.Popen[bytes]:
        root = str(Path(sandbox_gym.__file__).parent.parent)
        # exec, never fork: a client may hold threads, CUDA, Ray. -S -I: nothing of its environment comes along.
        command = [
            sys.executable,
            "-I",
            "-S",
            "-c",
            _BOOT.format(root=root, module=self.launch),
            str(theirs.fileno()),
        ]
        return subprocess.Popen(
            [*command, str(self._folder), *arguments],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )

    def _await_supervisor(self) -> None:
        self._lifeline.settimeout(_START_TIMEOUT)
        try:
            message = json.loads(self._lifeline.recv(1 << 16) or b'{"error": "the supervisor ended at once"}')
        except TimeoutError:
            message = {"error": f"the supervisor did not start within {_START_TIMEOUT} s"}
        if "error" in message:
            raise errors.BackendUnavailable(f"the {self.name} backend can't start: {message['error']}")
        self._facts = message

    def _ask(self, request: dict[str, Any], timeout: float) -> tuple[dict[str, Any], builtins.list[int]]:
        """One request, one reply. The supervisor keeps the deadline; the margin only catches one that hangs."""
        with self._connection(timeout + 10.0) as sock:
            protocol.send(sock, request)
            message, fds = protocol.receive(sock)
        if "error" in message:
            for fd in fds:
                os.close(fd)
            raise getattr(errors, message["error"])(message["message"])
        return message, fds

    @contextmanager
    def _connection(self, timeout: float) -> Iterator[socket.socket]:
        """A connection of this thread's own while it lasts; one that failed is not used again."""
        with self._lock:
            sock = self._idle.pop() if self._idle else None
        try:
            if sock is None:
                sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                sock.connect(str(self._folder / "socket"))
            sock.settimeout(timeout)
            while self._unreferenced:
                protocol.send(sock, {"op": "release", "snapshot": self._unreferenced.popleft()})
                protocol.receive(sock)
            yield sock
        except TimeoutError:
            _close(sock)
            raise errors.SandboxTimeout(f"the supervisor did not answer within {timeout} s") from None
        except (EOFError, OSError) as error:
            _close(sock)
            raise errors.SandboxDied(
                f"the supervisor of this process's sandboxes is gone ({error})"
            ) from None
        except BaseException:
            _close(sock)
            raise
        with self._lock:
            self._idle.append(sock)

    def _lives(self, message: dict[str, Any], fds: builtins.list[int]) -> builtins.list[Live]:
        """Sandboxes out of a reply and the descriptors that came with it."""
        raise NotImplementedError

    def _warn(self, spec: SandboxSpec, unenforced: Sequence[str]) -> None:
        limits = {"cpus": spec.limits.cpus, "memory": spec.limits.memory_bytes, "pids": spec.limits.pids}
        missing = [name for name in unenforced if limits[name] is not None]
        if missing and not self._warned:
            self._warned = True
            warnings.warn(
                f"default limits not enforced for this user: {', '.join(missing)} (no writable control group). "
                "Asking for one explicitly is an error; see `sandbox-gym doctor`",
                RuntimeWarning,
                stacklevel=5,
            )

    # ---- of a Backend ---------------------------------------------------------------------------------------------

    def create(self, spec: SandboxSpec, *, name: str | None, timeout: float) -> Live:
        spec = host_python.seen(spec)
        request = {"op": "create", "spec": protocol.spec_to_json(spec), "name": name, "timeout": timeout}
        request["budgeted"] = True
        message, fds = self._ask(request, timeout)
        self._warn(spec, message["unenforced"])
        return self._lives(message, fds)[0]

    def restore(
        self,
        snapshot_id: str,
        *,
        names: Sequence[str | None],
        timeout: float,
        replace: Live | None = None,
        network: Allow | Literal["same"] | None = "same",
        budgeted: bool = True,
    ) -> builtins.list[Live]:
        made: builtins.list[Live] = []
        try:
            for start in range(0, len(names), self.batch):
                batch = [*names[start : start + self.batch]]
                request = {"op": "restore", "snapshot": snapshot_id, "names": batch, "timeout": timeout}
                request["replace"] = replace.id if replace is not None else None
                request["budgeted"] = budgeted
                if network != "same":
                    request["network"] = network.to_json() if network is not None else None
                made += self._lives(*self._ask(request, timeout))
        except BaseException:
            for live in made:
                self.terminate(live)
            raise
        return made

    def set_budget(self, *, memory: int | None, disk: int | None) -> None:
        self._ask({"op": "budget", "budget": {"memory": memory, "disk": disk}}, 30.0)

    def release(self, snapshot_id: str) -> None:
        self._ask({"op": "release", "snapshot": snapshot_id}, 30.0)

    def release_later(self, snapshot_id: str) -> None:
        self._unreferenced.append(snapshot_id)

    def terminate(self, live: Live, reason: str | None = None) -> None:
        live.channel.close()
        self._ask({"op": "terminate", "id": live.id, "reason": reason}, 30.0)

    def interrupt(self, live: Live) -> None:
        self._ask({"op": "interrupt", "id": live.id}, 30.0)

    def death(self, live: Live) -> str:
        return str(self._ask({"op": "death", "id": live.id}, 30.0)[0]["reason"])

    def usage(self, node_id: str) -> dict[str, int]:
        return self._ask({"op": "usage", "id": node_id}, 30.0)[0]

    def network_log(self, live: Live) -> builtins.list[NetworkRecord]:
        found: builtins.list[NetworkRecord] = []
        after, more = 0, True
        while more:
            page, _ = self._ask({"op": "records", "id": live.id, "after": after}, 30.0)
            for row in page["records"]:
                after = row.pop("n")
                found.append(NetworkRecord(**row))
            more = page["more"]
        return found

    def list(self) -> builtins.list[dict[str, Any]]:
        with self._connection(30.0) as sock:
            return registry.rows(sock)

    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def close(self) -> None:
        """Ends the supervisor and with it every sandbox. Idempotent; returns when all is cleared."""
        self._lifeline.close()
        if os.getpid() != self._pid:
            return
        if self._process is not None:
            self._process.wait(timeout=30)
        registry.clear(self._folder)  # again, for a janitor that was killed
        with self._lock:
            while self._idle:
                self._idle.pop().close()


def max_sandboxes() -> str:
    """How many may live at once under one supervisor."""
    return os.environ.get("SANDBOX_GYM_MAX_SANDBOXES", "1024")


def _close(sock: socket.socket | None) -> None:
    if sock is not None:
        sock.close()
