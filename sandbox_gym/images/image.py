"""What a sandbox begins with: a root file system, and the environment and folder that its programs start in."""

from __future__ import annotations

import builtins
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sandbox_gym.api import parse_bytes
from sandbox_gym.errors import ImageError

from . import archives, docker, store
from .layers import Tree
from .tar import Damaged

Path = str | os.PathLike[str]
_ENDINGS = (".tar", ".tar.gz", ".tgz", ".tar.zst")  # of names that are meant as a file's


@dataclass(frozen=True)
class Image:
    """Made by `from_oci_archive`, `from_directory`, `from_host`, `from_dockerfile` and `from_docker`;
    `Sandbox.create(image=image)` starts from it, and so does `Template.build`.

    What was unpacked lies in `$SANDBOX_GYM_HOME` (else your data folder), once for each digest. Of an image's
    configuration Env and WorkingDir count; commands run as root in the sandbox, whatever its User, and its Entrypoint
    and Cmd are not run. A python3 (3.10 or newer) has to be in it.
    """

    rootfs: str | None  # None: this host's Python environment
    digest: str | None = (
        None  # SHA-256 of its configuration, hexadecimal; None for a folder, and for the host
    )
    env: Mapping[str, str] = field(default_factory=dict, hash=False)
    workdir: str | None = None  # None: /workspace

    # ---- making ---------------------------------------------------------------------------------------------------

    @staticmethod
    def from_oci_archive(path: Path, *, timeout: float = 600.0) -> Image:
        """An OCI image layout (a folder or a tar of one) or what `docker save` writes, compressed or not. Needs no
        docker. An ordinary user's images have one owner, root; as root they have all.

        Raises:
            ImageError: it is damaged, means harm, or is not for this machine. Nothing of it is kept.
            SandboxTimeout: it was not unpacked within `timeout` seconds.
            OSError: it can't be read, or the disk is full.
        """
        deadline = time.monotonic() + timeout
        try:
            with archives.opened(os.fspath(path), deadline) as found:
                return _unpacked(found, deadline)
        except Damaged as error:
            raise ImageError(f"{os.fspath(path)}: {error}") from None

    @staticmethod
    def from_directory(path: Path) -> Image:
        """A folder that holds a root file system, as it is: nothing is copied, so leave it alone while sandboxes live.
        For root.
        """
        if not os.path.isdir(path):
            raise ValueError(f"{os.fspath(path)!r} is no folder that is there")
        return Image(os.path.realpath(path))

    @staticmethod
    def from_host() -> Image:
        """This host's system folders and Python environment, as without any image."""
        return Image(None)

    @staticmethod
    def from_docker(name: str, *, timeout: float = 600.0) -> Image:
        """An image of the docker daemon's, as `Sandbox.create(image="name:tag")`. Raises BackendUnavailable where none
        answers, and what `from_oci_archive` does.
        """
        deadline = time.monotonic() + timeout
        kept = _kept(docker.digest(name, deadline))
        if kept is not None:
            return kept
        with docker.saved(name, deadline) as path:
            return Image.from_oci_archive(path, timeout=max(0.001, deadline - time.monotonic()))

    @staticmethod
    def from_dockerfile(path: Path, *, timeout: float = 3600.0) -> Image:
        """Has the docker daemon build one: of a Dockerfile, or the one in a folder. Raises BackendUnavailable where no
        daemon answers, ImageError with the last of docker's output where it can't be built.
        """
        deadline = time.monotonic() + timeout
        return Image.from_docker(
            docker.build(os.fspath(path), deadline), timeout=max(0.001, deadline - time.monotonic())
        )

    @staticmethod
    def of(image: Image | Path | None, *, timeout: float = 600.0) -> Image:
        """What `Sandbox.create(image=...)` takes: None, an Image, a root file system's folder, an archive, or the name
        of an image that docker has.
        """
        if isinstance(image, Image):
            return image
        if image is None:
            return Image.from_host()
        path = os.fspath(image)
        if archives.is_archive(path):
            return Image.from_oci_archive(path, timeout=timeout)
        if os.path.isdir(path):
            return Image.from_directory(path)
        if not isinstance(image, str) or path.startswith((".", "/", "~")) or path.endswith(_ENDINGS):
            raise ValueError(f"image {path!r}: there is no such file or folder")
        return Image.from_docker(path, timeout=timeout)

    # ---- what is kept ---------------------------------------------------------------------------------------------

    @staticmethod
    def list() -> builtins.list[Image]:
        """Those that were unpacked, by digest."""
        return [image for digest in store.default().digests() if (image := _kept(digest)) is not None]

    @staticmethod
    def prune(max_bytes: int | str) -> builtins.list[str]:
        """Deletes those that were used least lately and have no sandboxes, until the others' files have at most that
        many bytes ("10Gi") together; and what killed processes have left. Returns their digests.
        """
        most = max_bytes if type(max_bytes) is int and max_bytes == 0 else parse_bytes(max_bytes)
        kept = store.default()
        kept.sweep()
        sizes = {digest: (kept.record(digest) or {"bytes": 0})["bytes"] for digest in kept.digests()}
        gone = []
        for digest in sorted(sizes, key=kept.used):
            if sum(sizes.values()) <= most:
                break
            if kept.delete(digest):
                gone.append(digest)
                del sizes[digest]
        return gone

    def delete(self) -> None:
        """Takes what was unpacked from the disk. Idempotent. Raises ImageError while a process has sandboxes of it."""
        if self.digest is not None and not store.default().delete(self.digest):
            raise ImageError(f"image {self.digest[:12]} has sandboxes: end the processes that use it first")


def _kept(digest: str | None) -> Image | None:
    record = store.default().record(digest) if digest is not None else None
    return _image(digest, record) if digest is not None and record is not None else None


def _unpacked(found: archives.Found, deadline: float) -> Image:
    env, workdir = _config(found.config)

    def fill(root: int) -> dict[str, Any]:
        with Tree(root, deadline) as tree:
            found.apply_layers(tree.apply)
            tree.finish()
            return {"env": env, "workdir": workdir, "bytes": tree.bytes}

    return _image(found.digest, store.default().add(found.digest, fill, deadline))


def _image(digest: str, record: dict[str, Any]) -> Image:
    return Image(store.default().root(digest), digest, record["env"], record["workdir"])


def _config(config: dict[str, Any]) -> tuple[dict[str, str], str | None]:
    """Env and WorkingDir. Raises Damaged."""
    inner = config.get("config") or {}
    if not isinstance(inner, dict):
        raise Damaged("a configuration without its inner part")
    listed, workdir = inner.get("Env") or [], inner.get("WorkingDir") or None
    if not isinstance(listed, list) or not all(
        isinstance(line, str) and line.find("=") > 0 for line in listed
    ):
        raise Damaged("an Env that is no list of NAME=value")
    if workdir is not None and not (isinstance(workdir, str) and workdir.startswith("/")):
        raise Damaged(f"a WorkingDir {str(workdir)[:200]!r}, which is no absolute path")
    if "\0" in "".join([*listed, workdir or ""]):
        raise Damaged("a null character in its Env or WorkingDir")
    return dict(line.split("=", 1) for line in listed), workdir
