"""What an agent has changed, out of its sandbox and into the one of the check. The agent's sandbox may lie."""

from __future__ import annotations

import posixpath
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from sandbox_gym.api import FileInfo
from sandbox_gym.errors import LimitExceeded, ProtocolError, SandboxTimeout
from sandbox_gym.sandbox import Sandbox
from sandbox_gym.tasks.task import Task

MAX_BYTES = 512 << 20
MAX_FILES = 20_000
MAX_ENTRIES = 200_000
MAX_SECONDS = 60.0  # for all that is read of one workspace
_LEAST_SECONDS = 5.0  # that one call gets: the sandbox does not outlive a call that is cut short
_BATCH = 200  # paths of one command line
_NEVER = ("*.pyc", "__pycache__", "sitecustomize.py", "usercustomize.py", "*.pth", ".pytest_cache")
_PLUGINS = ("*.egg-info", "*.dist-info", "*.egg-link")  # name plugins that pytest loads unasked
_SCRIPTS = {
    "",
    ".py",
    ".sh",
    ".bats",
    ".ini",
    ".cfg",
    ".toml",
    ".js",
    ".mjs",
    ".cjs",
    ".ts",
    ".rb",
    ".pl",
    ".php",
    ".lua",
}
_PROGRAMS = _SCRIPTS | {".go", ".rs", ".java", ".c", ".cc", ".cpp", ".h", ".hpp", ".mk"}

Listing = Mapping[str, FileInfo]


@dataclass
class Changes:
    """Absolute paths. `files`: content and mode; `links`: their targets; `left_out`: what does not count, and why."""

    files: dict[str, tuple[bytes, int]] = field(default_factory=dict)
    folders: list[str] = field(default_factory=list)
    links: dict[str, str] = field(default_factory=dict)
    deleted: list[FileInfo] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    def paths(self) -> tuple[str, ...]:
        """All that changes, at most the first thousand."""
        return tuple(sorted({*self.files, *self.links, *(info.path for info in self.deleted)})[:1000])


def listing(
    box: Sandbox, roots: Iterable[str], seconds: Callable[[], float] = lambda: 60.0
) -> dict[str, FileInfo]:
    """All below the roots that are there; `seconds`: what a call may take.

    Raises ProtocolError for a path that does not lie below its root.
    """
    found: dict[str, FileInfo] = {}
    for root in roots:
        try:
            entries = box.list_files(root, recursive=True, max_entries=MAX_ENTRIES, timeout=seconds())
        except (FileNotFoundError, NotADirectoryError):
            continue
        for info in entries:
            if posixpath.normpath(info.path) != info.path or not info.path.startswith(f"{root}/"):
                raise ProtocolError(f"sandbox {box.name} lists {info.path[:200]!r} below {root}")
            found[info.path] = info
    return found


class _Clock:
    """What is left of a deadline, for one call after the other: a sandbox that lies may answer each of them late."""

    def __init__(self) -> None:
        self._until = time.monotonic() + MAX_SECONDS

    def left(self) -> float:
        """Seconds. Raises SandboxTimeout past the deadline."""
        left = self._until - time.monotonic()
        if left <= 0:
            raise SandboxTimeout(f"it took longer than {MAX_SECONDS:g} s")
        return max(left, _LEAST_SECONDS)


def collect(box: Sandbox, task: Task, before: Listing) -> Changes:
    """What differs from `before` by kind, size, mode or time of change. What vanishes meanwhile is not there.

    Raises LimitExceeded for more than is carried; SandboxTimeout when it takes longer than `MAX_SECONDS`;
    ProtocolError, OSError and so on for a sandbox that lies.
    """
    clock = _Clock()
    after = listing(box, task.roots, clock.left)
    changes = Changes()
    fence = _Fence(task, before)
    for path in _take_new(box, task, before, after, fence, clock, changes):
        del after[path]
    _take_deleted(before, after, fence, changes)
    return changes


def _take_new(
    box: Sandbox, task: Task, before: Listing, after: Listing, fence: _Fence, clock: _Clock, changes: Changes
) -> list[str]:
    """Takes what is new or changed; returns the files that had gone when they were to be read."""
    total = count = 0
    vanished: list[str] = []
    for path, info in after.items():
        old = before.get(path)
        if old is not None and _same(old, info):
            continue
        why = fence.why_not(path, info)
        if why:
            if info.kind != "dir":
                changes.left_out[path] = why
            continue
        count += 1
        if count > MAX_FILES:
            raise LimitExceeded(f"more than {MAX_FILES} files were changed")
        if info.kind == "dir":
            changes.folders.append(path)
        elif info.kind == "link":
            _take_link(task, info, changes)
        else:
            try:
                data = box.read_file(path, max_bytes=MAX_BYTES - total, timeout=clock.left())
            except (
                FileNotFoundError,
                NotADirectoryError,
                IsADirectoryError,
            ):  # its place may be another's by now
                vanished.append(path)
                continue
            total += len(data)
            changes.files[path] = data, info.mode & 0o777
    return vanished


