"""Images out of a docker daemon, by the docker command: it builds and saves; what it saves is read as an archive."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

from sandbox_gym.errors import BackendUnavailable, ImageError, SandboxTimeout

_MOST_SAID = 4000  # characters of docker's output in an error
_ANSWER = 20.0  # seconds for a daemon to say that it is there
_REMEDY = (
    "start a docker daemon, or write an archive where there is one (docker save -o image.tar NAME) and use "
    "Image.from_oci_archive('image.tar')"
)


def digest(name: str, deadline: float) -> str | None:
    """Of the image that has a name, hexadecimal. Raises BackendUnavailable, ImageError."""
    if not name or name.startswith("-") or "\0" in name:
        raise ValueError(f"{name!r} is no image's name")
    _check()
    try:
        said = _docker(["image", "inspect", "--format", "{{.Id}}", name], deadline)
    except ImageError as error:
        raise ImageError(
            f"docker has no image {name!r}: docker pull or docker build it first ({error})"
        ) from None
    return said.strip().removeprefix("sha256:")


@contextmanager
def saved(name: str, deadline: float) -> Iterator[str]:
    """The path of an archive of it. Raises ImageError, SandboxTimeout."""
    with tempfile.TemporaryDirectory(prefix="sandbox-gym-image-") as folder:
        path = os.path.join(folder, "image.tar")
        _docker(["save", "-o", path, name], deadline)
        yield path


def build(path: str, deadline: float) -> str:
    """Builds a Dockerfile, or the one in a folder, with all that lies beside it. The image's id."""
    file = os.path.join(path, "Dockerfile") if os.path.isdir(path) else path
    if not os.path.isfile(file):
        raise ValueError(f"{file!r} is no Dockerfile")
    _check()
    file = os.path.abspath(file)
    return _docker(["build", "--quiet", "--file", file, os.path.dirname(file)], deadline).strip()


def _check() -> None:
    """Raises BackendUnavailable."""
    if shutil.which("docker") is None:
        raise BackendUnavailable(f"there is no docker command here: {_REMEDY}")
    try:
        _docker(["version", "--format", "{{.Server.Version}}"], time.monotonic() + _ANSWER)
    except (ImageError, SandboxTimeout) as error:
        raise BackendUnavailable(f"no docker daemon answers ({error}): {_REMEDY}") from None


def _docker(arguments: list[str], deadline: float) -> str:
    """What it prints. Raises ImageError with what it says is wrong, SandboxTimeout."""
    try:
        done = subprocess.run(
            ["docker", *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=max(0.001, deadline - time.monotonic()),
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise SandboxTimeout(f"docker {arguments[0]} did not end in time: pass a longer timeout=") from None
    if done.returncode != 0:
        raise ImageError(f"docker {arguments[0]}: {done.stderr.strip()[-_MOST_SAID:]}")
    return done.stdout
