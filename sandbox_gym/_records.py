"""A caller's arguments and a guest's answers, checked before anything relies on them."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sandbox_gym.api import (
    Artifact,
    CodeResult,
    ErrorInfo,
    ExecResult,
    FileInfo,
    Limits,
    ProcessInfo,
    ShellResult,
    parse_bytes,
)
from sandbox_gym.errors import ProtocolError, SandboxError
from sandbox_gym.guest import artifacts
from sandbox_gym.network import Allow

UNSET: Any = object()
_DEFAULTS = Limits()
_COUNT = (int,)
_TEXT = (str,)
_SECONDS = (float, int)
_STREAMS = {"stdout": _TEXT, "stderr": _TEXT, "stdout_cut": _COUNT, "stderr_cut": _COUNT}
_RAN = {**_STREAMS, "timed_out": (bool,), "duration": _SECONDS}
_KINDS: dict[type[Any], dict[str, tuple[type, ...]]] = {
    CodeResult: {
        **_RAN,
        "value": (str, type(None)),
        "error": (ErrorInfo, type(None)),
        "artifacts": (tuple,),
        "notes": (tuple,),
    },
    ExecResult: {**_RAN, "exit_code": _COUNT},
    ShellResult: {**_RAN, "exit_code": _COUNT, "ended": (bool,)},
    ProcessInfo: {
        "id": _TEXT,
        "argv": (tuple,),
        "pid": _COUNT,
        "pty": (bool,),
        "exit_code": (int, type(None)),
        "stdout_cut": _COUNT,
        "stderr_cut": _COUNT,
    },
    ErrorInfo: {"type": _TEXT, "message": _TEXT, "traceback": _TEXT},
    FileInfo: {
        "path": _TEXT,
        "kind": _TEXT,
        "size": _COUNT,
        "mode": _COUNT,
        "mtime": _SECONDS,
        "target": _TEXT,
    },
}
_MIMES = ("image/png", "text/csv", "application/vnd.plotly.v1+json")
SHELL = ("/bin/sh", "-c", 'if command -v bash >/dev/null; then exec bash -c "$0"; else eval "$0"; fi')
_MAX_PROCESSES = 64 + 256  # that run, and that have ended
_ERRNO = re.compile(r"\[Errno (\d{1,3})\] (.*)", re.DOTALL)


def make_limits(cpus: Any, memory: Any, disk: Any, pids: Any) -> Limits:
    """Limits from what a caller gave; what was left out keeps its default. Raises ValueError."""
    given = {"cpus": cpus, "memory": memory, "disk": disk, "pids": pids}
    explicit = frozenset(name for name, value in given.items() if value is not UNSET and value is not None)
    if "cpus" in explicit and not (_is_number(cpus) and 0 < cpus <= 1024):
        raise ValueError(f"cpus is above 0 and at most 1024, not {cpus!r}")
    if "pids" in explicit and not (type(pids) is int and pids > 0):
        raise ValueError(f"pids is an int above 0, not {pids!r}")
    return Limits(
        _DEFAULTS.cpus if cpus is UNSET else cpus,
        _DEFAULTS.memory_bytes if memory is UNSET else None if memory is None else parse_bytes(memory),
        _DEFAULTS.disk_bytes if disk is UNSET else None if disk is None else parse_bytes(disk),
        _DEFAULTS.pids if pids is UNSET else pids,
        explicit,
    )


def check_names(names: Sequence[str | None], resting: Sequence[str]) -> None:
    """The supervisor keeps names unique among what runs; a sandbox at rest keeps its name too. Raises SandboxError."""
    for name in resting:
        if name in names:
            raise SandboxError(f"a sandbox named {name!r} lives already: names are unique among the living")


def check_network(value: Any) -> None:
    """Raises ValueError for what is neither rules nor None."""
    if value is not None and not isinstance(value, Allow):
        raise ValueError(f"network is None, for a closed one, or Allow(['example.org', ...]), not {value!r}")


def check_seconds(name: str, value: Any, *, optional: bool = False) -> None:
    """Raises ValueError for what is no time: zero, negative, infinite, no number."""
    if optional and value is None:
        return
    if not _is_number(value) or not 0 < value < 1e9:
        raise ValueError(f"{name} is a number of seconds above 0, not {value!r}")


def check_texts(texts: Iterable[str]) -> None:
    """Raises ValueError for what no program can be given."""
    for text in texts:
        if b"\0" in os.fsencode(text):  # UnicodeEncodeError, a ValueError, for a lone surrogate
            raise ValueError("no argument, folder or variable of a program can hold a null character")


def check_program(argv: Any, cwd: str | None, env: Mapping[str, str] | None) -> None:
    """Raises ValueError for an argv that is none."""
    if isinstance(argv, (str, bytes)) or not argv or not all(isinstance(arg, str) for arg in argv):
        raise ValueError(
            f"argv is a program and its arguments, as strings, not {argv!r} (shell() takes a line)"
        )
    check_texts((*argv, cwd or "", *(env or {}), *(env or {}).values()))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def code_result(fields: Any, name: str) -> CodeResult:
    fields = dict(fields) if isinstance(fields, dict) else {}
    if isinstance(fields.get("error"), dict):
        fields["error"] = record(ErrorInfo, fields["error"], name)
    fields["artifacts"] = _artifacts(fields.get("artifacts"), name)
    fields["notes"] = _notes(fields.get("notes"), name)
    result = record(CodeResult, fields, name)
    assert isinstance(result, CodeResult)
    return result


def _artifacts(rows: Any, name: str) -> tuple[Artifact, ...]:
    """PNGs by their first bytes: a guest's bytes are looked at no further. Raises ProtocolError."""
    if not isinstance(rows, list) or len(rows) > artifacts.MAX_COUNT:
        raise ProtocolError(f"sandbox {name} sent no list of artifacts")
    made = []
    for row in rows:
        mime, data = (row.get("mime"), row.get("data")) if isinstance(row, dict) else (None, None)
        if mime not in _MIMES or not isinstance(data, bytes) or len(data) > artifacts.MAX_BYTES:
            raise ProtocolError(f"sandbox {name} sent an artifact that is none")
        if mime == "image/png" and not data.startswith(artifacts.PNG):
            raise ProtocolError(f"sandbox {name} sent a PNG that is none")
        made.append(Artifact(mime, data))
    if sum(len(artifact.data) for artifact in made) > artifacts.MAX_TOTAL:
        raise ProtocolError(f"sandbox {name} sent more than {artifacts.MAX_TOTAL} bytes of artifacts")
    return tuple(made)


