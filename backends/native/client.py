"""The client's side of the native backend: starts the supervisor once, asks it for sandboxes."""

from __future__ import annotations

import builtins
import dataclasses
import json
import os
import socket
import subprocess
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import sandbox_gym
from sandbox_gym import errors
from sandbox_gym.api import Deviation, Live, SandboxSpec, Taken
from sandbox_gym.backends.shared import protocol, registry
from sandbox_gym.channel import Channel, GuestError
from sandbox_gym.guest.wire import Op
from sandbox_gym.images import store
from sandbox_gym.network import Allow, NetworkRecord

from . import exchange, fingerprint

_BATCH = 64  # descriptors that one message carries
_START_TIMEOUT = 30.0
_BOOT = (
    "import sys; sys.path.insert(0, {root!r}); from sandbox_gym.backends.native.launch import main; main()"
)


class NativeBackend:
    """See `sandbox_gym.api.Backend`. One instance a process; a forked child gets its own supervisor."""

    name = "native"
    deviations: Sequence[Deviation] = ()

    def __init__(self) -> None:
        self._folder = registry.make_folder()
        self._pid = os.getpid()
        self._idle: list[socket.socket] = []
        self._lock = threading.Lock()
        self._warned = False
        # Snapshots whose last handle was garbage: released with the next request.
        self._unreferenced: deque[str] = deque()
        self._lifeline, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            try:
                self._process = self._start(theirs)
            finally:
                theirs.close()  # or a supervisor that ended at once would not be noticed
            self._await_supervisor()
        except BaseException:
            self.close()
            raise

    def _start(self, theirs: socket.socket) -> subprocess.Popen[bytes]:
        root = str(Path(sandbox_gym.__file__).parent.parent)
        cap = os.environ.get("SANDBOX_GYM_MAX_SANDBOXES", "1024")
        # exec, never fork: a client may hold threads, CUDA, Ray. -S -I: nothing of its environment comes along.
        command = [sys.executable, "-I", "-S", "-c", _BOOT.format(root=root), str(theirs.fileno())]
        return subprocess.Popen(
            [*command, str(self._folder), cap],
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
            raise errors.BackendUnavailable(f"the native backend can't start: {message['error']}")
        self.disk = message["disk"]
        self.any_depth = bool(message["any_depth"])

    # ---- Backend --------------------------------------------------------------------------------------------------

    def create(self, spec: SandboxSpec, *, name: str | None, timeout: float) -> Live:
        if spec.rootfs is None:
            spec = dataclasses.replace(spec, python_path=python_path())
        request = {"op": "create", "spec": protocol.spec_to_json(spec), "name": name, "timeout": timeout}
        request["budgeted"] = True
        message, fds = self._ask(request, timeout)
        self._warn(spec, message["unenforced"])
        return _lives(message, fds)[0]

    def snapshot(
        self,
        live: Live,
        *,
        keep: bool,
        engine: str,
        settled: bool,
        obstacle: str | None = None,
        timeout: float,
        levels: int = 1,
        budgeted: bool = True,
    ) -> Taken:
        request = {"op": "snapshot", "id": live.id, "keep": keep, "engine": engine, "settled": settled}
        request |= {"obstacle": obstacle, "levels": levels, "budgeted": budgeted}
        message, fds = self._ask({**request, "timeout": timeout}, timeout * 3)
        if fds:
            live.channel.replace(socket.socket(fileno=fds[0]))
        elif not keep:
            live.channel.close()
        return Taken(message["id"], message["engine"], message["why"], message["depth_left"])

    def restore(
        self,
        snapshot_id: str,
        *,
        names: Sequence[str | None],
        timeout: float,
        replace: Live | None = None,
        network: Allow | Literal["same"] | None = "same",
        budgeted: bool = True,
    ) -> list[Live]:
        made: list[Live] = []
        try:
            for start in range(0, len(names), _BATCH):
                batch = list(names[start : start + _BATCH])
                request = {"op": "restore", "snapshot": snapshot_id, "names": batch, "timeout": timeout}
                request["replace"] = replace.id if replace is not None else None
                request["budgeted"] = budgeted
                if network != "same":
                    request["network"] = network.to_json() if network is not None else None
                made += _lives(*self._ask(request, timeout))
        except BaseException:
            for live in made:
                self.terminate(live)
            raise
        return made

    def set_budget(self, *, memory: int | None, disk: int | None) -> None:
        self._ask({"op": "budget", "budget": {"memory": memory, "disk": disk}}, 30.0)

    def put_on_disk(self, snapshot_id: str, *, timeout: float) -> None:
        (live,) = self.restore(snapshot_id, names=[None], timeout=timeout, budgeted=False)
        try:
            live.channel.call(Op.SETTLE, True, timeout=timeout)
            taken = self.snapshot(
                live, keep=False, engine="criu", settled=True, timeout=timeout, budgeted=False
            )
            self._ask({"op": "supplant", "snapshot": snapshot_id, "by": taken.id}, timeout)
        except GuestError as error:
            raise errors.SnapshotError(
                f"snapshot {snapshot_id}: its guest could not be made ready: {error}"
            ) from None
        finally:
            self.terminate(live)

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

    def list(self) -> list[dict[str, Any]]:
        with self._connection(30.0) as sock:
            self._release_unreferenced(sock)
            return registry.rows(sock)

    def alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """Ends the supervisor and with it every sandbox. Idempotent; returns when all is cleared."""
        self._lifeline.close()
        if os.getpid() != self._pid:
            return
        process = getattr(self, "_process", None)
        if process is not None:
            process.wait(timeout=30)
        registry.clear(self._folder)  # again, for a janitor that was killed
        with self._lock:
            while self._idle:
                self._idle.pop().close()

    # ---- Archiving ------------------------------------------------------------------------------------------------

    def facts(self, spec: SandboxSpec) -> dict[str, Any]:
        return fingerprint.facts(spec)

    def lacks(self, facts: Mapping[str, Any], state: Mapping[str, Any]) -> builtins.list[str]:
        return fingerprint.lacks(facts, self.spec_of(state))

    def describe(self, snapshot_id: str) -> dict[str, Any]:
        return self._ask({"op": "describe", "snapshot": snapshot_id}, 30.0)[0]

    def pack(self, snapshot_id: str, part: int, write: Callable[[bytes], object], *, timeout: float) -> int:
        request = {"op": "pack", "snapshot": snapshot_id, "part": part, "timeout": timeout}
        return int(self._carry(lambda sock: exchange.pull(sock, request, write, timeout), timeout)["files"])

    def unpack(
        self,
        spec: SandboxSpec,
        state: Mapping[str, Any],
        files: Sequence[int],
        blocks: Iterable[bytes],
        *,
        timeout: float,
    ) -> Taken:
        request = {**state, "op": "unpack", "spec": protocol.spec_to_json(spec), "timeout": timeout}
        request["files"] = list(files)
        request["budgeted"] = True
        reply = self._carry(lambda sock: exchange.push(sock, request, blocks, timeout), timeout)
        return Taken(reply["id"], reply["engine"], reply["why"], reply["depth_left"])

    def spec_of(self, state: Mapping[str, Any]) -> SandboxSpec:
        spec = protocol.spec_from_json(state["spec"])
        if spec.image is not None:  # which lies elsewhere on another machine
            spec = dataclasses.replace(spec, rootfs=store.default().root(spec.image))
        return spec

    # ---- the supervisor's socket ------------------------------------------------------------------------------------

    def _ask(self, request: dict[str, Any], timeout: float) -> tuple[dict[str, Any], builtins.list[int]]:
        """One request, one reply. The supervisor keeps the deadline; the margin only catches one that hangs."""
        with self._connection(timeout + 10.0) as sock:
            self._release_unreferenced(sock)
            protocol.send(sock, request)
            message, fds = protocol.receive(sock)
        if "error" in message:
            for fd in fds:
                os.close(fd)
            raise getattr(errors, message["error"])(message["message"])
        return message, fds

    def _release_unreferenced(self, sock: socket.socket) -> None:
        while self._unreferenced:
            protocol.send(sock, {"op": "release", "snapshot": self._unreferenced.popleft()})
            protocol.receive(sock)

    def _carry(self, request: Callable[[socket.socket], dict[str, Any]], timeout: float) -> dict[str, Any]:
        """A request with bytes beside it. Raises what the caller's end of the pipe raised, as it was."""
        try:
            with self._connection(timeout + 10.0) as sock:
                message = request(sock)
        except exchange.CallerFailed as failed:
            raise failed.error from None
        if "error" in message:
            raise getattr(errors, message["error"])(message["message"])
        return message

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


def _lives(message: dict[str, Any], fds: list[int]) -> list[Live]:
    return [
        Live(row["id"], row["name"], Channel(socket.socket(fileno=fd), row["name"]))
        for row, fd in zip(message["sandboxes"], fds, strict=True)
    ]


def _close(sock: socket.socket | None) -> None:
    if sock is not None:
        sock.close()
