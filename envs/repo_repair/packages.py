"""The packages that tasks are made of: their source archives, fetched by pip, and what of them is shown and hidden.

Each is small, pure Python, under a permissive licence (BSD or MIT), and needs nothing else. Its own tests are in its
archive, pass in a few seconds, and have the same names in every run. An archive is known by its SHA-256 and kept in
`archives/` of this user's data (see `sandbox_gym._home`).
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from sandbox_gym import _home
from sandbox_gym.errors import SandboxError, SandboxTimeout

PIP_TIMEOUT = 300.0  # seconds, for all archives that are missing
_MAX_BYTES = 64 << 20  # of an archive's files


@dataclass(frozen=True)
class Package:
    """`shown`: the files and folders of the archive that an agent sees; `tests`: those that only a check sees, also
    where they lie inside of `shown`. `source`: the folder on sys.path; the module there has the package's name.
    """

    name: str
    version: str
    sha256: str
    shown: tuple[str, ...]
    tests: str
    source: str = "."

    @property
    def title(self) -> str:
        return f"{self.name} {self.version}"


_PINNED = (
    Package(
        "boltons",
        "26.2.0",
        "d39cfd15c1a1c3bd4d705c82252fa9edb8e4f5e8cc039f8e39afac7b1b47e92c",
        ("boltons", "LICENSE", "README.md"),
        "tests",
    ),
    Package(
        "cachetools",
        "8.0.2",
        "30ac523adfc118b51d2b2e7bad8a0ddb31370dfe2700c7f10ca224f36ccf81e0",
        ("src/cachetools", "LICENSE", "README.rst"),
        "tests",
        "src",
    ),
    Package(
        "inflection",
        "0.5.1",
        "1a29730d366e996aaacffb2f1f1cb9593dc38e2ddd30c91250c6dde09ea9b417",
        ("inflection", "LICENSE", "README.rst"),
        "test_inflection.py",
    ),
    Package(
        "parse",
        "1.22.4",
        "706d458feed5a81b02768d3156e8070baf6cee7d150a3a3c0cd43101a875c3b5",
        ("parse", "LICENSE", "README.rst"),
        "tests",
    ),
    Package(
        "sqlparse",
        "0.6.1",
        "ca722573f848ff2d30e40ea30f53a104b7dea7635ea9285891263eb2c58fb6e7",
        ("sqlparse", "LICENSE", "README.md"),
        "tests",
    ),
    Package(
        "tabulate",
        "0.10.0",
        "e2cfde8f79420f6deeffdeda9aaec3b6bc5abce947655d17ac662b126e48a60d",
        ("tabulate", "LICENSE", "README.md"),
        "test",
    ),
    Package(
        "toolz",
        "1.0.0",
        "2c86e3d9a04798ac556793bced838816296a2f085017664e4995cb40a1047a02",
        ("toolz", "tlz", "LICENSE.txt", "README.rst"),
        "toolz/tests",
    ),
    Package(
        "webcolors",
        "25.10.0",
        "62abae86504f66d0f6364c2a8520de4a0c47b80c03fc3a5f1815fedbef7c19bf",
        ("src/webcolors", "LICENSE", "README.rst"),
        "tests",
        "src",
    ),
)
PACKAGES = {package.name: package for package in _PINNED}


def choose(names: Iterable[str]) -> list[Package]:
    """Packages by name. Raises ValueError, which lists them, for one that is not known."""
    names = list(names)
    unknown = sorted(set(names) - set(PACKAGES))
    if unknown or not names:
        raise ValueError(f"packages are some of {', '.join(PACKAGES)}, not {unknown}")
    return [PACKAGES[name] for name in dict.fromkeys(names)]


def archive(package: Package) -> Path:
    """Where its archive is kept. It may not be there yet: see `fetch`."""
    return Path(_home.folder("archives"), package.sha256)


def fetch(packages: Sequence[Package], *, timeout: float = PIP_TIMEOUT) -> None:
    """Makes sure that the archives are there, and are what they must be: pip fetches those that aren't, in one go.

    pip runs an archive's own build script to name it, on this machine, as for any `pip install` of one; it looks at
    the hash first. Raises SandboxError, with pip's last lines; SandboxTimeout.
    """
    folder = Path(_home.folder("archives"))
    _home.make(str(folder))
    _home.check_owner(str(folder))
    missing = [package for package in packages if not _is(archive(package), package)]
    if not missing:
        return
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        _download(missing, Path(scratch), timeout)
        for package in missing:
            found = next((path for path in Path(scratch).iterdir() if _is(path, package)), None)
            if found is None:
                raise SandboxError(f"pip fetched no archive of {package.title} with SHA-256 {package.sha256}")
            os.replace(found, archive(package))


def _download(packages: Sequence[Package], folder: Path, timeout: float) -> None:
    if importlib.util.find_spec("pip") is None:
        raise SandboxError(
            f"{sys.executable} has no pip to fetch archives with: {sys.executable} -m ensurepip"
        )
    wanted = folder / "wanted"
    wanted.write_text("".join(f"{p.name}=={p.version} --hash=sha256:{p.sha256}\n" for p in packages))
    # Of these packages alone: their build tools may come as wheels.
    source = f"--no-binary={','.join(package.name for package in packages)}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-input", source]
    command += ["--require-hashes", "--dest", str(folder), "--requirement", str(wanted)]
    # In a session of its own: pip's end alone would leave the build scripts that it has started.
    pip = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        _, said = pip.communicate(timeout=timeout)
    except BaseException as error:
        os.killpg(pip.pid, signal.SIGKILL)
        pip.communicate()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        names = ", ".join(package.title for package in packages)
        raise SandboxTimeout(
            f"pip took longer than {timeout:g} s to fetch {names}: try again, or fewer with --packages"
        ) from None
    if pip.returncode:
        raise SandboxError(
            f"pip could not fetch archives (does it reach its index?):\n{said.strip()[-2000:]}"
        )


def _is(path: Path, package: Package) -> bool:
    return path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == package.sha256


@dataclass(frozen=True)
class Source:
    """A package's files, by their path in the archive: those shown, and the hidden tests. Text is UTF-8."""

    package: Package
    shown: dict[str, bytes]
    tests: dict[str, bytes]


def read(package: Package) -> Source:
    """Out of the archive, without writing anything. Raises SandboxError where it holds no such files."""
    shown: dict[str, bytes] = {}
    tests: dict[str, bytes] = {}
    size = 0
    with tarfile.open(archive(package), "r:gz") as tar:
        for member in tar:
            path = PurePosixPath(*PurePosixPath(member.name).parts[1:])
            if not member.isfile() or path.is_absolute() or ".." in path.parts:
                continue
            kept = tests if _below(path, package.tests) else shown
            if kept is shown and not any(_below(path, part) for part in package.shown):
                continue
            size += member.size
            if size > _MAX_BYTES:
                raise SandboxError(f"the archive of {package.title} holds more than {_MAX_BYTES} bytes")
            file = tar.extractfile(member)
            assert file is not None  # it is a file
            kept[str(path)] = file.read()
    if not shown or not tests:
        raise SandboxError(f"the archive of {package.title} has no {package.shown}, or no {package.tests}")
    return Source(package, dict(sorted(shown.items())), dict(sorted(tests.items())))


def _below(path: PurePosixPath, root: str) -> bool:
    return str(path) == root or PurePosixPath(root) in path.parents
