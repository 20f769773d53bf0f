"""The run folders of all supervisors on this host: who owns them, what lives in them, what the dead have left."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import time
from pathlib import Path
from typing import Any

from . import protocol

CGROUP_PREFIX = (
    "sandbox-gym-"  # and the run folder's name: control groups of a supervisor, and its folder of images
)
_MOST_ROWS = 100_000
# It ended meanwhile, or some user's socket answers what no supervisor does.
_ODD = (OSError, EOFError, ValueError, KeyError, TypeError, AssertionError)
_END_PATIENCE = 30.0  # seconds that a sandbox's processes may take to be gone
_PATIENCE = 5.0  # seconds that a control group may take to empty after its last process was killed


def home() -> Path:
    """Where run folders lie: one place as root, else one for each user."""
    if os.geteuid() == 0:
        return Path("/run/sandbox-gym")
    return Path(os.environ.get("XDG_RUNTIME_DIR") or "/tmp") / f"sandbox-gym-{os.getuid()}"


def make_folder() -> Path:
    place = home()
    folder = place / secrets.token_hex(6)
    while True:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        if place.stat().st_uid != os.geteuid():
            raise PermissionError(f"{place} belongs to another user")
        try:
            folder.mkdir(mode=0o700)
            break
        except FileNotFoundError:  # the last of the others has just removed `place`
            continue
    write(folder, owner_pid=os.getpid(), owner_start=start_time(os.getpid()))
    return folder


def write(folder: Path, **facts: Any) -> None:
    """Adds to what is known of a supervisor."""
    file = folder / "info.json"
    known = json.loads(file.read_text()) if file.exists() else {}
    temporary = folder / "info.new"
    temporary.write_text(json.dumps({**known, **facts}))
    temporary.replace(file)


def start_time(pid: int) -> int | None:
    """The kernel's start time of a process, which tells it from a later one with its number; None when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _info(folder: Path) -> dict[str, Any]:
    try:
        info = json.loads((folder / "info.json").read_text())
    except (OSError, ValueError):
        return {}
    return info if isinstance(info, dict) else {}


def _folders() -> list[Path]:
    try:
        return sorted(path for path in home().iterdir() if path.is_dir())
    except OSError:
        return []


def _connect(folder: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(5.0)
    try:
        sock.connect(str(folder / "socket"))
    except OSError:
        sock.close()
        raise
    return sock


def rows(sock: socket.socket) -> list[dict[str, Any]]:
    """Everything that one supervisor holds."""
    found: list[dict[str, Any]] = []
    more = True
    while more and len(found) < _MOST_ROWS:
        protocol.send(sock, {"op": "list", "start": len(found)})
        reply, _ = protocol.receive(sock)
        found += reply["rows"]
        more = reply["more"]
    return found


def list_all() -> list[dict[str, Any]]:
    """Live sandboxes and snapshots of every client of this user; as root, of every user on this host."""
    found = []
    for folder in _folders() + (_of_other_users() if os.geteuid() == 0 else []):
        try:
            with _connect(folder) as sock:
                owner = int(_info(folder).get("owner_pid", 0))
                found += [_plain_row(row, owner) for row in rows(sock)]
        except _ODD:
            continue
    return found


def terminate(sandbox_id: str, owner_pid: int, reason: str) -> bool:
    """Ends a sandbox of that client, as the client would; its next call tells it of `reason`. False when it has none.

    Raises OSError when its supervisor does not answer.
    """
    for folder in _folders() + (_of_other_users() if os.geteuid() == 0 else []):
        if _info(folder).get("owner_pid") != owner_pid:
            continue
        try:
            with _connect(folder) as sock:
                held = [row["id"] for row in rows(sock) if row["state"] != "snapshot"]
        except _ODD:
            continue
        if sandbox_id in held:
            with _connect(folder) as sock:
                sock.settimeout(_END_PATIENCE)
                protocol.send(sock, {"op": "terminate", "id": sandbox_id, "reason": reason})
                protocol.receive(sock)
            return True
    return False


def _of_other_users() -> list[Path]:
    return [
        folder
        for root, pattern in (("/run/user", "*/sandbox-gym-*/*"), ("/tmp", "sandbox-gym-*/*"))
        for folder in Path(root).glob(pattern)
    ]


def _plain_row(row: dict[str, Any], owner_pid: int) -> dict[str, Any]:
    """Only what a row has, of its types and printable: another user may have made it up."""
    texts = {name: ascii(str(row[name]))[1:-1][:80] for name in ("id", "name", "state")}
    origins = {
        name: None if row.get(name) is None else ascii(str(row[name]))[1:-1][:80]
        for name in ("parent", "branched_from")
    }
    numbers = {"age": float(row["age"]), "memory_bytes": int(row["memory_bytes"]), "pid": int(row["pid"])}
    return {**texts, **origins, **numbers, "owner_pid": owner_pid}


def collect(dry_run: bool = False) -> list[str]:
    """Removes what dead clients have left: run folders and control groups. Returns what it removed, or would."""
    gone = []
    for folder in _folders():
        info = _info(folder)
        if info and start_time(info["owner_pid"]) == info["owner_start"]:
            continue
        if not info and time.time() - folder.stat().st_mtime < 60:  # one that is being made right now
            continue
        try:
            _connect(folder).close()
            continue  # its supervisor lives, and is about to notice that its client does not
        except OSError:
            pass
        gone.append(str(folder))
        if not dry_run:
            clear(folder)
    return gone


def clear(folder: Path) -> None:
    """Removes a run folder and its control groups, once the supervisor's processes are gone. Idempotent."""
    deadline = time.monotonic() + _PATIENCE
    for root in _info(folder).get("groups", []):
        group = Path(root) / f"{CGROUP_PREFIX}{folder.name}"
        while group.exists() and not _remove_group(group):
            if time.monotonic() > deadline:
                raise TimeoutError(f"processes are still in {group}")
            time.sleep(0.01)
    scratch = _info(folder).get("scratch")
    if scratch is not None and Path(scratch).name == f"{CGROUP_PREFIX}{folder.name}":
        shutil.rmtree(scratch, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):  # others are in there
        folder.parent.rmdir()


def _remove_group(group: Path) -> bool:
    try:
        for child in [path for path in group.iterdir() if path.is_dir()]:
            os.rmdir(child)
        os.rmdir(group)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
