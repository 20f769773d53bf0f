"""`Task`: what an agent is asked, what it is given, and how its work is judged, as one plain record."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import difflib
import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, Literal, get_args

from sandbox_gym.api import parse_bytes
from sandbox_gym.errors import TaskError
from sandbox_gym.network import Allow

Scoring = Literal["exit_code", "json", "junit"]
Content = str | bytes

PROTECTED = (
    *(".git", ".hg", "tests", "test", "test_*.py", "*_test.py", "conftest.py"),
    *("pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg", "setup.py"),
    "pyproject.toml",
)
"""What an agent's changes never reach in a check, unless a task says otherwise: tests, and what steers their runner."""


@dataclass(frozen=True)
class Task:
    """A task. All of it is plain JSON, both ways (`to_json`, `from_json`); bytes are `{"base64": ...}` there.

    What the agent's sandbox is: `image` (see `Sandbox.create`; a Dockerfile's path too) or `template`, with `files`
    (path -> content) in it and `repo` (a git repository of the host) checked out in `workdir` at `base_commit`, of
    whose history nothing later is left; then `setup` has run, line by line. `cpus`, `memory`, `disk`, `pids` are
    its limits, for the set-up too; `network` the hosts that the agent may reach (None is none), `setup_network` those
    that the set-up may. A check reaches none.

    How it is judged: in a fresh sandbox at the end of the set-up get only the agent's changes below `workdir` and
    `carry`, but for `protected` paths; then `hidden` files and `test_patch`; then `check` runs, a line for the shell in
    `workdir`, for `check_timeout` seconds at the most. `scoring`:

    - "exit_code": 1.0 for exit code 0, else 0.0;
    - "json": the check prints one line that is a JSON object with a "score" from 0 to 1, and exits with 0;
    - "junit": the check writes JUnit XML to `$SANDBOX_JUNIT` (pytest does so unasked). The score is the part of
      `fail_to_pass` that passed if all of `pass_to_pass` did, else 0; without these, the part of all tests that passed.

    `protected`: names (`conftest.py`, `test_*.py`: wherever they lie) or paths from `workdir` (`src/vendored`); each
    covers what lies below it. `solution`: a line for the shell that solves the task; where it is given, the check is
    proven with it. The agent sees none of `check`, `hidden`, `test_patch`, `solution`.
    """

    id: str
    check: str
    prompt: str = ""
    image: str | None = None
    template: str | None = None
    setup: tuple[str, ...] = ()
    files: Mapping[str, Content] = field(default_factory=dict, hash=False)
    repo: str | None = None
    base_commit: str | None = None
    hidden: Mapping[str, Content] = field(default_factory=dict, hash=False)
    test_patch: str = ""
    scoring: Scoring = "exit_code"
    fail_to_pass: tuple[str, ...] = ()
    pass_to_pass: tuple[str, ...] = ()
    protected: tuple[str, ...] = PROTECTED
    carry: tuple[str, ...] = ()
    workdir: str = "/workspace"
    check_timeout: float = 120.0
    setup_timeout: float = 600.0
    max_steps: int = 50
    cpus: float | None = 1.0
    memory: int | str | None = "1Gi"
    disk: int | str | None = "2Gi"
    pids: int | None = 256
    network: tuple[str, ...] | None = None
    setup_network: tuple[str, ...] | None = None
    solution: str = ""

    def __post_init__(self) -> None:
        """Raises TaskError, which names the field."""
        for name, check in _CHECKS.items():
            try:
                object.__setattr__(self, name, check(getattr(self, name)))
            except (ValueError, TypeError) as error:
                raise TaskError(f"field {name!r}: {error}") from None
        if self.image is not None and self.template is not None:
            raise TaskError("field 'template': give an image or a template, not both")
        if self.repo is not None and self.base_commit is None:
            raise TaskError("field 'base_commit': a repo needs one, so that nothing later is left in it")
        if self.scoring != "junit" and (self.fail_to_pass or self.pass_to_pass):
            raise TaskError("field 'fail_to_pass': tests are told apart by scoring 'junit' alone")

    @staticmethod
    def from_json(record: Mapping[str, Any]) -> Task:
        """Raises TaskError for a field that is missing, unknown or of another type."""
        names = [f.name for f in dataclasses.fields(Task)]
        for name in record:
            if name not in names:
                near = difflib.get_close_matches(str(name), names, 1)
                hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names)}"
                raise TaskError(f"field {str(name)[:100]!r}: unknown; {hint}")
        for name in ("id", "check"):
            if name not in record:
                raise TaskError(f"field {name!r}: missing")
        return Task(**record)

    def to_json(self) -> dict[str, Any]:
        """The record, without what is at its default."""
        record: dict[str, Any] = {}
        for entry in dataclasses.fields(self):
            value = getattr(self, entry.name)
            default = {} if entry.default_factory is dict else entry.default
            if value == default:
                continue
            if isinstance(value, Mapping):
                value = {path: _plain(content) for path, content in value.items()}
            record[entry.name] = list(value) if isinstance(value, tuple) else value
        return record

    @property
    def digest(self) -> str:
        """SHA-256 of the record: what it was computed for stays right while it is the same."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()

    @property
    def roots(self) -> tuple[str, ...]:
        """The folders whose changes count."""
        return (self.workdir, *self.carry)

    def path(self, path: str) -> str:
        """As an absolute path in the sandbox."""
        return str(PurePosixPath(self.workdir, path))


def _plain(content: Content) -> Any:
    return content if isinstance(content, str) else {"base64": base64.b64encode(content).decode()}


# ---- what a field may be -----------------------------------------------------------------------------------------


def _text(value: Any) -> str:
    if not isinstance(value, str) or "\0" in value:
        raise ValueError(f"text is wanted, not {_short(value)}")
    return value


def _filled(value: Any) -> str:
    if not _text(value).strip():
        raise ValueError("it is empty")
    return str(value)


def _optional(check: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else check(value)


def _texts(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):  # one line of set-up, say
        return (value,) if value else ()
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"a list of text is wanted, not {_short(value)}")
    return tuple(_text(item) for item in value)


def _files(value: Any) -> dict[str, Content]:
    if not isinstance(value, Mapping):
        raise ValueError(f"paths with their contents are wanted, not {_short(value)}")
    return {_path(path): _content(path, content) for path, content in value.items()}


def _content(path: str, content: Any) -> Content:
    if isinstance(content, (str, bytes)):
        return content
    if isinstance(content, Mapping) and set(content) == {"base64"}:
        try:
            return base64.b64decode(content["base64"], validate=True)
        except (binascii.Error, TypeError, ValueError):
            raise ValueError(f"{path!r} has no base64 in its 'base64'") from None
    raise ValueError(f"{path!r} holds text, or {{'base64': ...}}, not {_short(content)}")


def _path(value: Any) -> str:
    if not _filled(value) or ".." in PurePosixPath(value).parts or value.endswith("/"):
        raise ValueError(f"{value!r} is no path of a file, or has '..' in it")
    return str(value)


def _folder(value: Any) -> str:
    path = PurePosixPath(_filled(value))
    if not path.is_absolute() or ".." in path.parts or len(path.parts) < 2:
        raise ValueError(f"{value!r} is no absolute path of a folder (without '..', and not /)")
    return str(path)


def _folders(value: Any) -> tuple[str, ...]:
    return tuple(_folder(item) for item in _texts(value))


def _scoring(value: Any) -> Any:
    if value not in get_args(Scoring):
        raise ValueError(f"{', '.join(get_args(Scoring))} are known, not {_short(value)}")
    return value


def _seconds(value: Any) -> float:
    if not _is_number(value) or not 0 < value < math.inf:
        raise ValueError(f"seconds are wanted, above 0, not {_short(value)}")
    return float(value)


def _cpus(value: Any) -> float:
    if not _is_number(value) or not 0 < value < math.inf:
        raise ValueError(f"a number above 0 is wanted, not {_short(value)}")
    return float(value)


def _count(value: Any) -> int:
    if not _is_number(value) or value != int(value) or value < 1:
        raise ValueError(f"a whole number from 1 is wanted, not {_short(value)}")
    return int(value)


def _size(value: Any) -> int | str:
    parse_bytes(value)
    return value  # type: ignore[no-any-return]  # parse_bytes takes int and str


def _hosts(value: Any) -> tuple[str, ...]:
    hosts = _texts(value)
    Allow(list(hosts))
    return hosts


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _short(value: Any) -> str:
    return f"{type(value).__name__} {value!r:.80}"


_CHECKS: dict[str, Callable[[Any], Any]] = {
    "id": _filled,
    "check": _filled,
    "prompt": _text,
    "image": _optional(_filled),
    "template": _optional(_filled),
    "setup": _texts,
    "files": _files,
    "repo": _optional(_filled),
    "base_commit": _optional(_filled),
    "hidden": _files,
    "test_patch": _text,
    "scoring": _scoring,
    "fail_to_pass": _texts,
    "pass_to_pass": _texts,
    "protected": _texts,
    "carry": _folders,
    "workdir": _folder,
    "check_timeout": _seconds,
    "setup_timeout": _seconds,
    "max_steps": _count,
    "cpus": _optional(_cpus),
    "memory": _optional(_size),
    "disk": _optional(_size),
    "pids": _optional(_count),
    "network": _optional(_hosts),
    "setup_network": _optional(_hosts),
    "solution": _text,
}
