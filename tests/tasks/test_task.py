"""The record of a task: JSON both ways, and errors that name the field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sandbox_gym.errors import TaskError
from sandbox_gym.tasks import PROTECTED, Task

FULL = Task(
    id="full",
    prompt="Do it.",
    image="python:3.12",
    setup=("make", "make install"),
    files={"a.txt": "é", "b.bin": b"\xff\x00"},
    hidden={"/tests/run.sh": "exit 0"},
    check="make check",
    scoring="junit",
    fail_to_pass=("a::b",),
    pass_to_pass=("a::c",),
    protected=("src/vendored",),
    carry=("/data",),
    network=("example.org:443",),
    cpus=None,
    memory="2Gi",
    check_timeout=5,
    solution="make it",
)


def test_json_both_ways() -> None:
    record = json.loads(json.dumps(FULL.to_json()))
    assert record["files"] == {"a.txt": "é", "b.bin": {"base64": "/wA="}}
    assert "max_steps" not in record  # at its default
    again = Task.from_json(record)
    assert again == FULL
    assert again.digest == FULL.digest
    assert again.digest != Task.from_json({**record, "check": "true"}).digest


def test_few_fields_are_enough() -> None:
    task = Task.from_json({"id": "a", "setup": "make", "check": "make check"})
    assert (task.setup, task.scoring, task.protected) == (("make",), "exit_code", PROTECTED)
    assert hash(task) == hash(Task.from_json(task.to_json()))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"chek": "x"}, "field 'chek': unknown; did you mean 'check'"),
        ({"check": ""}, "field 'check': it is empty"),
        ({"id": 3}, "field 'id': text is wanted, not int 3"),
        ({"setup": [1]}, "field 'setup'"),
        ({"files": {"../a": ""}}, "field 'files'.*'..'"),
        ({"hidden": {"a": 1}}, "field 'hidden': 'a' holds text"),
        ({"hidden": {"a": {"base64": "?"}}}, "field 'hidden': 'a' has no base64"),
        ({"scoring": "best"}, "field 'scoring': exit_code, json, junit"),
        ({"memory": "lots"}, "field 'memory'.*is no size"),
        ({"check_timeout": -1}, "field 'check_timeout'"),
        ({"max_steps": 0}, "field 'max_steps'"),
        ({"network": ["not a host"]}, "field 'network'"),
        ({"workdir": "/"}, "field 'workdir'"),
        ({"template": "t", "image": "i"}, "field 'template'"),
        ({"repo": "/r"}, "field 'base_commit'"),
        ({"fail_to_pass": ["a"]}, "field 'fail_to_pass'.*junit"),
    ],
)
def test_a_wrong_field_is_named(change: dict[str, Any], said: str) -> None:
    with pytest.raises(TaskError, match=said):
        Task.from_json({"id": "a", "check": "true", **change})


@pytest.mark.parametrize("name", ["id", "check"])
def test_a_missing_field_is_named(name: str) -> None:
    record = {"id": "a", "check": "true"}
    del record[name]
    with pytest.raises(TaskError, match=f"field '{name}': missing"):
        Task.from_json(record)
