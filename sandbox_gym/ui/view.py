"""What the page asks for: the tree of live and of lately ended sandboxes, the story of one, and, if told, its end."""

from __future__ import annotations

import os
import socket
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

from sandbox_gym import _tree
from sandbox_gym._pages import Refusal
from sandbox_gym.backends.shared import registry
from sandbox_gym.errors import SandboxError
from sandbox_gym.ui.log import Known, Log

_EVERY = 1.0  # seconds between two looks, however many pages are open; more where a look takes long
_SHARE = 5  # of the time, at most one part in so many goes into looking
_MOST_NODES = 5000  # live ones in one answer
_MOST_ENDED = 300
_REASON = "it was terminated on the page of sandbox-gym ui"


class View:
    """Thread-safe. Methods take a request's fields; they raise Refusal, and ValueError for fields of another form."""

    def __init__(self, audit: str | None, *, control: bool) -> None:
        """Raises SandboxError for what is no audit log."""
        self._audit = None if audit is None else os.path.abspath(audit)
        self._control = control
        self._lock = threading.Lock()
        self._log: Log | None = None
        self._lost = False  # it was there, and is no more
        self._opened = 0  # times: numbers of events are of one log
        self._made: dict[
            str, float
        ] = {}  # seconds since 1970: ages, which grow, would make each look a new one
        self._live: dict[str, dict[str, Any]] = {}
        self._next_look = float("-inf")
        self._state: dict[str, Any] = {}
        self._version = 0
        with self._lock:
            self._open_log()

    def close(self) -> None:
        with self._lock:
            if self._log is not None:
                self._log.close()

    # ---- what it answers --------------------------------------------------------------------------------------

    def state(self, fields: dict[str, str]) -> dict[str, Any]:
        """All sandboxes, or only `version` when that is the one which the page has."""
        with self._reading():
            began = time.monotonic()
            if began >= self._next_look:
                self._look()
                self._next_look = began + max(_EVERY, _SHARE * (time.monotonic() - began))
            now = {"version": self._version, "now": time.time()}
            return now if fields.get("version") == str(self._version) else {**now, **self._state}

    def story(self, fields: dict[str, str]) -> dict[str, Any]:
        """Of a `sandbox`, or only `version` when nothing has been written since the one which the page has."""
        with self._reading() as log:
            if log is None:
                return {"version": None}
            version = f"{self._opened}.{log.version()}"
            if fields.get("version") == version:
                return {"version": version}
            return {"version": version, **log.story(_field(fields, "sandbox"))}

    def event(self, fields: dict[str, str]) -> dict[str, Any]:
        """All that is kept of the one with that `id`."""
        with self._reading() as log:
            found = None if log is None else log.event(int(_field(fields, "id")))
        if found is None:
            raise Refusal(HTTPStatus.NOT_FOUND, "there is no such event")
        return found

    def frame(self, fields: dict[str, str]) -> bytes:
        """The last picture of a `sandbox`."""
        with self._reading() as log:
            found = None if log is None else log.frame(_field(fields, "sandbox"))
        if found is None:
            raise Refusal(HTTPStatus.NOT_FOUND, "it has drawn nothing")
        return found

    def terminate(self, wish: dict[str, Any]) -> dict[str, Any]:
        """Ends the sandbox with that `id`."""
        if not self._control:
            raise Refusal(HTTPStatus.FORBIDDEN, "this page only shows: start it with --control")
        with self._lock:
            row = self._live.get(str(wish.get("id")))
        if row is None or row["state"] == "snapshot":
            raise Refusal(HTTPStatus.NOT_FOUND, "there is no such sandbox, or it has ended")
        if not row["supervised"]:
            raise Refusal(HTTPStatus.CONFLICT, "a docker container: its client ends it")
        try:
            if not registry.terminate(row["id"], row["owner_pid"], _REASON):
                raise Refusal(HTTPStatus.NOT_FOUND, "it has ended already")
        except (OSError, EOFError, ValueError, AssertionError) as error:
            raise Refusal(HTTPStatus.BAD_GATEWAY, f"its supervisor does not answer: {error}") from None
        self._next_look = float("-inf")  # the page sees it at once
        return {"terminated": row["id"]}

    # ---- looking --------------------------------------------------------------------------------------------------

    @contextmanager
    def _reading(self) -> Iterator[Log | None]:
        with self._lock:
            try:
                if self._log is not None and self._log.gone():
                    self._log.close()
                    self._log, self._lost = None, True
                if self._log is None:
                    self._open_log()
                yield self._log
            except (sqlite3.Error, SandboxError) as error:
                problem = f"the audit log can't be read: {error}"
                raise Refusal(HTTPStatus.INTERNAL_SERVER_ERROR, problem) from None

    def _open_log(self) -> None:
        """Where there is one by now."""
        if self._audit is not None and os.path.exists(self._audit) and os.path.getsize(self._audit):
            self._log, self._lost = Log(self._audit), False
            self._opened += 1

    def _look(self) -> None:
        if self._log is not None:  # before the live ones, or what is made now would be taken for gone
            self._log.follow()
        rows = _tree.live()
        self._live = {row["id"]: row for row in rows}
        self._made = {row["id"]: self._made.get(row["id"], time.time() - row["age"]) for row in rows}
        nodes = [self._live_node(row) for row in rows[:_MOST_NODES]] + self._ended_nodes()
        above = _tree.above_each(nodes)
        for node in nodes:
            node["above"] = above[node["id"]]
        state = {
            "nodes": nodes,
            "left_out": max(0, len(rows) - _MOST_NODES),
            "control": self._control,
            "audit": self._audit,
            "logging": self._log is not None,
            "lost": self._lost,
            "opened": self._opened,
        }
        if state != self._state:
            self._state, self._version = state, self._version + 1

    def _live_node(self, row: dict[str, Any]) -> dict[str, Any]:
        known = None if self._log is None else self._log.known.get(row["id"])
        label = "" if self._log is None else self._log.snapshots.get(row["id"], ("", ""))[1]
        return {
            **{key: row[key] for key in ("id", "state", "parent", "branched_from", "memory_bytes")},
            "name": label or row["name"],
            "made": self._made[row["id"]],
            "ended": None,
            "client": str(row["owner_pid"]),
            "can_end": row["supervised"] and row["state"] != "snapshot",
            **self._told(row["id"], known),
        }

    def _ended_nodes(self) -> list[dict[str, Any]]:
        """The last ones, and those that live ones came from."""
        if self._log is None:
            return []
        known = self._log.known
        chosen: dict[str, Known] = {}
        above: set[str] = set()
        for row in self._live.values():
            origin = known.get(row["branched_from"] or "")
            while origin is not None and origin.id not in above:
                above.add(origin.id)
                if origin.id not in self._live:
                    chosen[origin.id] = origin
                origin = known.get(origin.origin or "")
        for each in self._log.newest_first():
            if len(chosen) >= _MOST_ENDED:
                break
            if each.id not in self._live:
                chosen[each.id] = each
        return [self._ended_node(each) for each in chosen.values()]

    def _ended_node(self, known: Known) -> dict[str, Any]:
        host, _, pid = known.client.rpartition(":")
        return {
            "id": known.id,
            "name": known.name,
            "state": known.state,
            "parent": known.snapshot,
            "branched_from": known.origin,
            "memory_bytes": None,
            "made": known.made,
            "ended": known.ended,
            "client": pid if host == socket.gethostname() else known.client,
            "can_end": False,
            **self._told(known.id, known),
        }

    def _told(self, id: str, known: Known | None) -> dict[str, Any]:
        if self._log is None or known is None:
            return {"steps": None, "allowed": 0, "denied": 0}
        return {"steps": self._log.steps(id), "allowed": known.allowed, "denied": known.denied}


def _field(fields: dict[str, str], name: str) -> str:
    if name not in fields:
        raise ValueError(f"{name}= is missing")
    return fields[name]