def _notes(rows: Any, name: str) -> tuple[str, ...]:
    whole = isinstance(rows, list) and len(rows) <= artifacts.MAX_NOTES
    if not whole or not all(isinstance(row, str) and len(row) <= artifacts.MAX_NOTE for row in rows):
        raise ProtocolError(f"sandbox {name} sent no notes")
    return tuple(rows)


def exec_result(fields: Any, name: str) -> ExecResult:
    result = record(ExecResult, fields, name)
    assert isinstance(result, ExecResult)
    return result


def shell_result(fields: Any, name: str) -> ShellResult:
    result = record(ShellResult, fields, name)
    assert isinstance(result, ShellResult)
    return result


def process_info(fields: Any, name: str) -> ProcessInfo:
    argv = fields.get("argv") if isinstance(fields, dict) else None
    if not isinstance(argv, list) or not all(isinstance(argument, str) for argument in argv):
        raise ProtocolError(f"sandbox {name} sent a process without arguments")
    info = record(ProcessInfo, {**fields, "argv": tuple(argv)}, name)
    assert isinstance(info, ProcessInfo)
    return info


def process_list(rows: Any, name: str) -> list[ProcessInfo]:
    if not isinstance(rows, list) or len(rows) > _MAX_PROCESSES:
        raise ProtocolError(f"sandbox {name} sent no list of processes")
    return [process_info(row, name) for row in rows]


def file_info(row: Any, name: str) -> FileInfo:
    names = _KINDS[FileInfo]
    if not isinstance(row, (list, tuple)) or len(row) != len(names):
        raise ProtocolError(f"sandbox {name} sent an entry of a folder that is none")
    info = record(FileInfo, dict(zip(names, row)), name)
    assert isinstance(info, FileInfo)
    return info


def record(kind: type[Any], fields: Any, name: str) -> Any:
    """A record from a guest's fields. Raises ProtocolError when they aren't its fields, each of its type."""
    expected = _KINDS[kind]
    if not isinstance(fields, dict) or fields.keys() != expected.keys():
        raise ProtocolError(f"sandbox {name} sent no {kind.__name__}")
    for key, types in expected.items():
        if not isinstance(fields[key], types) or (bool not in types and isinstance(fields[key], bool)):
            raise ProtocolError(
                f"sandbox {name} sent a {kind.__name__} whose {key} is a {type(fields[key]).__name__}"
            )
    return kind(**fields)


def block(reply: Any, name: str) -> tuple[bytes, bool]:
    """A piece of a file or archive, and whether it is the last. Raises ProtocolError."""
    data, end = (reply.get("data"), reply.get("end")) if isinstance(reply, dict) else (None, None)
    # Else it could answer for ever.
    if not isinstance(data, bytes) or not isinstance(end, bool) or not (data or end):
        raise ProtocolError(f"sandbox {name} sent no block of a file")
    return data, end


def os_error(info: dict[str, str], name: str) -> Exception:
    """A guest's exception over a file as the same exception here: an OSError by its errno, or a ValueError."""
    match = _ERRNO.fullmatch(info["message"])
    if match:
        return OSError(int(match[1]), f"sandbox {name}: {match[2]}")
    kind = ValueError if info["type"] == "ValueError" else OSError
    return kind(f"sandbox {name}: {info['message']}")
