"""The runsc that the backend uses: found, refused with what mends it, and installed by a script."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sandbox_gym import doctor
from sandbox_gym.backends.gvisor import runsc
from sandbox_gym.backends.shared import programs
from sandbox_gym.errors import BackendUnavailable

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts/install-runsc.sh"

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="runsc restores sandboxes for root only")


def program(folder: Path, version: str) -> str:
    folder.mkdir(exist_ok=True)
    path = folder / "runsc"
    path.write_text(f"#!/bin/sh\necho runsc version {version}\n")
    path.chmod(0o755)
    return str(path)


def test_the_one_that_is_installed() -> None:
    found = runsc.find()
    said = subprocess.run([found.path, "--version"], capture_output=True, text=True, check=True, timeout=20)
    assert f"runsc version {found.version}\n" in said.stdout


@pytest.mark.parametrize("version", ["0.0~20221219.0", "release-20231231.0", "VERSION_MISSING"])
def test_an_unfit_choice_is_refused(version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = program(tmp_path, version)
    monkeypatch.setenv("SANDBOX_GYM_RUNSC", path)
    with pytest.raises(
        BackendUnavailable, match=re.escape(f"{path} is {version}, and gVisor's runsc of 2024")
    ):
        runsc.find()


@pytest.mark.parametrize("version", ["0.0~20240729.0", "release-20250303.0"])
def test_a_fit_choice_is_taken(version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = program(tmp_path, version)
    monkeypatch.setenv("SANDBOX_GYM_RUNSC", path)
    assert runsc.find() == runsc.Runsc(path, version)


def test_where_there_is_none_the_script_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "_SYSTEM_FOLDERS", ())
    monkeypatch.setenv("PATH", f"{tmp_path}:relative")
    check = doctor._gvisor()
    assert (check.state, check.remedy) == ("missing", str(SCRIPT))
    assert "there is no runsc" in check.meaning
    monkeypatch.setattr(programs, "_SCRIPTS", tmp_path)
    assert doctor._gvisor().remedy.startswith("apt-get install -y runsc")


def test_user_id_0_of_a_user_namespace_is_not_root() -> None:
    code = "from sandbox_gym.backends.gvisor import runsc; print(runsc.look().why)"
    command = ["unshare", "--user", "--map-root-user", sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30, cwd=ROOT)
    assert "for root only" in result.stdout


def test_doctor_tries_it() -> None:
    check = doctor._gvisor()
    assert (check.state, check.remedy) == ("ok", "")
    assert "snapshot and copy in" in check.meaning


def test_doctor_where_it_does_not_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANDBOX_GYM_RUNSC", program(tmp_path, "0.0~20240729.0"))
    check = doctor._gvisor()
    assert check.state == "limited" and "no sandbox could be made" in check.meaning


# ---- the script ----------------------------------------------------------------------------------------------------


def bash(command: str, *arguments: str) -> str:
    """What a line prints that has the script's functions."""
    line = ["bash", "-c", f'source "{SCRIPT}"; {command}', "bash", *arguments]
    return subprocess.run(line, capture_output=True, text=True, check=True, timeout=30).stdout


def test_the_script_does_nothing_where_there_is_one(tmp_path: Path) -> None:
    program(tmp_path, "0.0~20221219.0")
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    result = subprocess.run([SCRIPT], capture_output=True, check=True, timeout=60, env=environment)
    assert (result.stdout, result.stderr) == (b"", b"")


@pytest.mark.parametrize(
    ("version", "fit"),
    [("0.0~20240729.0", True), ("release-20250303.0", True), ("0.0~20221219.0", False), ("x", False)],
)
def test_the_script_tells_fit_from_unfit(version: str, fit: bool, tmp_path: Path) -> None:
    path = program(tmp_path, version)
    assert bash('is_fit "$1" && echo fit || echo unfit', path) == ("fit\n" if fit else "unfit\n")


ENTRIES = {
    "a.list": """\
# a comment
deb [ arch=amd64 ] file:ARCHIVE bookworm main contrib
""",
    "a.sources": """\
Types: deb deb-src
# a comment
URIs: file:ARCHIVE
Suites: bookworm
Components: main
Architectures: amd64
Signed-By: /key
""",
}


@pytest.mark.parametrize(
    ("name", "line", "kind", "printed"),
    [
        ("a.list", 2, "deb", "deb [ arch=amd64 ] file:ARCHIVE trixie main"),
        ("a.list", 2, "deb-src", "deb-src [ arch=amd64 ] file:ARCHIVE trixie main"),
        (
            *("a.sources", 1, "deb"),
            "Types: deb\nSuites: trixie\nComponents: main\nURIs: file:ARCHIVE\nArchitectures: amd64\nSigned-By: /key",
        ),
        (
            *("a.sources", 1, "deb-src"),  # which are of no architecture
            "Types: deb-src\nSuites: trixie\nComponents: main\nURIs: file:ARCHIVE\nSigned-By: /key",
        ),
    ],
)
def test_the_newer_suite_of_the_same_archive(
    name: str, line: int, kind: str, printed: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(ENTRIES[name])
    assert bash('entry_of "$1" trixie "$2"', f"{tmp_path / name}:{line}", kind) == f"{printed}\n"
