"""What policies and disks do to an eval: an error that says so, and never a 0 or a traceback."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from sandbox_gym import evals
from sandbox_gym.errors import SandboxError, TaskError
from sandbox_gym.guest import syscalls
from sandbox_gym.sandbox import Sandbox
from sandbox_gym.tasks import Task, datasets
from tests.evals.test_evals import ONE


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_a_policy_that_ends_its_thread_is_an_error(kind: type[BaseException]) -> None:
    def policy(task: Task, box: Sandbox) -> None:
        raise kind(3)

    summary = evals.evaluate([ONE], policy, k=2)
    assert (summary.errors, summary.pass_at) == (2, {})
    assert f"the policy raised {kind.__name__}: 3" in summary.text()


def test_a_policy_that_goes_to_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    evals.evaluate([ONE], lambda task, box: os.chdir(tmp_path / "elsewhere"), out="found")
    assert {path.name for path in (tmp_path / "found").iterdir()} == {"results.jsonl", "report.html"}


def test_words_that_are_no_text(tmp_path: Path) -> None:
    def policy(task: Task, box: Sandbox) -> None:
        raise ValueError("half a \udce4 character")

    summary = evals.evaluate([ONE], policy, out=tmp_path)
    assert "half a \\udce4 character" in (tmp_path / "report.html").read_text()
    assert summary.errors == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts are root's")
def test_a_full_disk_is_told_and_the_next_run_goes_on(tmp_path: Path) -> None:
    place = tmp_path / "small"
    place.mkdir()
    syscalls.mount("small", str(place), "tmpfs", 0, "size=16k")
    try:
        (place / "filler").write_bytes(bytes(12 << 10))
        long = "x" * 6000

        def policy(task: Task, box: Sandbox) -> None:
            raise ValueError(long)

        with pytest.raises(SandboxError, match=r"can't be written \(No space left.*goes on"):
            evals.evaluate([ONE], policy, k=3, out=place, workers=1)
        assert not (place / "report.part").exists()
        (place / "filler").unlink()
        assert (
            evals.evaluate([ONE], lambda task, box: None, k=1, out=place, name="other", anew=True).errors == 0
        )
    finally:
        syscalls.umount2(str(place))


def test_data_sets_that_are_no_text_or_no_json(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    record = {"id": "a", "check": "true", "prompt": "one\u2028two\x85three"}
    path.write_text(json.dumps(record, ensure_ascii=False) + "\r\n")
    assert datasets.load(path)[0].prompt == record["prompt"]
    path.write_bytes(b'{"id": "\xff"}\n')
    with pytest.raises(TaskError, match=r"tasks\.jsonl: no UTF-8: .* at byte 8"):
        datasets.load(path)
    path.write_text("[" * (sys.getrecursionlimit() * 100))
    with pytest.raises(TaskError, match=r"tasks\.jsonl:1: no JSON"):
        datasets.load(path)


def test_results_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_bytes(b"\xff\xfe\n")
    with pytest.raises(SandboxError, match=r"results\.jsonl:1: no attempt.*delete the line"):
        evals.evaluate([ONE], lambda task, box: None, out=tmp_path)
