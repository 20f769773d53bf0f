"""`sandbox-gym audit` and `sandbox-gym tree`: what they print, of what, and that it harms no terminal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from sandbox_gym import _audit
from sandbox_gym._tree import picture
from sandbox_gym.audit import steps
from sandbox_gym.cli import main
from sandbox_gym.env import SandboxEnv
from sandbox_gym.sandbox import Sandbox


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert _audit._log is not None
    _audit._log.flush()
    assert main(["audit", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def test_a_table(log: Path, box: Sandbox, capsys: pytest.CaptureFixture[str]) -> None:
    box.shell("false")
    box.run_code("6 * 7")
    box.shell("echo '\x1b[2J' \n" + "long" * 100)
    head, *_, failed, cell, escape = run(capsys, str(log))
    assert head.split() == ["TIME", "SANDBOX", "KIND", "WHAT", "RESULT", "SECONDS"]
    assert failed.split()[2:7] == [box.id, "shell", "false", "exit", "1"]
    assert "6 * 7" in cell and " 42 " in cell
    assert "echo '\\x1b[2J' \\nlong" in escape and "\x1b" not in escape and len(escape) < 250
    assert float(cell.split()[-1]) < 10
    assert run(capsys)[0] == head  # the log that is being written


def test_json_of_one_sandbox(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Sandbox.create(name="one") as one, Sandbox.create(name="two") as two:
        one.shell("echo one")
        two.shell("echo two")
    rows = [json.loads(line) for line in run(capsys, "--json", "--sandbox", "one")]
    assert [row["kind"] for row in rows] == ["create", "shell", "end"]
    assert rows[1]["text"] == "echo one" and rows[1]["result"]["exit_code"] == 0
    assert rows[1]["client"].endswith(f":{os.getpid()}")
    assert len(run(capsys, "--json")) == 6


def test_steps_of_environments_are_counted(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with closing(SandboxEnv("CartPole-v1")) as env:
        env.reset(seed=0)
        here = env.sandbox.id
        assert "STEPS" not in "".join(run(capsys))
        env.step(0)
        env.step(1)
        (branch,) = env.branch(actions=[1])
        there = branch.env.sandbox.id
        branch.env.close()
    *_, blank, head, first, second = run(capsys)
    assert (blank, head.split()) == ("", ["SANDBOX", "STEPS"])
    assert {tuple(first.split()), tuple(second.split())} == {(here, "2"), (there, "1")}
    assert run(capsys, "--sandbox", there)[-1].split() == [there, "1"]
    assert steps(log, sandbox=here) == {here: 2}


def test_what_it_cannot_show(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, log: Path
) -> None:
    assert main(["audit", "--sandbox", "nobody"]) == 1
    assert "no sandbox 'nobody'" in capsys.readouterr().err
    assert main(["audit", str(tmp_path / "missing")]) == 1
    assert "no audit log" in capsys.readouterr().err
    assert main(["audit"]) == 0
    assert capsys.readouterr().out == "Nothing was recorded.\n"
    monkeypatch.delenv(_audit.VARIABLE)
    assert main(["audit"]) == 2
    assert _audit.VARIABLE in capsys.readouterr().err
    monkeypatch.undo()


def test_the_tree_shows_who_came_from_whom(capsys: pytest.CaptureFixture[str]) -> None:
    made: list[Sandbox] = []
    with ExitStack() as stack:
        trunk = stack.enter_context(Sandbox.create(name="trunk"))
        made += [trunk, *trunk.fork(2, prefix="tree-")]
        made += made[1].fork(1, prefix="leaf-")
        kept = trunk.checkpoint()
        written = trunk.snapshot(engine="criu")
        made += [Sandbox.restore(kept, "of-kept"), Sandbox.restore(written, "of-written")]
        for box in made:
            stack.enter_context(box)
        trunk.rewind()  # which does not make it a child of its own
        made[1].rewind(kept)
        depths = {box.name: _depth(box.id, capsys) for box in made}
        assert depths == {"trunk": 0, "tree-1": 2, "tree-2": 1, "leaf-1": 3, "of-kept": 2, "of-written": 2}
        kept._backend.put_on_disk(kept.id, timeout=60)
        assert (_depth(kept.id, capsys), _depth(written.id, capsys)) == (1, 1)
        written.delete()
        trunk.terminate()
        assert (_depth(made[2].id, capsys), _depth(made[3].id, capsys)) == (0, 1)
    assert main(["tree"]) == 0
    assert "tree-1" not in capsys.readouterr().out


def _depth(id: str, capsys: pytest.CaptureFixture[str]) -> int:
    assert main(["tree"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if f"─ {id}" in line]
    return line.index(id) // 3 - 1


def test_the_tree_of_other_clients_live() -> None:
    command = [sys.executable, "-m", "sandbox_gym", "tree", "--watch"]
    with Sandbox.create(name="first"):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert process.stdout is not None
        _read_until(process, "first")
        with Sandbox.create(name="second"):
            _read_until(process, "second")
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
        assert process.returncode == 0 and errors == ""


def _read_until(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return
    raise AssertionError(f"it ended without {text!r}")


def test_pictures_of_rows() -> None:
    def row(id: str, parent: str | None, **more: object) -> dict[str, object]:
        facts = {
            "id": id,
            "name": id,
            "parent": None,
            "branched_from": parent,
            "state": "running",
            "age": 5.0,
            "memory_bytes": 2048,
        }
        return {**facts, "owner_pid": 7, **more}

    assert picture([]) == "No sandboxes are live."
    rows = [row("a", None, age=9.0), row("b", "a", name="bee"), row("c", "a", age=1.0), row("d", "gone")]
    assert picture(rows).splitlines() == [
        "client 7",
        "├─ a  running  9 s  2.0 KiB",
        "│  ├─ b bee  running  5 s  2.0 KiB",
        "│  └─ c  running  1 s  2.0 KiB",
        "└─ d  running  5 s  2.0 KiB  from gone",
    ]
    # Another user may have made them up: in a circle, or deeper than a terminal is wide.
    assert len(picture([row("x", "y"), row("y", "x"), row("z", "z")]).splitlines()) == 4
    deep = [row("0", None), *(row(str(n), str(n - 1)) for n in range(1, 2000))]
    assert len(picture(deep).splitlines()) < 250
