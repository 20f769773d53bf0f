"""The other commands: `ls`, `gc`, and what is no command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import sandbox_gym
from sandbox_gym._table import size, span, table
from sandbox_gym.backends.shared import registry
from sandbox_gym.cli import main
from sandbox_gym.sandbox import Sandbox


def test_ls_shows_what_lives(capsys: pytest.CaptureFixture[str]) -> None:
    with Sandbox.create(name="shown-by-ls") as box:
        (copy,) = box.fork(1)
        with copy:
            assert main(["ls"]) == 0
            head, *lines = capsys.readouterr().out.splitlines()
            assert head.split() == ["ID", "NAME", "STATE", "AGE", "FROM", "MEMORY", "CLIENT"]
            rows = {line.split()[0]: line for line in lines}
            assert "shown-by-ls" in rows[box.id]
            assert "running" in rows[copy.id]
            assert copy.parent is not None
            assert copy.parent.id in rows[copy.id].split()[1:]
    main(["ls"])
    assert "shown-by-ls" not in capsys.readouterr().out


def test_gc_removes_what_the_dead_left_only(capsys: pytest.CaptureFixture[str]) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    with Sandbox.create() as box:
        left = registry.make_folder()
        registry.write(left, owner_pid=ended.pid, owner_start=1)
        assert main(["gc", "--dry-run"]) == 0
        assert f"would remove {left}" in capsys.readouterr().out
        assert left.exists()
        assert main(["gc"]) == 0
        assert f"removed {left}" in capsys.readouterr().out
        assert not left.exists()
        assert box.run_code("1").value == "1"
        assert main(["gc"]) == 0
        assert str(left) not in capsys.readouterr().out


def test_demo_without_its_packages(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(sandbox_gym, "demo", raising=False)
    monkeypatch.setitem(sys.modules, "sandbox_gym.demo", None)
    assert main(["demo"]) == 1
    assert "pip install 'sandbox-gym[demo]'" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["nothing"], ["ls", "--nothing"], ["gc", "left"]])
def test_what_is_no_command(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert "usage: sandbox-gym" in capsys.readouterr().err


def test_both_ways_to_call_it() -> None:
    expected = f"sandbox-gym {sandbox_gym.__version__}\n"
    script = Path(sys.executable).with_name("sandbox-gym")
    for command in ([str(script)], [sys.executable, "-m", "sandbox_gym"]):
        assert (
            subprocess.run([*command, "--version"], check=True, capture_output=True, text=True).stdout
            == expected
        )


def test_a_reader_that_stops_early_is_no_error() -> None:
    script = "from sandbox_gym import cli; cli.table = lambda *a, **k: 'x' * 10**6; cli.main(['ls'])"
    with Sandbox.create():
        process = subprocess.Popen(
            [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
        process.stderr.close()
        process.wait()


def test_table() -> None:
    text = table(("name", "n"), [("a", "1"), ("long name", "100")], right=(1,))
    assert text == "name         n\na            1\nlong name  100"
    assert table(("only", "a head"), []) == "only  a head"


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536 * 1024, "1.5 MiB"),
        (5 << 30, "5.0 GiB"),
        (3 << 40, "3.0 TiB"),
    ],
)
def test_size(count: int, text: str) -> None:
    assert size(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.2, "0 s"),
        (119, "119 s"),
        (120, "2 min"),
        (7199, "120 min"),
        (7200, "2 h"),
        (48 * 3600, "2 d"),
        (10**6, "12 d"),
    ],
)
def test_span(seconds: float, text: str) -> None:
    assert span(seconds) == text


def test_rows_have_what_ls_shows() -> None:
    with Sandbox.create() as box:
        row = next(row for row in registry.list_all() if row["id"] == box.id)
        json.dumps(row)
        assert {"id", "name", "state", "age", "parent", "memory_bytes", "pid", "owner_pid"} <= set(row)


def test_a_row_that_another_user_made_up_harms_no_terminal() -> None:
    row = {
        "id": "\x1b[2J",
        "name": "é" * 500,
        "state": "running",
        "parent": None,
        "age": 1,
        "memory_bytes": 2,
        "pid": 3,
        "more": "dropped",
    }
    plain = registry._plain_row(row, 7)
    assert plain["id"] == "\\x1b[2J" and plain["name"].isascii() and len(plain["name"]) <= 80
    assert "more" not in plain and plain["owner_pid"] == 7
    with pytest.raises((ValueError, TypeError)):
        registry._plain_row({**row, "age": "old"}, 7)
