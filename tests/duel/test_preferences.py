"""Preferences on disk, and what is learnt of them."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import sandbox_gym
from sandbox_gym.duel import Duel, append, fit, load

ROOT = Path(sandbox_gym.__file__).parent.parent
DUEL = Duel("so far é", "a\nb", "c", {"seed": 3})


def test_what_is_stored_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "chosen.jsonl"
    made = [append(path, DUEL, choice) for choice in ("a", "b", "tie")]
    assert load(path) == made
    assert len(path.read_text().splitlines()) == 3
    assert set(json.loads(path.read_text().splitlines()[0])) == {
        "prefix",
        "a",
        "b",
        "choice",
        "time",
        "about",
    }
    with pytest.raises(ValueError, match="one of a, b, tie"):
        append(path, DUEL, "c")


def test_what_a_killed_process_left_is_no_preference(tmp_path: Path) -> None:
    path = tmp_path / "chosen.jsonl"
    first = append(path, DUEL, "a")
    with path.open("ab") as file:
        file.write(b'{"prefix": "half of' + b"x" * 10_000)
    assert load(path) == [first]
    second = append(path, DUEL, "b")
    assert load(path) == [first, second]
    path.write_bytes(b"torn")
    assert load(path) == []
    assert load(path) == [append(path, DUEL, "a")][1:]
    assert len(load(path)) == 1


def test_a_full_disk_leaves_no_half_line(tmp_path: Path) -> None:
    path = tmp_path / "chosen.jsonl"
    first = append(path, DUEL, "a")
    size = path.stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, before[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            append(path, DUEL, "b")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.stat().st_size == size
    assert load(path) == [first]


def test_processes_at_once_do_not_mix_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "chosen.jsonl"
    code = "import os, sys; from sandbox_gym.duel import Duel, append\n"
    code += "for _ in range(20): append(sys.argv[1], Duel('x' * 9000, str(os.getpid()), ''), 'a')"
    workers = [subprocess.Popen([sys.executable, "-c", code, str(path)], cwd=ROOT) for _ in range(3)]
    assert [worker.wait(60) for worker in workers] == [0, 0, 0]
    found = load(path)
    assert sorted({p.a for p in found}) == sorted(str(worker.pid) for worker in workers)
    assert len(found) == 60


@pytest.mark.parametrize("line", ["no json", "[]", '{"prefix": ""}', '{"choice": "c"}'])
def test_other_lines_are_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "chosen.jsonl"
    append(path, DUEL, "a")
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match="line 2"):
        load(path)


def test_weights_are_found_again() -> None:
    rng = np.random.default_rng(0)
    weights = np.array([2.0, -1.0, 0.0])
    a, b = rng.normal(size=(2, 4000, 3))
    chance = 1 / (1 + np.exp(-(a - b) @ weights))
    choices = np.where(rng.random(4000) < chance, "a", "b").tolist()
    found = fit(a, b, choices)
    assert np.abs(found - weights).max() < 0.2
    assert np.allclose(fit(b, a, ["b" if choice == "a" else "a" for choice in choices]), found)
    assert np.abs(fit(a, b, ["tie"] * 4000)).max() < 1e-6
    assert np.isfinite(fit(a[:2], b[:2], ["a", "a"])).all()  # separable: the ridge holds it
    with pytest.raises(ValueError, match="choices n"):
        fit(a, b, ["a"])