def _take_deleted(before: Listing, after: Listing, fence: _Fence, changes: Changes) -> None:
    """A folder that has gone takes all with it that was in it, compiled Python too; unless some of it is protected."""
    gone = {
        path: info
        for path, info in before.items()
        if (path not in after or after[path].kind != info.kind) and path not in changes.left_out
    }
    whys = {path: fence.why_not(path, info) for path, info in gone.items()}
    whole = {
        path for path, info in gone.items() if info.kind == "dir" and not whys[path] and not fence.keeps(path)
    }
    for path, info in gone.items():
        if whys[path] and not any(above in whole for above in _above(path)):
            changes.left_out[path] = whys[path]
        else:
            changes.deleted.append(info)


def _same(old: FileInfo, new: FileInfo) -> bool:
    if old.kind != new.kind:
        return False
    return new.kind == "dir" or old == new


def _take_link(task: Task, info: FileInfo, changes: Changes) -> None:
    path = info.path
    root = next(root for root in task.roots if path.startswith(f"{root}/"))
    place = posixpath.normpath(posixpath.join(posixpath.dirname(path), info.target))
    if not info.target or "\0" in info.target or not (place == root or place.startswith(f"{root}/")):
        changes.left_out[path] = "a link that leads out of the workspace"
    else:
        changes.links[path] = posixpath.relpath(place, posixpath.dirname(path))


class _Fence:
    """Which paths an agent's changes do not reach."""

    def __init__(self, task: Task, before: Listing) -> None:
        self._task = task
        self._hidden = {task.path(path) for path in task.hidden} | set(patched(task))
        self._kept = {
            above
            for path in (*self._hidden, *(path for path in before if self._is_protected(path)))
            for above in _above(path)
        }

    def why_not(self, path: str, info: FileInfo) -> str:
        """The reason; "" when it may be changed."""
        parts = self._parts(path)
        if any(fnmatchcase(part, pattern) for part in parts for pattern in (*_NEVER, *_PLUGINS)):
            return "steers or replaces what Python loads"
        if path in self._hidden or any(above in self._hidden for above in _above(path)):
            return "a file of the check has this place"
        if self._is_protected(path):
            return "protected"
        if info.kind != "dir" and path in self._kept:
            return "protected files lie below"
        return "neither a file, a folder nor a link" if info.kind == "other" else ""

    def keeps(self, folder: str) -> bool:
        """Whether files that an agent does not reach lie below it."""
        return folder in self._kept

    def _parts(self, path: str) -> list[str]:
        root = next(root for root in self._task.roots if path.startswith(f"{root}/"))
        return path.removeprefix(f"{root}/").split("/")

    def _is_protected(self, path: str) -> bool:
        parts = self._parts(path)
        below = ["/".join(parts[: i + 1]) for i in range(len(parts))]
        for pattern in self._task.protected:
            wanted = pattern.strip("/").removesuffix("/**")
            if any(fnmatchcase(name, wanted) for name in (below if "/" in wanted else parts)):
                return True
        return False


def programs(task: Task, before: Listing) -> list[str]:
    """The protected files that a check may run or read its settings from: nothing writes to those while it runs."""
    fence = _Fence(task, before)
    files = [path for path, info in before.items() if info.kind == "file" and is_program(path)]
    git = f"{task.workdir}/.git/"
    return [path for path in files if not path.startswith(git) and fence.why_not(path, before[path])]


def is_program(path: str) -> bool:
    """By its ending: data of a test's, which the test may well write to, is none."""
    return posixpath.splitext(path)[1] in _PROGRAMS


def _above(path: str) -> Iterator[str]:
    while (path := posixpath.dirname(path)) != "/":
        yield path


def patched(task: Task) -> list[str]:
    """The files that the task's test patch makes or changes."""
    found = []
    for line in task.test_patch.splitlines():
        if line.startswith(("+++ b/", "--- a/")):
            found.append(task.path(line[6:].split("\t")[0].strip()))
    return found


def apply(box: Sandbox, changes: Changes) -> None:
    """Makes them in the check's sandbox. Raises OSError: a full disk, say."""
    gone = sorted((info for info in changes.deleted), key=lambda info: info.path, reverse=True)
    _run(box, ["rm", "-f", "--"], [info.path for info in gone if info.kind != "dir"])
    # Folders go when they are empty: a protected file keeps its own.
    _run(
        box, ["rmdir", "--ignore-fail-on-non-empty", "--"], [info.path for info in gone if info.kind == "dir"]
    )
    _run(box, ["mkdir", "-p", "--"], changes.folders)
    for path, (data, mode) in changes.files.items():
        box.write_file(path, data, mode=mode)
    for path, target in changes.links.items():
        _run(box, ["ln", "-sfn", "--", target], [path])


def _run(box: Sandbox, command: list[str], paths: list[str]) -> None:
    for start in range(0, len(paths), _BATCH):
        result = box.exec([*command, *paths[start : start + _BATCH]], 60.0)
        if not result.ok:
            raise OSError(f"{command[0]}: {result.stderr[:500]}")
