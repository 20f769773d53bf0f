"""Which live sandbox and snapshot came from which, of all clients on this machine; `sandbox-gym tree` draws it."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from sandbox_gym._table import size, span

_EVERY = 1.0  # seconds between two pictures of a watch
_CLEAR = "\x1b[H\x1b[2J"
_MOST_LEVELS = 200


def live() -> list[dict[str, Any]]:
    """The rows of `registry.list_all`, and of docker's containers, which have no supervisor."""
    from sandbox_gym.backends.shared import registry

    found = [{**row, "supervised": True} for row in registry.list_all()]
    if has_docker():
        from sandbox_gym.backends.docker import owners

        found += [{"branched_from": None, **row, "supervised": False} for row in owners.rows()]
    return found


def has_docker() -> bool:
    """Whether its package is here; a daemon may be."""
    return importlib.util.find_spec("docker") is not None


def picture(rows: Sequence[dict[str, Any]]) -> str:
    """Of `live`: one tree for each client, siblings by age."""
    if not rows:
        return "No sandboxes are live."
    out = []
    for owner in sorted({row["owner_pid"] for row in rows}):
        own = sorted((row for row in rows if row["owner_pid"] == owner), key=lambda row: -row["age"])
        above = above_each(own)
        children: dict[str | None, list[dict[str, Any]]] = {}
        for row in own:
            children.setdefault(above[row["id"]], []).append(row)
        out.append(f"client {owner}")
        out += _branches(children, None, "", 0)
    return "\n".join(out)


def above_each(rows: Sequence[dict[str, Any]]) -> dict[str, str | None]:
    """What each hangs from; None for the roots, and where rewinds have closed a circle."""
    found = {row["id"]: row for row in rows}

    def hangs(
        row: dict[str, Any], origin: str
    ) -> bool:  # one that went back to a moment of its own is still itself
        return origin in found and found[origin]["branched_from"] != row["id"]

    above = {
        id: next((origin for origin in _origins(row) if hangs(row, origin)), None)
        for id, row in found.items()
    }
    settled: set[str | None] = {None}
    for id in above:
        path: dict[str | None, None] = {}
        place: str | None = id
        while place not in settled:
            if place in path:
                above[str(place)] = None
                break
            path[place] = None
            place = above[str(place)]
        settled |= path.keys()
    return above


def _origins(row: dict[str, Any]) -> list[str]:
    """The snapshot that it came from, and the sandbox that this was of: what is above it, if it is still there."""
    return [origin for origin in (row["parent"], row["branched_from"]) if origin is not None]


def _branches(
    children: dict[str | None, list[dict[str, Any]]], parent: str | None, indent: str, level: int
) -> Iterator[str]:
    rows = children.get(parent, [])
    for row in rows:
        last = row is rows[-1]
        gone = f"  from {_origins(row)[-1]}" if parent is None and _origins(row) else ""
        yield f"{indent}{'└─ ' if last else '├─ '}{_label(row)}{gone}"
        if level < _MOST_LEVELS:
            yield from _branches(children, row["id"], indent + ("   " if last else "│  "), level + 1)


def _label(row: dict[str, Any]) -> str:
    name = f" {row['name']}" if row["name"] != row["id"] else ""
    return f"{row['id']}{name}  {row['state']}  {span(row['age'])}  {size(row['memory_bytes'])}"


def show(*, watch: bool) -> None:
    """Prints it; with `watch` again every second, until Ctrl-C."""
    while True:
        clear = _CLEAR if watch and sys.stdout.isatty() else ""
        print(f"{clear}{picture(live())}", flush=True)
        if not watch:
            return
        try:
            time.sleep(_EVERY)
        except KeyboardInterrupt:
            return
