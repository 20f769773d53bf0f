"""Data sets of tasks: a JSONL file, a folder, or rows in memory; ours, SWE-bench's, terminal-bench's."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from sandbox_gym.errors import TaskError
from sandbox_gym.tasks import swebench, terminalbench
from sandbox_gym.tasks.task import Task
from sandbox_gym.tasks.terminalbench import read_tree

Source = str | PathLike[str] | Mapping[str, Any] | Task | Iterable[Any]


def load(source: Source, *, repos: str | PathLike[str] | None = None) -> list[Task]:
    """The tasks of

    - a `.jsonl` file: a record a line; or a `.json` file with a record, or a list of them;
    - a folder of terminal-bench's (with a `task.yaml`), or of ours: `task.json`, and in `files/` and `hidden/` the
      files of these fields; or a folder of such folders and of files as above, in the order of their names, but for
      `*.solutions.jsonl`, which the generator of RepoRepair's tasks puts beside them;
    - a row (a mapping), or an iterable of rows, such as a data set of Hugging Face's.

    A row of SWE-bench's is known by its fields; `repos` is a folder with its repositories, each `owner/name`,
    `owner__name` or `name` (or with `.git`).

    Raises TaskError for the first record that is wrong, with its file, line and field; OSError.
    """
    tasks = _load(source, None if repos is None else Path(repos))
    seen: set[str] = set()
    for task in tasks:
        if task.id in seen:
            raise TaskError(f"field 'id': {task.id!r} is there twice")
        seen.add(task.id)
    return tasks


def _load(source: Source, repos: Path | None) -> list[Task]:
    if isinstance(source, Task):
        return [source]
    if isinstance(source, Mapping):
        return [_row(source, "row", repos)]
    if isinstance(source, (str, PathLike)):
        return _path(Path(fspath(source)), repos)
    return [row if isinstance(row, Task) else _row(row, f"row {i}", repos) for i, row in enumerate(source)]


def _path(path: Path, repos: Path | None) -> list[Task]:
    if not path.exists():
        raise FileNotFoundError(f"{path}: there is no such data set")
    if path.is_dir():
        return _folder(path, repos)
    if path.suffix == ".jsonl":
        lines = enumerate(_text(path).split("\n"), 1)  # no other sign ends a line of JSON
        return [_row(_parse(line, f"{path}:{i}"), f"{path}:{i}", repos) for i, line in lines if line.strip()]
    if path.suffix == ".json":
        value = _parse(_text(path), str(path))
        if not isinstance(value, list):
            return [_row(value, str(path), repos)]
        return [_row(row, f"{path}: record {i}", repos) for i, row in enumerate(value)]
    raise TaskError(f"{path}: a data set is a folder, or a file that ends with .jsonl or .json")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TaskError(f"{path}: no UTF-8: {error.reason} at byte {error.start}") from None


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TaskError(f"{where}: no JSON: {error}") from None


def _row(row: Any, where: str, repos: Path | None) -> Task:
    if not isinstance(row, Mapping):
        raise TaskError(f"{where}: a record is an object, not {type(row).__name__}")
    try:
        return swebench.task(row, repos) if swebench.is_row(row) else Task.from_json(row)
    except TaskError as error:
        raise TaskError(f"{where}: {error}") from None


# ---- folders -----------------------------------------------------------------------------------------------------


def _folder(path: Path, repos: Path | None) -> list[Task]:
    if (path / "task.yaml").is_file():
        return [terminalbench.task(path)]
    if (path / "task.json").is_file():
        return [_own(path, repos)]
    found: list[Task] = []
    for entry in sorted(path.iterdir()):
        if entry.name.endswith(".solutions.jsonl"):
            continue  # they are no tasks, and lie where the tasks are
        if entry.suffix in (".json", ".jsonl") or (
            entry.is_dir() and any((entry / name).is_file() for name in ("task.json", "task.yaml"))
        ):
            found += _path(entry, repos)
    if not found:
        raise TaskError(f"{path}: there is no task in it: no task.json, task.yaml, *.json or *.jsonl")
    return found


def _own(path: Path, repos: Path | None) -> Task:
    where = path / "task.json"
    record = _parse(_text(where), str(where))
    if isinstance(record, dict):
        record.setdefault("id", path.name)
        for name in ("files", "hidden"):
            if (path / name).is_dir():
                record[name] = {**record.get(name, {}), **read_tree(path / name)}
    return _row(record, str(where), repos)
