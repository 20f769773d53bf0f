"""The audit log's writing end: what is called, in a queue, and a thread that puts it into SQLite in batches.

A call is in the queue before it is sent to its sandbox, and once more when it has ended. The thread empties the queue
every tenth of a second: that much is lost when this process is killed, and nothing when it ends by itself. Steps of
environments are counted, not recorded, and of what they draw the last picture is kept: `_audit_watch` tells of both
once a second. `sandbox_gym.audit` reads.
"""

from __future__ import annotations

import atexit
import os
import socket
import threading
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from sandbox_gym import _audit_rows
from sandbox_gym._audit_rows import KINDS, Entry
from sandbox_gym._audit_watch import Watch
from sandbox_gym.errors import SandboxError
from sandbox_gym.guest.wire import Op

if TYPE_CHECKING:
    import sqlite3

    from sandbox_gym._snapshot import Snapshot
    from sandbox_gym.sandbox import Sandbox

VARIABLE = "SANDBOX_GYM_AUDIT"
_EVERY = 0.1  # seconds from one batch to the next
_MOST = 512  # entries that wait; who brings more waits too
_PATIENCE = 30.0  # seconds that other processes may hold the file


def set_audit(path: str | os.PathLike[str] | None) -> None:
    """From now on every command, code cell, file write, snapshot and restore of this process is recorded in a file of
    SQLite, and what its sandboxes tried to reach; None stops that. Sandboxes that live already are included. Beside
    that, of each sandbox, the number of steps that its environment made, and the last picture (an RGB array) that its
    `render` gave, both at most a second late: `sandbox-gym ui` shows them.

    The same by the environment: `SANDBOX_GYM_AUDIT=path`, which this sets too, so that processes which are started
    from now on (workers of Ray, say) log there as well. Any number of processes may write to one file; not over NFS.

    Of each text 16 KiB are kept, of each output 4 KiB, with length and SHA-256 of the whole. Values of variables given
    as `env=` are left out wherever they appear as they are, from six characters on. Kill this process, and the last
    tenth of a second is lost. `sandbox-gym audit` shows the file, `sandbox_gym.audit.read` reads it. Nothing is ever
    taken out of it; while it is written, or after a kill, part of it is in `path-wal`.

    Raises SandboxError when the file can't be written or is no audit log. Should it fail later (a full disk, a file
    that was deleted or moved away), the next call of a sandbox raises, or of this.
    """
    global _log
    old, _log = _log, None
    os.environ.pop(VARIABLE, None)
    if old is not None:
        old.close()
    if path is not None:
        log = Log(os.path.abspath(os.fspath(path)))
        log.start()
        os.environ[VARIABLE] = log.path
        _log = log


# ---- what happens --------------------------------------------------------------------------------------------------


def call(box: Any, op: Op, value: Any, *, timeout: float) -> Any:
    """A request to the sandbox's guest, recorded where it is of a kind that is. Raises what the guest's channel does,
    and SandboxError when the log can't be written.
    """
    log = _log
    if log is None or op not in KINDS:
        return box._live.channel.call(op, value, timeout=timeout)
    log.check()
    entry = Entry(KINDS[op], box.id, value, box._spec.env)
    log.put(entry)
    try:
        answer = box._live.channel.call(op, value, timeout=timeout)
    except BaseException as error:
        entry.end(error)
        raise
    else:
        entry.end(answer)
    finally:
        log.put(entry)
    return answer


def made(box: Sandbox) -> None:
    if _log is not None:
        spec, parent = box._spec, box.parent
        facts: dict[str, Any] = {"name": box.name, "backend": box._backend.name}
        facts |= {"image": spec.rootfs, "network": spec.network, "env": sorted(spec.env)}
        _note("create" if parent is None else "restore", box, facts, parent)
        if spec.network is not None:
            _log.watch.network(box)


def taken(box: Sandbox, snapshot: Snapshot) -> None:
    if _log is not None:
        facts = {"label": snapshot.label, "engine": snapshot.engine, "why": snapshot.why}
        _note("snapshot", box, facts, snapshot)


def loaded(snapshot: Snapshot, origin: str | None) -> None:
    """`origin`: the snapshot that the archive was written from, under its id of that time."""
    _note("load", None, {"label": snapshot.label, "origin": origin}, snapshot)


def rewound(box: Sandbox, snapshot: Snapshot) -> None:
    _note("rewind", box, {"label": snapshot.label}, snapshot)


def ends(box: Sandbox, state: str, reason: str | None) -> None:
    """Just before it does."""
    if _log is not None:
        look(box)
        _log.watch.end(box.id)
        _note("end", box, {"state": state, "reason": reason}, None)


def is_on() -> bool:
    return _log is not None


def stepped(boxes: Iterable[Sandbox], steps: int = 1) -> None:
    """Their environments were asked for so many steps."""
    if _log is not None:
        _log.watch.count([box.id for box in boxes], steps)


def drawn(box: Sandbox, frame: Any) -> None:
    """`frame`: what `render` gave; of a list, the last."""
    if _log is not None:
        _log.watch.draw(box.id, frame[-1] if isinstance(frame, list) and frame else frame)


