"""Folders of terminal-bench's, as they are: task.yaml, run-tests.sh, tests/, and a Dockerfile or plain files."""

from __future__ import annotations

import posixpath
from pathlib import Path
from typing import Any

from sandbox_gym.errors import TaskError
from sandbox_gym.tasks.task import Content, Task

_WORKDIR = "/app"
_TESTS = "/tests"
_NOT_GIVEN = (
    "task.yaml",
    "run-tests.sh",
    "solution.sh",
    "solution.yaml",
    "tests",
    "docker-compose.yaml",
    "Dockerfile",
)
_MAX_STEPS = 100


def task(folder: Path) -> Task:
    """The task of a folder. With a Dockerfile its image is what docker builds of that; else the sandbox is this host's
    Python environment, with the folder's other files in /app. The tests come to /tests, and run from the image's last
    WORKDIR, or /app.

    Raises TaskError.
    """
    where = folder / "task.yaml"
    record = _yaml(where)
    prompt = record.get("instruction")
    if not isinstance(prompt, str) or not prompt.strip():
        raise TaskError(f"{where}: field 'instruction': text is wanted")
    runner = folder / "run-tests.sh"
    if not runner.is_file():
        raise TaskError(f"{runner}: it is missing, and runs the tests")
    hidden: dict[str, Content] = {f"{_TESTS}/run-tests.sh": runner.read_text()}
    if (folder / "tests").is_dir():
        hidden |= {f"{_TESTS}/{path}": data for path, data in read_tree(folder / "tests").items()}
    docker = folder / "Dockerfile"
    given = {} if docker.is_file() else read_tree(folder)
    solution = folder / "solution.sh"
    try:
        return Task(
            id=folder.name,
            prompt=prompt,
            image=str(docker) if docker.is_file() else None,
            workdir=_workdir(docker) if docker.is_file() else _WORKDIR,
            files={path: data for path, data in given.items() if path.partition("/")[0] not in _NOT_GIVEN},
            hidden=hidden,
            check=f"TEST_DIR={_TESTS} bash {_TESTS}/run-tests.sh",
            check_timeout=_seconds(record, "max_test_timeout_sec", 180.0),
            max_steps=_MAX_STEPS,
            protected=(),
            solution=solution.read_text() if solution.is_file() else "",
        )
    except TaskError as error:
        raise TaskError(f"{where}: {error}") from None


def _workdir(dockerfile: Path) -> str:
    """What its last stage's WORKDIR lines come to. Raises TaskError where that depends on how it is built."""
    place = ""
    for line in dockerfile.read_text().splitlines():
        word, _, rest = line.strip().partition(" ")
        if word.upper() == "FROM":
            place = ""
        elif word.upper() == "WORKDIR":
            place = posixpath.normpath(posixpath.join(place or "/", rest.strip().strip("\"'")))
    if "$" in place:
        raise TaskError(
            f"{dockerfile}: WORKDIR {place!r} holds a variable: write the folder that it stands for"
        )
    return place or _WORKDIR


def read_tree(folder: Path) -> dict[str, Content]:
    """The files below a folder of the host, by their paths from it. Links are read as what they lead to."""
    files: dict[str, Content] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            data = path.read_bytes()
            try:
                files[str(path.relative_to(folder))] = data.decode()
            except UnicodeDecodeError:
                files[str(path.relative_to(folder))] = data
    return files


def _seconds(record: dict[str, Any], name: str, default: float) -> Any:
    value = record.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TaskError(f"field {name!r}: seconds are wanted, not {value!r:.80}")
    return value


def _yaml(path: Path) -> dict[str, Any]:
    try:
        import yaml
    except ModuleNotFoundError:
        raise TaskError(f"{path}: reading it needs PyYAML: pip install 'sandbox-gym[tasks]'") from None
    try:
        record = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise TaskError(f"{path}: no YAML: {error}") from None
    if not isinstance(record, dict):
        raise TaskError(f"{path}: an object is wanted at its top")
    return record
