"""The audit log's rows: what each kind of entry says, bounded and without secrets, and how it gets into SQLite."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import sqlite3
import struct
import time
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from sandbox_gym._records import SHELL
from sandbox_gym.channel import GuestError
from sandbox_gym.guest.wire import Op

KINDS = {
    Op.CODE: "code",
    Op.EXEC: "exec",
    Op.START: "start",
    Op.FEED: "stdin",
    Op.SHELL: "session",
    Op.WRITE: "write",
    Op.UNPACK: "upload",
    Op.MAKE: "make",
}
APPLICATION = 0x5367_4175
VERSION = 2
_SCHEMA = """
CREATE TABLE events (
    id INTEGER PRIMARY KEY,
    time REAL NOT NULL,       -- seconds since 1970, when it began
    client TEXT NOT NULL,     -- host:pid of the process that asked for it
    sandbox TEXT,
    kind TEXT NOT NULL,
    text TEXT NOT NULL,       -- the command, the code, the path, ...
    result TEXT,              -- JSON; NULL: it has not ended, or its client was killed first
    duration REAL,            -- seconds
    snapshot TEXT             -- what was taken, or restored from
);
CREATE INDEX events_by_sandbox ON events (sandbox, time);
CREATE INDEX events_by_snapshot ON events (snapshot) WHERE snapshot IS NOT NULL;
CREATE TABLE steps (
    sandbox TEXT PRIMARY KEY,
    count INTEGER NOT NULL,   -- that its environment was asked for, while it was logged
    time REAL NOT NULL        -- when this was counted
);
CREATE TABLE frames (
    sandbox TEXT PRIMARY KEY,
    time REAL NOT NULL,       -- when it was drawn
    png BLOB NOT NULL         -- the last one
);
"""
_MAX_TEXT, _MAX_OUTPUT = 16 << 10, 4 << 10  # characters
_MAX_HEAD = 64 << 10  # bytes of what is written, in which secrets are looked for
_to_json = json.JSONEncoder(check_circular=False).encode
_SHORTEST_SECRET = 6  # characters
_NO_SECRETS = {"HOME", "LANG", "LD_LIBRARY_PATH", "PATH", "PWD", "PYTHONPATH", "SHELL", "TERM", "TZ", "USER"}
_SHOWN = ("exit_code", "value", "stdout", "stderr", "timed_out", "stdout_cut", "stderr_cut", "ended")


class Entry:
    """Something that happened, as the caller's thread has it. `row`: where it is in the file, once it is."""

    __slots__ = (
        "answer",
        "began",
        "duration",
        "ended",
        "env",
        "kind",
        "row",
        "sandbox",
        "snapshot",
        "time",
        "value",
    )

    def __init__(
        self,
        kind: str,
        sandbox: str | None,
        value: Any,
        env: Mapping[str, str],
        *,
        snapshot: str | None = None,
        ended: bool = False,
    ) -> None:
        self.kind = kind
        self.sandbox = sandbox
        self.value = value
        self.env = env
        self.snapshot = snapshot
        self.ended = ended
        self.time = time.time()
        self.began = time.perf_counter()
        self.answer: Any = None
        self.duration: float | None = None
        self.row: int | None = None

    def end(self, answer: Any) -> None:
        """`answer`: the guest's, or what was raised."""
        self.duration = time.perf_counter() - self.began
        self.answer = answer
        self.ended = True


def connect(path: str, patience: float) -> sqlite3.Connection:
    """The log at that path, made where it is missing. Raises sqlite3.Error, and OSError for what is no audit log."""
    db = sqlite3.connect(path, timeout=patience, isolation_level=None, check_same_thread=False)
    try:
        db.execute("BEGIN IMMEDIATE")  # one process makes it, the others wait
        application, version = (
            db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")
        )
        if not db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] and not application:
            for statement in _SCHEMA.split(";\n"):
                db.execute(statement)
            db.execute(f"PRAGMA application_id = {APPLICATION}")
            db.execute(f"PRAGMA user_version = {VERSION}")
        elif (application, version) != (APPLICATION, VERSION):
            raise OSError("it is no audit log of this release")
        db.execute("COMMIT")
        _write_ahead(db, time.monotonic() + patience)
        db.execute("PRAGMA synchronous = NORMAL")  # a killed process loses no batch; a power cut may
    except BaseException:
        db.close()
        raise
    return db


def _write_ahead(db: sqlite3.Connection, deadline: float) -> None:
    """Its time-out does not count for this statement."""
    while True:
        try:
            db.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


class Moved(OSError):
    """The log's path names its file no more."""


