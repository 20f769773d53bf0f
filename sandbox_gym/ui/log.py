"""An audit log as the page follows it: which sandboxes there were, and of one its story, its verdicts, its picture."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from sandbox_gym import audit
from sandbox_gym._audit_rows import place

_MOST = 20_000  # sandboxes that are remembered
_ROWS = 20_000  # that are taken in at once
_EVENTS, _VERDICTS = 400, 100  # of a sandbox, the last ones
_SHOWN = 400  # characters of a text in the list
_MAKES = ("create", "restore")
_NEW = """
SELECT id, time, client, sandbox, kind, snapshot,
    CASE WHEN kind IN ('create', 'restore', 'network', 'snapshot') THEN substr(text, 1, 80) END,
    CASE WHEN kind = 'end' THEN result END
FROM events WHERE id > ? ORDER BY id LIMIT ?
"""


@dataclass
class Known:
    """A sandbox that the log tells of. `client`: host:pid. `snapshot`: what it came from, which was of `origin`."""

    id: str
    name: str
    made: float  # seconds since 1970
    client: str
    snapshot: str | None
    origin: str | None
    ended: float | None = None
    state: str = "gone"  # when it is live no more, and the log tells of no end
    allowed: int = 0
    denied: int = 0


class Log:
    """Not thread-safe. Methods raise sqlite3.Error while the file can't be read."""

    def __init__(self, path: str) -> None:
        """Raises FileNotFoundError, SandboxError."""
        self._db = audit.connect(path)
        self._path, self._place = path, place(path)
        self._last = 0  # row
        self.known: dict[str, Known] = {}
        self.snapshots: dict[str, tuple[str, str]] = {}  # of which sandbox each is, and its label

    def close(self) -> None:
        self._db.close()

    def gone(self) -> bool:
        """Deleted or moved away, and perhaps another one is there."""
        return self._place is None or place(self._path) != self._place

    def version(self) -> int:
        """Another one when others have written."""
        return int(self._db.execute("PRAGMA data_version").fetchone()[0])

    def follow(self) -> None:
        """Takes in what is new."""
        for row in self._db.execute(_NEW, (self._last, _ROWS)):
            self._last = row[0]
            self._take(*row[1:])
        _shorten(self.known)
        _shorten(self.snapshots)

    def _take(
        self,
        time: float,
        client: str,
        sandbox: str | None,
        kind: str,
        snapshot: str | None,
        text: str | None,
        result: str | None,
    ) -> None:
        known = self.known.get(sandbox or "")
        if kind == "snapshot" and snapshot is not None and sandbox is not None:
            self.snapshots[snapshot] = sandbox, text or ""
        elif kind in _MAKES and sandbox is not None:
            origin, _ = self.snapshots.get(snapshot or "", (None, ""))
            self.known[sandbox] = Known(sandbox, text or sandbox, time, client, snapshot, origin)
        elif known is not None and kind == "network":
            if (text or "").startswith("allowed"):
                known.allowed += 1
            else:
                known.denied += 1
        elif known is not None and kind == "end":
            known.ended, known.state = time, str(json.loads(result or "{}").get("state", "gone"))

    def steps(self, sandbox: str) -> int | None:
        row = self._db.execute("SELECT count FROM steps WHERE sandbox = ?", (sandbox,)).fetchone()
        return None if row is None else int(row[0])

    def story(self, sandbox: str) -> dict[str, Any]:
        """Its last events and verdicts, with its ancestors' until it branched from them, oldest first; when its
        picture, or theirs, was drawn, and by which. A snapshot's is that of its sandbox until it was taken.
        """
        members = self._members(sandbox)
        return {
            "own": members[0][0],
            "events": self._events(members, "kind != 'network'", _EVENTS),
            "verdicts": self._events(members, "kind = 'network'", _VERDICTS),
            "frame": self._drawn(members),
        }

    def _members(self, id: str) -> list[tuple[str, float]]:
        """Whose story it is, each until when."""
        taken = audit.taken_of(self._db, id)
        sandbox, end = (id, float("inf")) if taken is None else taken
        return [(member, min(end, until)) for member, until in audit.lineage(self._db, sandbox)]

    def _events(self, members: list[tuple[str, float]], which: str, most: int) -> list[dict[str, Any]]:
        found: list[audit.Event] = []
        for member, until in members:
            query = f"SELECT {audit.COLUMNS} FROM events WHERE sandbox = ? AND time <= ? AND {which}"
            place = (member, until, most - len(found))
            found += map(
                audit.as_event, self._db.execute(f"{query} ORDER BY time DESC, id DESC LIMIT ?", place)
            )
            if len(found) >= most:  # ancestors' are older
                break
        return [_brief(event) for event in sorted(found, key=lambda event: (event.time, event.id))]

    def _drawn(self, members: list[tuple[str, float]]) -> dict[str, Any] | None:
        for member, until in members:
            query = "SELECT time FROM frames WHERE sandbox = ? AND time <= ?"
            row = self._db.execute(query, (member, until)).fetchone()
            if row is not None:
                return {"sandbox": member, "time": row[0]}
        return None

    def frame(self, sandbox: str) -> bytes | None:
        """A PNG."""
        row = self._db.execute("SELECT png FROM frames WHERE sandbox = ?", (sandbox,)).fetchone()
        return None if row is None else bytes(row[0])

    def event(self, id: int) -> dict[str, Any] | None:
        """All that is kept of it."""
        if not 0 < id < 1 << 63:  # SQLite has no such numbers
            return None
        row = self._db.execute(f"SELECT {audit.COLUMNS} FROM events WHERE id = ?", (id,)).fetchone()
        return None if row is None else asdict(audit.as_event(row))

    def newest_first(self) -> Iterator[Known]:
        """Sandboxes, by when they were made."""
        return reversed(self.known.values())


def _shorten(memory: dict[str, Any]) -> None:
    for oldest in list(islice(memory, max(0, len(memory) - _MOST))):
        del memory[oldest]


def _brief(event: audit.Event) -> dict[str, Any]:
    return {
        "id": event.id,
        "time": event.time,
        "sandbox": event.sandbox,
        "kind": event.kind,
        "text": event.text[:_SHOWN],
        "outcome": None if event.result is None else audit.outcome(event)[:_SHOWN],
        "failed": _failed(event.result or {}),
        "duration": event.duration,
        "snapshot": event.snapshot,
    }


def _failed(result: dict[str, Any]) -> bool:
    return bool(result.get("error") or result.get("exit_code") or result.get("timed_out"))
