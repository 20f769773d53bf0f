"""What docker, podman, skopeo and others write: OCI image layouts, as a folder or a tar, and the tars of `docker save`.

https://github.com/opencontainers/image-spec (image-layout.md, manifest.md, config.md). Every blob is held to the hash
that names it, the layers also to those that the configuration has of them, uncompressed.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from .files import Files, Hashed, decompressed
from .tar import Damaged, Reader

_MOST_LISTED = 500  # layers, images or the like
_MOST_DEPTH = 4  # of indexes in indexes
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64", "i686": "386", "armv7l": "arm", "armv6l": "arm"}
_DIGEST = re.compile("sha256:([0-9a-f]{64})")


class _Blob(NamedTuple):
    """A file of the archive. `digest`: what it hashes to, where the archive says so."""

    name: str
    digest: str | None


@dataclass(frozen=True)
class Found:
    """An image in an archive. `digest`: of its configuration, which holds those of its layers and so names it."""

    digest: str  # hexadecimal
    config: dict[str, Any]
    layers: list[tuple[_Blob, str]]  # lowest first, each with the hash of what it decompresses to
    _files: Files

    def apply_layers(self, apply: Callable[[Reader], None]) -> None:
        """Calls `apply` for each layer, lowest first. Raises Damaged, once a layer turns out not to be what was meant:
        what was made of it until then counts for nothing.
        """
        for number, (blob, diff) in enumerate(self.layers, 1):
            try:
                self._files.check(*blob)
                with self._files.open(blob.name) as read:
                    source = Hashed(decompressed(read))
                    apply(Reader(source.read))
                    source.drain()
                if source.digest() != diff:
                    raise Damaged("it does not decompress to what the image's configuration says")
            except Damaged as error:
                raise Damaged(f"layer {number} of {len(self.layers)}: {error}") from None


@contextmanager
def opened(path: str, deadline: float) -> Iterator[Found]:
    """The one image in an archive that is for this machine. `deadline`: on the monotonic clock. Raises Damaged,
    SandboxTimeout, OSError.
    """
    with Files.of(path, deadline) as files:
        try:
            # Newer dockers write both; only this one has hashes of all that is in it.
            found = _from_layout(files) if "oci-layout" in files else _from_docker(files)
        except (KeyError, TypeError, AttributeError) as error:
            raise Damaged(f"it lacks what it must hold ({error!r})") from None
        yield found


def is_archive(path: str) -> bool:
    """Whether a path is a file, or a folder with an OCI layout in it; else it would be a root file system."""
    return os.path.isfile(path) or os.path.isfile(os.path.join(path, "oci-layout"))


# ---- which image -------------------------------------------------------------------------------------------------


def _from_layout(files: Files) -> Found:
    found = {
        blob.digest: manifest
        for blob, manifest in _manifests(files, _json(files, _Blob("index.json", None)), 0)
    }
    if len(found) > 1:
        raise Damaged(f"it holds {len(found)} images for this machine: export one by its name")
    if not found:
        raise Damaged(f"it holds no image for {_here()}")
    (manifest,) = found.values()
    blob = _described(manifest["config"])
    layers = [_described(layer) for layer in _list(manifest["layers"])]
    return _found(files, blob, layers)


def _manifests(files: Files, index: dict[str, Any], depth: int) -> Iterator[tuple[_Blob, dict[str, Any]]]:
    """Of images that can be for this machine, in an index and those that it names."""
    if depth > _MOST_DEPTH:
        raise Damaged("indexes of indexes of indexes")
    for descriptor in _list(index["manifests"]):
        place = descriptor.get("platform")
        if place and (place.get("os"), place.get("architecture")) != ("linux", _architecture()):
            continue
        blob = _described(descriptor)
        files.check(*blob)
        content = _json(files, blob)
        if "manifests" in content:
            yield from _manifests(files, content, depth + 1)
        elif "config" in content:
            yield blob, content


def _from_docker(files: Files) -> Found:
    if "manifest.json" not in files:
        raise Damaged("it is neither an OCI image layout nor what `docker save` writes")
    images = _json(files, _Blob("manifest.json", None), kind=list)
    if len(images) != 1:
        raise Damaged(f"it holds {len(images)} images: save one")
    layers = [_Blob(files.followed(name), None) for name in _list(images[0]["Layers"])]
    return _found(files, _Blob(files.followed(images[0]["Config"]), None), layers)


def _found(files: Files, blob: _Blob, layers: list[_Blob]) -> Found:
    files.check(*blob)
    block = files.read(blob.name)
    config = _parsed(block, dict)
    if (config.get("os"), config.get("architecture")) != ("linux", _architecture()):
        raise Damaged(
            f"it is for {config.get('os')}/{config.get('architecture')}, and this machine is {_here()}"
        )
    diffs = [_hex(diff) for diff in _list(config["rootfs"]["diff_ids"])]
    if len(diffs) != len(layers) or not 0 < len(diffs) <= _MOST_LISTED:
        raise Damaged(f"{len(layers)} layers, and hashes of {len(diffs)} in its configuration")
    return Found(hashlib.sha256(block).hexdigest(), config, list(zip(layers, diffs)), files)


def _described(descriptor: dict[str, Any]) -> _Blob:
    digest = _hex(descriptor["digest"])
    return _Blob(f"blobs/sha256/{digest}", digest)


def _hex(digest: Any) -> str:
    match = _DIGEST.fullmatch(digest)
    if match is None:
        raise Damaged(f"a hash {str(digest)[:100]!r}: only sha256 is known here")
    return match[1]


def _architecture() -> str:
    return _MACHINES.get(platform.machine(), platform.machine())


def _here() -> str:
    return f"linux/{_architecture()}"


def _json(files: Files, blob: _Blob, kind: type = dict) -> Any:
    return _parsed(files.read(blob.name), kind)


def _parsed(block: bytes, kind: type) -> Any:
    try:
        value = json.loads(block)
    except (ValueError, RecursionError):
        raise Damaged("what should be JSON is none") from None
    if not isinstance(value, kind):
        raise Damaged(f"JSON of another kind than {kind.__name__}")
    return value


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list) or len(value) > _MOST_LISTED:
        raise Damaged(f"no list of at most {_MOST_LISTED}")
    return value
