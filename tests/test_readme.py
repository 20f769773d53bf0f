"""The README's words are run: its Python, its commands, its links; and what docs/architecture.md names is there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
DOCUMENTS = [
    "README.md",
    "SECURITY.md",
    *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))),
]


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def commands(text: str) -> list[str]:
    lines = [line for block in blocks("sh", text) for line in block.splitlines()]
    return [line.partition("#")[0].strip() for line in lines if line.strip()]


# Ray is in an environment of its own: tests/ray/test_documents.py runs what needs it.
PLAIN = [code for code in blocks("python") if "sandbox_gym.r" not in code]
COMMANDS = commands(README)


@pytest.mark.parametrize("code", PLAIN, ids=lambda code: code.splitlines()[-1])
def test_python(code: str, tmp_path: Path) -> None:
    run(code, tmp_path, "-W", "error")


def run(code: str, folder: Path, *options: str) -> None:
    """A block runs by itself, and prints what the comments beside its prints say. Templates go to a folder apart."""
    expected = re.findall(r"^ *print\(.*\)  # (.*)$", code, re.MULTILINE)
    assert len(expected) == code.count("print(") > 0
    (folder / "block.py").write_text(code)  # a file: what a job's function is made of is looked up in it
    result = subprocess.run(
        [sys.executable, *options, "block.py"],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={**os.environ, "SANDBOX_GYM_HOME": str(folder)},
    )
    assert result.returncode == 0, result.stderr
    assert [line for line in result.stdout.splitlines() if line] == expected


def test_two_commands_to_begin() -> None:
    assert COMMANDS[:2] == ["make demo", "make test"]
    assert COMMANDS[1] in (ROOT / ".ci/run").read_text().splitlines()


@pytest.mark.parametrize("command", COMMANDS)
def test_command(command: str) -> None:
    """make's are looked up only, since one of them runs this test; those of sandbox-gym are run."""
    program, *arguments = command.split()
    if program == "make":
        result = subprocess.run(
            ["make", "-n", *arguments], capture_output=True, text=True, check=False, cwd=ROOT
        )
        assert "scripts/setup.sh" in result.stdout, "a fresh machine needs its set-up first"
    else:
        assert program == "sandbox-gym"
        script = Path(sys.executable).with_name(program)
        result = subprocess.run([script, *arguments], capture_output=True, text=True, check=False)
        assert result.stdout
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_and_files_exist(document: str) -> None:
    text = (ROOT / document).read_text()
    links = re.findall(r"\]\((?!https?:)([^)#]+)", text)
    assert [link for link in links if not (ROOT / document).parent.joinpath(link).exists()] == []
    files = re.findall(r"`([\w./-]+/[\w.-]+\.(?:py|md|sh))`", text)
    assert [file for file in files if not (ROOT / file).exists()] == []


def test_the_architecture_fits_a_screen() -> None:
    assert len((ROOT / "docs/architecture.md").read_text().splitlines()) <= 60
