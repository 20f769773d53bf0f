"""A client's hold on its supervisor: the process is started once, asked over its socket, and ends with the lifeline."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sandbox_gym
from sandbox_gym import errors

from . import protocol, registry

_START_TIMEOUT = 30.0
_BOOT = "import sys; sys.path.insert(0, {root!r}); from {module} import main; main()"


class Link:
    """To the supervisor of one backend of this process. `module`: whose `main` is the supervisor; it gets the
    lifeline's descriptor, the run folder and `arguments`. Raises BackendUnavailable where it can't start.
    """

    def __init__(self, backend: str, module: str, *arguments: str) -> None:
        self.folder = registry.make_folder()
        self.facts: dict[str, Any] = {}  # what it tells of itself when it starts
        self._backend = backend
        self._pid = os.getpid()
        self._idle: list[socket.socket] = []
        self._lock = threading.Lock()
        # Snapshots whose last handle was garbage: released with the next request.
        self.unreferenced: deque[str] = deque()
        self._process: subprocess.Popen[bytes] | None = None
        self._lifeline, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            try:
                self._process = self._start(module, theirs, arguments)
            finally:
                theirs.close()  # or a supervisor that ended at once would not be noticed
            self._await_supervisor()
        except BaseException:
            self.close()
            raise

    def _start(
        self, module: str, theirs: socket.socket, arguments: tuple[str, ...]
    ) -> subprocess.Popen[bytes]:
        root = str(Path(sandbox_gym.__file__).parent.parent)
        # exec, never fork: a client may hold threads, CUDA, Ray. -S -I: nothing of its environment comes along.
        command = [
            sys.executable,
            "-I",
            "-S",
            "-c",
            _BOOT.format(root=root, module=module),
            str(theirs.fileno()),
        ]
        return subprocess.Popen(
            [*command, str(self.folder), *arguments],
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
            raise errors.BackendUnavailable(f"the {self._backend} backend can't start: {message['error']}")
        self.facts = message

    def ask(self, request: dict[str, Any], timeout: float) -> tuple[dict[str, Any], list[int]]:
        """One request, one reply. The supervisor keeps the deadline; the margin only catches one that hangs."""
        with self.connection(timeout + 10.0) as sock:
            protocol.send(sock, request)
            message, fds = protocol.receive(sock)
        if "error" in message:
            for fd in fds:
                os.close(fd)
            raise getattr(errors, message["error"])(message["message"])
        return message, fds

    @contextmanager
    def connection(self, timeout: float) -> Iterator[socket.socket]:
        """A connection of this thread's own while it lasts; one that failed is not used again."""
        with self._lock:
            sock = self._idle.pop() if self._idle else None
        try:
            if sock is None:
                sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                sock.connect(str(self.folder / "socket"))
            sock.settimeout(timeout)
            while self.unreferenced:
                protocol.send(sock, {"op": "release", "snapshot": self.unreferenced.popleft()})
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

    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def close(self) -> None:
        """Ends the supervisor and with it every sandbox. Idempotent; returns when all is cleared."""
        self._lifeline.close()
        if os.getpid() != self._pid:
            return
        if self._process is not None:
            self._process.wait(timeout=30)
        registry.clear(self.folder)  # again, for a janitor that was killed
        with self._lock:
            while self._idle:
                self._idle.pop().close()


def python_path() -> list[str]:
    """What of this process's sys.path the guest gets too: installed folders and PYTHONPATH. Never the script's folder,
    the working directory or anything above a home folder: those may hold secrets (pass `mounts=` for code of yours).
    """
    home = os.path.expanduser("~")
    main_file = getattr(sys.modules.get("__main__"), "__file__", None)
    script = os.path.dirname(os.path.abspath(main_file)) if main_file else os.getcwd()
    found: list[str] = []
    for entry in sys.path:
        path = os.path.realpath(entry)
        above_home = home == path or home.startswith(path.rstrip("/") + "/")
        implicit = path == os.path.realpath(script) and sys.path.count(entry) == 1
        if entry and os.path.isdir(path) and not above_home and not implicit and entry not in found:
            found.append(entry)
    return found


def _close(sock: socket.socket | None) -> None:
    if sock is not None:
        sock.close()
