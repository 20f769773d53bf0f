"""The guest's main loop: process 1 of a sandbox, one request at a time from the socket it was given."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from typing import Any, NoReturn

from . import commands, copying, files, pipes, processes, rebind, shells, wire
from .interpreter import Interpreter
from .stdio import Stdio
from .wire import Connection, Frame, Op, Status

# CAP_ numbers that commands keep (Docker's default set). The agent itself keeps what a copy needs, to mount, to
# enter namespaces and to set their clocks; what it executes is cut to these by the bounding set.
_KEPT_CAPABILITIES = {0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 27, 29, 31}
_CAP_SYS_ADMIN, _CAP_SYS_TIME = 21, 25
_HANDLERS = {**files.HANDLERS, **processes.HANDLERS, **shells.HANDLERS}


class Agent:
    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.interpreter = Interpreter()
        self.hosted: Any = None  # guest.hosted.Hosted, once MAKE has come
        self._copying = copying.Copier()
        signal.signal(signal.SIGINT, self.interpreter.interrupt)
        # A child that kept it would hold a socket that is no more this process's, once this one has adopted another.
        os.register_at_fork(after_in_child=connection.close)

    def serve(self) -> NoReturn:
        """Answers requests for ever; ends with the process when the socket closes."""
        while True:
            pipes.wait_for(self.connection.sock)
            quick = self.hosted.quick if self.hosted is not None else None
            try:
                # Past commands may still write: with their pipes to be drained, nothing is quick.
                if quick is None or pipes.any_watched():
                    frame = self.connection.receive()
                else:
                    frame = self.connection.serve(quick)
            except (EOFError, OSError):
                os._exit(0)
            if frame.op == Op.STEP and self.hosted is not None:
                self._answer_raw(frame, self.hosted.step)
            elif frame.op == Op.CLONE:
                self._clone(frame)
            elif frame.op == Op.ADOPT:
                copying.take_variables(frame)
                if frame.fds:
                    self.connection.replace(socket.socket(fileno=frame.fds[0]))
                else:
                    self.connection.send(Op.ADOPT, Status.OK, frame.seq)
            elif frame.op == Op.PING:
                self.connection.send(Op.PING, Status.OK, frame.seq, frame.meta, frame.data)
            else:
                self._answer(frame)

    def _answer_raw(self, frame: Frame, handler: Any) -> None:
        """`handler(frame) -> (meta, *data)`: already bytes, so the hot path packs nothing twice."""
        try:
            meta, *data = handler(frame)
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            self._fail(frame, error)
        else:
            self.connection.send(frame.op, Status.OK, frame.seq, meta, *data)

    def _answer(self, frame: Frame) -> None:
        try:
            value = self._handle(Op(frame.op), wire.decode(frame.meta, frame.data))
            meta, buffers = wire.encode(value)
            if len(meta) > wire.MAX_META or sum(map(len, buffers)) > wire.MAX_DATA:
                raise ValueError(f"an answer of {len(meta)} bytes is over the bound of {wire.MAX_META}")
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            self._fail(frame, error)
        else:
            self.connection.send(frame.op, Status.OK, frame.seq, meta, *buffers)

    def _fail(self, frame: Frame, error: BaseException) -> None:
        self.connection.send(frame.op, Status.ERROR, frame.seq, wire.failure(error))

    def _handle(self, op: Op, value: Any) -> Any:
        if op == Op.SETTLE:
            return self._settle(thoroughly=bool(value))
        if op == Op.CODE:
            return self.interpreter.run(**value)
        if op == Op.EXEC:
            return commands.run(**value)
        if op in _HANDLERS:
            return _HANDLERS[op](**value)
        if op == Op.RESEED:
            return self._reseed(value)
        if op == Op.MAKE:
            from . import hosted

            self.hosted = hosted.Hosted()
        if self.hosted is None:
            raise RuntimeError(f"no environment is hosted here, so {op.name} has nothing to act on")
        return self.hosted.handle(op, value)

    def _settle(self, *, thoroughly: bool) -> str | None:
        """Before a snapshot: what this process alone can see in a fork's way, None when nothing is. `thoroughly`: it
        reaps what has died, and makes itself fit for criu.
        """
        if thoroughly:
            commands.reap_orphans()
            if rebind.needs_rebind():
                rebind.rebind()
        return self._copying.obstacle(self.connection)

    def _reseed(self, seed: int) -> None:
        """Gives this copy its own chance: `random`, NumPy's global state, the hosted environment's np_random."""
        import random

        random.seed(seed)
        numpy_random = sys.modules.get("numpy.random")  # loaded by its first use, in 17 ms
        if numpy_random is not None:
            numpy_random.seed(seed % 2**32)
        if self.hosted is not None:
            self.hosted.reseed(seed)

    def _clone(self, frame: Frame) -> None:
        """A copy of this process in namespaces of its own; returns in both, with the copy on its own socket."""
        try:
            self._copying.clone(self.connection, frame)
        except OSError as error:
            self._fail(frame, error)
            for fd in frame.fds:  # after the answer: their end alone would look like a copy that died
                os.close(fd)


def main() -> NoReturn:
    """`argv`: the control socket's descriptor, or `stdio` for standard input and output in its place; then the folders
    to put on sys.path.
    """
    own, folders = sys.argv[1] != "stdio", sys.argv[2:]
    sock: Any = None
    if own:
        os.setsid()
        _limit_capabilities()
        sock = socket.socket(fileno=int(sys.argv[1]))
        sock.set_inheritable(False)  # or every command would hold the control socket
    else:  # a container engine has made the session, and the bounds
        sock = _take_stdio()
    with contextlib.suppress(OSError):  # an engine's kernel may have no such policy
        # Else a guest that a request wakes takes the CPU from the client, which still has others to send to.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    # Last, the working folder: cells import what lies there, and nothing of it hides a module of the agent's.
    sys.path[:] = [*(entry for entry in folders if entry not in sys.path), *sys.path[1:], ""]
    sys.argv[:] = [""]
    agent = Agent(Connection(sock, takes_fds=own))
    agent.connection.send(Op.READY)
    agent.serve()


def _take_stdio() -> Stdio:
    """What comes and goes there is the host's alone: programs and cells find nothing in its place."""
    sock = Stdio(os.dup(0), os.dup(1))
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)
    return sock


def _limit_capabilities() -> None:
    from .syscalls import PR_CAPBSET_DROP, capset, prctl

    for capability in range(41):
        if capability not in _KEPT_CAPABILITIES:
            try:
                prctl(PR_CAPBSET_DROP, capability)
            except OSError:  # EINVAL: a kernel with fewer capabilities than this list
                break
    capset(_KEPT_CAPABILITIES | {_CAP_SYS_ADMIN, _CAP_SYS_TIME})