def look(box: Sandbox) -> None:
    """Records what the sandbox has tried to reach."""
    log = _log
    if log is not None and box._spec.network is not None:
        with suppress(SandboxError):  # it has ended by itself: what was seen at the last look is there
            records = box._backend.network_log(box._live)
            log.put(Entry("network", box.id, records, box._spec.env, ended=True))


def _note(kind: str, box: Sandbox | None, facts: dict[str, Any], snapshot: Snapshot | None) -> None:
    if _log is not None:
        place = snapshot.id if snapshot is not None else None
        origin, env = (box.id, box._spec.env) if box is not None else (None, {})
        _log.put(Entry(kind, origin, facts, env, snapshot=place, ended=True))


# ---- the log --------------------------------------------------------------------------------------------------------


class Log:
    """A queue and the thread that empties it. `_turn` is held to wait, and by whoever ends a wait."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._queue: deque[Entry] = deque()
        self._turn = threading.Condition()
        self._started = self._closing = self._asleep = self._hurry = False
        self._failure: Exception | None = None
        self._told = False  # of the failure
        self.watch = Watch(self.put, look)

    def start(self) -> None:
        """Opens the file. Raises SandboxError."""
        with self._turn:
            if not self._started:
                rows = _audit_rows.Rows(_open(self.path), self.path, f"{socket.gethostname()}:{os.getpid()}")
                self._thread = threading.Thread(target=self._run, args=(rows,), name="audit", daemon=True)
                self._thread.start()
                self._started = True
                atexit.register(self.flush)

    def check(self) -> None:
        """Raises SandboxError when it can't be written."""
        if not self._started:
            self.start()
        if self._failure is not None:
            self._told = True
            moved = isinstance(self._failure, _audit_rows.Moved)
            remedy = "begin a new one (set_audit(path))" if moved else "make room for it"
            raise SandboxError(
                f"the audit log {self.path} can't be written ({self._failure}): {remedy}, or do without it "
                "(set_audit(None))"
            ) from self._failure

    def put(self, entry: Entry) -> None:
        """Waits for the thread where it is far behind. After a failure nothing is taken: `check` tells of that."""
        if not self._started:
            with suppress(SandboxError):
                self.start()
        if self._started and self._failure is None:
            self._queue.append(entry)
            if self._asleep or len(self._queue) >= _MOST:
                self._press()

    def _press(self) -> None:
        with self._turn:
            self._asleep = False
            self._turn.notify_all()
            while len(self._queue) >= _MOST and self._failure is None:
                self._turn.wait(_EVERY)

    def flush(self, timeout: float = 10.0) -> None:
        """Returns when all that has happened so far is in the file. Raises SandboxError."""
        self.check()
        self.watch.tell_all()
        mark = Entry("", None, None, {}, ended=True)
        self._queue.append(mark)
        with self._turn:
            self._hurry = True
            self._turn.notify_all()
            if not self._turn.wait_for(lambda: mark.row is not None or self._failure is not None, timeout):
                raise SandboxError(f"the audit log {self.path} was not written within {timeout} s")
        self.check()

    def close(self) -> None:
        """`flush`, and the thread and the file are gone. Raises SandboxError for a failure that no call has told of."""
        self.watch.close()
        atexit.unregister(self.flush)
        told = self._told
        try:
            self.flush()
        except SandboxError:
            if self._failure is not None and not told:
                raise
        finally:
            with self._turn:
                self._closing = True
                self._turn.notify_all()
            if self._started:
                self._thread.join(_PATIENCE)

    def _run(self, rows: _audit_rows.Rows) -> None:
        try:
            while not self._closing:
                self._rest()
                batch = [self._queue.popleft() for _ in range(len(self._queue))]
                rows.store(batch)
                with self._turn:
                    for entry in batch:
                        entry.row = entry.row or 0
                    self._turn.notify_all()
        except Exception as error:  # a full disk, say
            self._failure = error
        finally:
            rows.close()
            with self._turn:
                self._turn.notify_all()

    def _rest(self) -> None:
        """Until there is something to write; then a little more, in which more comes."""
        with self._turn:
            self._asleep = not self._queue  # what comes now wakes it, and what came before is seen below
            self._turn.wait_for(lambda: self._queue or self._closing)
            self._asleep = False
            self._turn.wait_for(lambda: self._hurry or self._closing or len(self._queue) >= _MOST, _EVERY)
            self._hurry = False


def _open(path: str) -> sqlite3.Connection:
    import sqlite3

    try:
        os.close(
            os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        )  # outputs are nobody else's to read
        return _audit_rows.connect(path, _PATIENCE)
    except (OSError, sqlite3.Error) as error:
        raise SandboxError(f"the audit log {path} can't be written: {error}") from None


def _after_fork() -> None:
    """In the child: the thread is the parent's, and so is the connection, which SQLite forbids even to close here."""
    global _log
    if _log is not None:
        _inherited.append(_log)
        _log = Log(_log.path)


_inherited: list[Log] = []
_log: Log | None = Log(os.path.abspath(os.environ[VARIABLE])) if os.environ.get(VARIABLE) else None
os.register_at_fork(after_in_child=_after_fork)
