"""The criu that the CRIU engine uses: found, refused with what mends it, and installed by a script."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox_gym import doctor
from sandbox_gym.backends.native import criu
from sandbox_gym.backends.shared import programs
from sandbox_gym.errors import BackendUnavailable

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts/install-criu.sh"

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="criu is root's")


@pytest.fixture(autouse=True)
def looked_up_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("SANDBOX_GYM_CRIU", raising=False)
    criu.find.cache_clear()
    yield
    criu.find.cache_clear()


def program(folder: Path, script: str) -> str:
    """One that is refused by what it prints."""
    folder.mkdir(exist_ok=True)
    path = folder / "criu"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


# ---- the lookup ----------------------------------------------------------------------------------------------------


@as_root
def test_the_one_that_is_installed() -> None:
    found = criu.find()
    said = subprocess.run([found.path, "--version"], capture_output=True, text=True, check=True, timeout=10)
    assert f"Version: {'.'.join(map(str, found.version))}" in said.stdout
    assert found.mended == ("-sandbox-gym\n" in said.stdout)
    assert found.version >= (4, 1)
    assert criu.find() is found


@as_root
def test_system_folders_are_looked_in_after_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = criu.find()
    criu.find.cache_clear()
    program(tmp_path / "old", "echo Version: 3.17.1")
    monkeypatch.setenv("PATH", f"{tmp_path}/none:{tmp_path}/old")
    assert criu.find().version == installed.version


@as_root
def test_the_environment_chooses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "my criu"
    path.symlink_to(criu.find().path)
    monkeypatch.setenv("SANDBOX_GYM_CRIU", str(path))
    criu.find.cache_clear()
    assert criu.find().path == str(path)


@as_root
@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo Version: 3.17.1", "is 3.17.1"),
        ("echo Version: 4.0", "is 4.0"),
        ("echo Version: none", "does not tell its version"),
        ("echo Version: 4.1; exit 1", "does not tell its version"),
    ],
)
def test_an_unfit_choice_is_refused(
    script: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = program(tmp_path, script)
    monkeypatch.setenv("SANDBOX_GYM_CRIU", path)
    for _ in range(2):  # a failure is not kept
        with pytest.raises(BackendUnavailable) as caught:
            criu.find()
        assert str(caught.value).startswith(
            f"SANDBOX_GYM_CRIU: {path} {why}, and criu 4.1 or newer is needed"
        )
        assert "unset SANDBOX_GYM_CRIU" in str(caught.value)


@as_root
def test_where_there_is_none_the_script_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "_SYSTEM_FOLDERS", (str(tmp_path),))
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(
        BackendUnavailable, match=r"there is no criu, and criu 4\.1 or newer is needed"
    ) as caught:
        criu.find()
    assert str(SCRIPT) in str(caught.value)
    old = program(tmp_path, "echo Version: 3.17.1")
    with pytest.raises(BackendUnavailable, match=f"{old} is 3.17.1, and criu 4.1 or newer is needed"):
        criu.find()
    check = doctor._criu()
    assert (check.state, check.remedy) == ("missing", str(SCRIPT))
    assert "one process with one thread" in check.meaning


@as_root
def test_outside_a_checkout_the_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "_SYSTEM_FOLDERS", ())
    monkeypatch.setattr(programs, "_SCRIPTS", tmp_path)
    monkeypatch.setenv("PATH", "/nonexistent")
    assert doctor._criu().remedy.startswith("apt-get install -y criu (Debian 13 has 4.1)")


def test_user_id_0_of_a_user_namespace_is_not_root() -> None:
    code = (
        "import os; from sandbox_gym.backends.native import criu; print(os.geteuid()); print(criu.look().why)"
    )
    command = ["unshare", "--user", "--map-root-user", sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30, cwd=ROOT)
    assert result.stdout.splitlines()[0] == "0"
    assert "criu works for root only" in result.stdout


# ---- doctor --------------------------------------------------------------------------------------------------------


@as_root
def test_doctor_tries_it() -> None:
    check = doctor._criu()
    assert (check.state, check.remedy) == ("ok", "")
    assert str(criu.find()) in check.meaning


@as_root
def test_doctor_where_criu_check_fails() -> None:
    """As in a container that has few capabilities."""
    code = "from sandbox_gym import doctor; check = doctor._criu(); print(check.state, check.meaning, check.remedy)"
    command = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30, cwd=ROOT)
    assert result.stdout.startswith("limited ")
    assert "CAP_SYS_ADMIN" in result.stdout
    assert "docker run --privileged" in result.stdout


# ---- the script ----------------------------------------------------------------------------------------------------


@as_root
def test_the_script_does_nothing_where_there_is_one(tmp_path: Path) -> None:
    program(tmp_path, "echo Version: 3.17.1")
    result = subprocess.run(
        [SCRIPT],
        capture_output=True,
        check=True,
        timeout=60,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )
    assert (result.stdout, result.stderr) == (b"", b"")


def bash(command: str, *arguments: str) -> str:
    """What a line prints that has the script's functions."""
    result = subprocess.run(
        ["bash", "-c", f'source "{SCRIPT}"; {command}', "bash", *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    return result.stdout


@pytest.mark.parametrize(
    ("version", "fit"),
    [
        ("4.1", True),
        ("4.1.1-1", True),
        ("10.0", True),
        ("4.0.9", False),
        ("3.17.1-2+deb12u2", False),
        ("(none)", False),
        ("", False),
    ],
)
def test_the_script_compares_versions(version: str, fit: bool) -> None:
    assert bash('is_fit "$1" && echo fit || echo unfit', version) == ("fit\n" if fit else "unfit\n")


ENTRIES = {
    "a.list": """\
# deb http://one.invalid/debian bookworm main
deb [ arch=amd64 trusted=yes ] file:ARCHIVE bookworm main contrib
deb http://three.invalid/debian bookworm main
""",
    "b.sources": """\
# Comments may stand before
Types: deb
URIs: http://one.invalid/debian
Suites: bookworm
Components: main

Enabled: yes
Types: deb
 deb-src
URIs: file:ARCHIVE
Suites: bookworm
# and within
 bookworm-updates
Components: main contrib
Architectures: amd64
Trusted: yes
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
 .
 mQINBF
 -----END PGP PUBLIC KEY BLOCK-----

Types: deb
URIs: http://three.invalid/debian
Suites: bookworm
Components: main
""",
}


def archive(folder: Path) -> None:
    """Debian's own on a small scale: a suite whose only source is criu's."""
    pool, index = folder / "pool", folder / "dists/trixie/main/source/Sources"
    (folder / "criu-9.0").mkdir(parents=True)
    (folder / "criu-9.0/Makefile").write_text("criu:\n")
    pool.mkdir()
    index.parent.mkdir(parents=True)
    packed = pool / "criu_9.0.orig.tar.xz"
    subprocess.run(["tar", "-cJf", packed, "-C", folder, "criu-9.0"], check=True, timeout=30)
    description = pool / "criu_9.0-1.dsc"
    description.write_text("Source: criu\n")

    def line(path: Path, name: str) -> str:
        content = path.read_bytes()
        return f" {hashlib.sha256(content).hexdigest()} {len(content)} {name}\n"

    files = line(packed, packed.name) + line(description, description.name)
    index.write_text(
        f"Package: criu\nBinary: criu\nVersion: 9.0-1\nDirectory: pool\nChecksums-Sha256:\n{files}\n"
    )
    (folder / "dists/trixie/Release").write_text(
        "Suite: trixie\nCodename: trixie\nComponents: main\nDate: Sat, 01 Jan 2000 00:00:00 UTC\n"
        "Valid-Until: Sat, 08 Jan 2000 00:00:00 UTC\n"
        f"SHA256:\n{line(index, 'main/source/Sources')}"
    )


@as_root
@pytest.mark.skipif(shutil.which("apt-get") is None, reason="not Debian")
@pytest.mark.parametrize("entry", ["a.list:2", "b.sources:7", "b.sources:8"])
def test_the_script_has_apt_fetch_the_source_from_the_same_archive(entry: str, tmp_path: Path) -> None:
    """The second entry of each format, with all its options; the others name archives that are not there."""
    archive(tmp_path / "archive")
    name = entry.partition(":")[0]
    (tmp_path / name).write_text(ENTRIES[name].replace("ARCHIVE", f"{tmp_path}/archive"))
    (tmp_path / "work").mkdir()
    before = sorted(os.listdir("/var/lib/apt/lists"))
    bash(
        'work=$1; fetch_source "$2" trixie || cat "$work/log" >&2', f"{tmp_path}/work", f"{tmp_path}/{entry}"
    )
    assert (tmp_path / "work/source/Makefile").read_text() == "criu:\n"
    assert sorted(os.listdir("/var/lib/apt/lists")) == before
    derived = (tmp_path / f"work/apt-trixie/newer.{name.rpartition('.')[2]}").read_text()
    assert name == "a.list" or "\n mQINBF\n" in derived
    assert "invalid" not in derived
