"""The client's hold on its keeper."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import docker

import sandbox_gym
from sandbox_gym import errors
from sandbox_gym.backends.shared import protocol

_START_TIMEOUT, _ANSWER, _END = 30.0, 30.0, 120.0
_BOOT = "import sys; sys.path[:0] = {paths!r}; from sandbox_gym.backends.docker.keeper import main; main()"


class Keeping:
    """Starts one keeper. Raises BackendUnavailable."""

    def __init__(self, url: str, run: str) -> None:
        self._lock = threading.Lock()
        self._lifeline, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._process = _start(theirs, url, run)
        except BaseException:
            self._lifeline.close()
            raise
        finally:
            theirs.close()  # or a keeper that ended at once would not be noticed
        self._lifeline.settimeout(_START_TIMEOUT)
        try:
            started = json.loads(self._lifeline.recv(1 << 16) or b"{}")
        except OSError:
            started = {}
        if not started:
            self.close()
            raise errors.BackendUnavailable("the docker backend can't start: its keeper ended, or hangs")

    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, op: str, **request: Any) -> dict[str, Any]:
        """Raises SandboxDied when it is gone, and what it answers as an error."""
        with self._lock:
            self._lifeline.settimeout(_ANSWER)
            try:
                protocol.send(self._lifeline, {"op": op, **request})
                message, _ = protocol.receive(self._lifeline)
            except (EOFError, OSError) as error:
                self._lifeline.close()  # an answer that comes late must not be taken for another's
                raise errors.SandboxDied(
                    f"the keeper of this process's containers is gone ({error})"
                ) from None
        if "error" in message:
            raise getattr(errors, message["error"])(message["message"])
        return message

    def close(self) -> bool:
        """Ends it, and with it all containers. Idempotent. Whether it has done that: not where it was killed before."""
        self._lifeline.close()
        return self._process.wait(timeout=_END) == 0


def _start(theirs: socket.socket, url: str, run: str) -> subprocess.Popen[bytes]:
    packages = {str(Path(file).parent.parent) for file in (sandbox_gym.__file__, docker.__file__)}
    boot = _BOOT.format(paths=sorted(packages))
    # exec, never fork: a client may hold threads, CUDA, Ray. -S -I: nothing of its environment comes along.
    command = [sys.executable, "-I", "-S", "-c", boot, str(theirs.fileno()), url, run]
    return subprocess.Popen(
        command,
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
        cwd="/",
        env={"PATH": os.environ.get("PATH", os.defpath)},
    )