def place(path: str) -> tuple[int, int] | None:
    """Which file a path names; None: there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


class Rows:
    """One thread's."""

    def __init__(self, db: sqlite3.Connection, path: str, client: str) -> None:
        self._db, self._path, self._client = db, path, client
        self._place = place(path)
        self._seen: dict[
            str, dict[Any, tuple[int, Any]]
        ] = {}  # network records of each sandbox: row, last state

    def store(self, batch: Sequence[Entry]) -> None:
        """In one transaction. Raises Moved when nobody will find it at the path, which SQLite itself may not notice."""
        try:
            if any(entry.kind for entry in batch):
                self._store_all(batch)
        finally:
            now = place(self._path)
            if now is None or now != self._place:
                with suppress(sqlite3.Error):
                    self._db.execute(
                        "PRAGMA wal_checkpoint"
                    )  # a file that was moved is whole without its -wal
                raise Moved("its file was deleted or moved away while in use, and with it what was recorded")

    def _store_all(self, batch: Sequence[Entry]) -> None:
        """One statement after the other: each lets the callers' threads run."""
        self._db.execute("BEGIN IMMEDIATE")
        for entry in batch:
            if entry.kind == "network":
                self._store_network(entry)
            elif entry.kind == "steps":
                self._store_steps(entry)
            elif entry.kind == "frame":
                self._store_frame(entry)
            elif entry.kind:
                self._store(entry)
        self._db.execute("COMMIT")

    def close(self) -> None:
        self._db.close()

    def _store(self, entry: Entry) -> None:
        if entry.row is None:
            ended = entry.ended  # before the answer is looked at, which may come right now
            kind, text, result = _described(entry)
            place = (entry.time, entry.sandbox, entry.snapshot)
            entry.row = self._insert(kind, place, text, result if ended else None, entry.duration)
            if ended:
                entry.value = None  # no second time
        elif entry.value is not None:
            _, _, result = _described(entry)
            known = (_to_json(result), entry.duration, entry.row)
            self._db.execute("UPDATE events SET result = ?, duration = ? WHERE id = ?", known)
        if entry.kind == "end":
            self._seen.pop(str(entry.sandbox), None)

    def _insert(
        self,
        kind: str,
        place: tuple[float, str | None, str | None],
        text: str,
        result: Any,
        duration: float | None = None,
    ) -> int:
        row = self._db.execute(
            "INSERT INTO events (time, sandbox, snapshot, client, kind, text, result, duration) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (*place, self._client, kind, text, None if result is None else _to_json(result), duration),
        ).lastrowid
        assert row is not None
        return row

    def _store_network(self, entry: Entry) -> None:
        """Each record once; one that goes on is brought up to date."""
        before: dict[Any, tuple[int, Any]] = self._seen.get(str(entry.sandbox), {})
        now: dict[Any, tuple[int, Any]] = {}
        hide = _Hiding(entry.env)
        for record in entry.value:
            key = (record.time, record.kind, record.host, record.port)
            state = {"reason": hide(record.reason), "sent": record.sent, "received": record.received}
            row, last = before.get(key) or now.get(key) or (None, None)
            if row is None:
                text = hide(f"{record.verdict} {record.kind} {record.host}:{record.port}")
                row = self._insert("network", (record.time, entry.sandbox, None), text, state)
            elif last != state:
                self._db.execute("UPDATE events SET result = ? WHERE id = ?", (_to_json(state), row))
            now[key] = row, state
        self._seen[str(entry.sandbox)] = now

    def _store_steps(self, entry: Entry) -> None:
        self._db.execute(
            "INSERT INTO steps (sandbox, count, time) VALUES (?, ?, ?) ON CONFLICT (sandbox) DO UPDATE "
            "SET count = count + excluded.count, time = excluded.time",
            (entry.sandbox, entry.value, entry.time),
        )

    def _store_frame(self, entry: Entry) -> None:
        drawn, pixels = entry.value
        row = (entry.sandbox, drawn, _png(pixels))
        self._db.execute("INSERT OR REPLACE INTO frames (sandbox, time, png) VALUES (?, ?, ?)", row)
        entry.value = None


def _png(pixels: Any) -> bytes:
    """Of an array [height, width, 3] of uint8."""
    height, width, _ = pixels.shape
    lines = b"".join(b"\0" + pixels[row].tobytes() for row in range(height))  # 0: as they are, no filter
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits each of red, green, blue
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines, 1)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )


# ---- what an entry says ---------------------------------------------------------------------------------------------


