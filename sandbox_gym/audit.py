"""Reading an audit log: every command, cell, file write, network verdict, snapshot and restore, by sandbox and origin.

`set_audit` says what is recorded. A sandbox's story begins in its ancestors: `read(path, sandbox=...)` gives theirs up
to the snapshot that it came from, then its own. Steps of environments are no events: they are counted, and of what an
environment draws the last picture is kept (tables `steps` and `frames`); `steps` gives the counts, and `sandbox-gym ui`
shows both.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any
from urllib.parse import quote

from sandbox_gym._audit import VARIABLE
from sandbox_gym._audit_rows import APPLICATION, VERSION
from sandbox_gym._table import table
from sandbox_gym.errors import SandboxError

COLUMNS = "id, time, client, sandbox, kind, text, result, duration, snapshot"
_MOST_SHOWN = 100  # characters of a cell of the table


@dataclass(frozen=True)
class Event:
    """`time`: seconds since 1970, when it began. `client`: host:pid of the process that asked for it. `kind`: "create",
    "restore", "rewind", "snapshot", "load", "end"; "shell", "exec", "start", "stdin", "session", "code", "make",
    "write", "upload"; "network". `text`: the command, code or path. `result`: what came of it; None where it has not
    ended, or its client was killed first. `duration` in seconds. `snapshot`: the id of what was taken, or restored.
    """

    id: int
    time: float
    client: str
    sandbox: str | None
    kind: str
    text: str
    result: dict[str, Any] | None
    duration: float | None
    snapshot: str | None


def read(path: str | os.PathLike[str], *, sandbox: str | None = None) -> Iterator[Event]:
    """All events in the order in which they were written; of a `sandbox` (id or name), its own and its ancestors' until
    it branched from them, in order of time.

    Raises FileNotFoundError; KeyError when no such sandbox is in it; SandboxError when it is no audit log.
    """
    with closing(connect(os.fspath(path))) as db:
        if sandbox is None:
            yield from map(as_event, db.execute(f"SELECT {COLUMNS} FROM events ORDER BY id"))
            return
        found: list[Event] = []
        for member, until in lineage(db, _resolve(db, sandbox)):
            query = f"SELECT {COLUMNS} FROM events WHERE sandbox = ? AND time <= ?"
            found += map(as_event, db.execute(query, (member, until)))
        yield from sorted(found, key=lambda event: (event.time, event.id))


def steps(path: str | os.PathLike[str], *, sandbox: str | None = None) -> dict[str, int]:
    """How many steps each sandbox's environment has made, by its id; of a `sandbox` (id or name), of its own alone: how
    many an ancestor had made when it branched was not kept. Raises as `read` does.
    """
    with closing(connect(os.fspath(path))) as db:
        if sandbox is None:
            return dict(db.execute("SELECT sandbox, count FROM steps ORDER BY time, rowid"))
        return dict(
            db.execute("SELECT sandbox, count FROM steps WHERE sandbox = ?", (_resolve(db, sandbox),))
        )


def connect(path: str) -> sqlite3.Connection:
    """To read only. Raises FileNotFoundError, SandboxError."""
    check_there(path)
    db = sqlite3.connect(
        f"file:{quote(os.path.abspath(path))}?mode=ro", uri=True, timeout=30.0, check_same_thread=False
    )
    try:
        marks = [db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")]
        if marks != [APPLICATION, VERSION]:
            raise sqlite3.DatabaseError("another kind of file, or of another release")
    except sqlite3.Error as error:
        db.close()
        raise SandboxError(f"{path} is no audit log ({error})") from None
    return db


def check_there(path: str) -> None:
    """Raises FileNotFoundError."""
    if not os.path.exists(path):
        raise FileNotFoundError(f"no audit log {path}: set_audit(path), or {VARIABLE}=path, makes one")


def as_event(row: Sequence[Any]) -> Event:
    """Of COLUMNS."""
    fields = list(row)
    fields[6] = None if row[6] is None else json.loads(row[6])
    return Event(*fields)


def _resolve(db: sqlite3.Connection, sandbox: str) -> str:
    if db.execute("SELECT 1 FROM events WHERE sandbox = ? LIMIT 1", (sandbox,)).fetchone():
        return sandbox
    query = "SELECT sandbox FROM events WHERE kind IN ('create', 'restore') AND text = ? ORDER BY time DESC LIMIT 1"
    row = db.execute(query, (sandbox,)).fetchone()
    if row is None:
        raise KeyError(f"no sandbox {sandbox!r} in this audit log")
    return str(row[0])


def lineage(db: sqlite3.Connection, sandbox: str) -> Iterator[tuple[str, float]]:
    """The sandbox and those that it came from, each with the time until which its story is this one's."""
    member, until = sandbox, float("inf")
    seen = {member}
    while True:
        yield member, until
        query = "SELECT snapshot FROM events WHERE sandbox = ? AND kind = 'restore'"
        restored = db.execute(query, (member,)).fetchone()
        taken = taken_of(db, restored[0]) if restored else None
        if taken is None or taken[0] in seen:
            return
        member, until = taken[0], min(until, taken[1])
        seen.add(member)


def taken_of(db: sqlite3.Connection, snapshot: str) -> tuple[str, float] | None:
    """Which sandbox a snapshot was taken of, and when; also of one that has travelled as an archive."""
    for _ in range(100):
        query = "SELECT kind, sandbox, time, result FROM events WHERE snapshot = ? AND kind IN ('snapshot', 'load')"
        row = db.execute(query, (snapshot,)).fetchone()
        if row is None:
            return None
        if row[0] == "snapshot":
            return str(row[1]), float(row[2])
        snapshot = json.loads(row[3]).get("origin")
    return None


# ---- for people -----------------------------------------------------------------------------------------------------


def lines(events: Iterator[Event]) -> Iterator[str]:
    """As JSON, one a line."""
    return (json.dumps(asdict(event)) for event in events)


def as_table(events: Iterator[Event]) -> str:
    head = ("TIME", "SANDBOX", "KIND", "WHAT", "RESULT", "SECONDS")
    cells = [
        (
            datetime.fromtimestamp(event.time).isoformat(" ", "milliseconds"),
            event.sandbox or "",
            event.kind,
            _plain(event.text),
            _plain(outcome(event)),
            "" if event.duration is None else f"{event.duration:.3f}",
        )
        for event in events
    ]
    return table(head, cells, right=(5,)) if cells else "Nothing was recorded."


def steps_as_table(counted: dict[str, int]) -> str:
    rows = [(sandbox, str(count)) for sandbox, count in counted.items()]
    return table(("SANDBOX", "STEPS"), rows, right=(1,))


def outcome(event: Event) -> str:
    """What came of it, in a few words."""
    result = event.result
    if result is None:
        return "never ended"
    if event.kind in ("snapshot", "restore", "rewind", "load"):
        return f"{'as' if event.kind in ('snapshot', 'load') else 'from'} {event.snapshot}"
    if event.kind == "create":
        return str(result.get("image") or "")
    if event.kind == "end":
        return str(result["state"])
    said = [f"exit {result['exit_code']}"] if "exit_code" in result else []
    said += ["timed out"] if result.get("timed_out") else []
    said += [str(result[key]) for key in ("error", "value", "reason") if result.get(key)]
    return ", ".join(said)


def _plain(text: str) -> str:
    """One line, with nothing in it that a terminal obeys: guests have written it."""
    short = text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 3]}..."
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in short)