def _described(entry: Entry) -> tuple[str, str, dict[str, Any]]:
    """Kind, text, result."""
    value: Mapping[str, Any] = entry.value
    result: dict[str, Any] = {}
    if entry.kind not in KINDS.values():
        return entry.kind, _fact_text(_Hiding(entry.env), value, result), result
    own = value.get("env")
    hide = _Hiding({**entry.env, **own} if own else entry.env)
    kind, text = _text(entry.kind, value)
    text = _kept(hide, text, _MAX_TEXT, "text", result)
    if own:
        result["env"] = sorted(own)
    for key in ("cwd", "append", "mode", "id", "end"):
        given = value.get(key)
        if given:
            result[key] = hide(given) if isinstance(given, str) else given
    if kind == "session":
        result["session"] = value["name"]
    for key in ("stdin", "data"):
        if value.get(key) and kind != "stdin":
            _add_bytes(hide, key, value[key], result, plain=kind != "upload")
    _add_answer(hide, entry.answer, result)
    return kind, text, result


def _fact_text(hide: _Hiding, facts: Mapping[str, Any], result: dict[str, Any]) -> str:
    text = ""
    for key, fact in facts.items():
        if fact is not None:
            shown = fact if isinstance(fact, list) else hide(str(fact))[:_MAX_OUTPUT]
            if key in ("name", "label", "reason"):
                text = str(shown)
            else:
                result[key] = shown
    return text


def _text(kind: str, value: Mapping[str, Any]) -> tuple[str, str]:
    """The kind, and what was asked for."""
    if kind in ("exec", "start"):
        argv = value["argv"]
        if kind == "exec" and tuple(argv[:-1]) == SHELL:
            return "shell", argv[-1]
        return kind, shlex.join(argv)
    if kind == "stdin":
        return kind, bytes(value["data"]).decode("utf-8", "replace")
    if kind == "make":
        return kind, str(value.get("env_id") or value.get("entry_point"))
    return kind, str(value[{"code": "code", "session": "command", "write": "path", "upload": "target"}[kind]])


def _add_bytes(hide: _Hiding, name: str, data: bytes, result: dict[str, Any], *, plain: bool) -> None:
    result[f"{name}_bytes"] = len(data)
    result[f"{name}_sha256"] = hashlib.sha256(data).hexdigest()
    if plain:
        head = hide(bytes(data[:_MAX_HEAD]).decode("utf-8", "replace"))
        if len(data) > _MAX_HEAD:
            head = head[: max(0, len(head) - hide.longest)]  # which may be the first part of a secret
        result[name] = head[:_MAX_OUTPUT]


def _add_answer(hide: _Hiding, answer: Any, result: dict[str, Any]) -> None:
    """A guest's answer has not been checked yet: of other types than it should have, it says nothing here."""
    if isinstance(answer, BaseException):
        raised = str(answer) if isinstance(answer, GuestError) else f"{type(answer).__name__}: {answer}"
        result["error"] = hide(raised)[:_MAX_OUTPUT]
    if not isinstance(answer, dict):
        return
    for key in _SHOWN:
        said = answer.get(key)
        if isinstance(said, str):
            if said:
                result[key] = _kept(hide, said, _MAX_OUTPUT, key, result)
        elif type(said) in (int, bool) and (said or key == "exit_code"):
            result[key] = said
    error, artifacts = answer.get("error"), answer.get("artifacts")
    if isinstance(error, dict):
        result["error"] = hide(f"{error.get('type')}: {error.get('message')}")[:_MAX_OUTPUT]
    if isinstance(artifacts, list) and artifacts:
        result["artifacts"] = len(artifacts)


def _kept(hide: _Hiding, text: str, most: int, name: str, result: dict[str, Any]) -> str:
    """As much of a text as is kept; of one that is cut, length and hash go into the result."""
    if len(text) > most:
        whole = text.encode("utf-8", "surrogatepass")
        result[f"{name}_bytes"], result[f"{name}_sha256"] = len(whole), hashlib.sha256(whole).hexdigest()
    return hide(text)[:most]


class _Hiding:
    """Takes the values of variables out of texts."""

    def __init__(self, env: Mapping[str, str]) -> None:
        values = {
            value: name
            for name, value in env.items()
            if len(value) >= _SHORTEST_SECRET and name not in _NO_SECRETS and not name.startswith("LC_")
        }
        self._values = sorted(values.items(), key=lambda pair: -len(pair[0]))
        self.longest = len(self._values[0][0]) if self._values else 0

    def __call__(self, text: str) -> str:
        for value, name in self._values:
            text = text.replace(value, f"[env {name}]")
        if not text.isascii():  # no lone surrogate goes into the file
            text = text.encode("utf-8", "backslashreplace").decode()
        return text
