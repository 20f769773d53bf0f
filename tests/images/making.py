"""Archives of images as others write them, made by Python's tarfile."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import platform
import tarfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

MACHINE = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
CONFIG = {"os": "linux", "architecture": MACHINE}
Compress = Callable[[bytes], bytes]
quickly: Compress = partial(gzip.compress, compresslevel=1)


def sha256(block: bytes) -> str:
    return hashlib.sha256(block).hexdigest()


def entry(
    name: str, kind: bytes = tarfile.REGTYPE, content: bytes = b"", **fields: Any
) -> tuple[tarfile.TarInfo, bytes]:
    """A member, and what is in it. `fields`: those of TarInfo."""
    info = tarfile.TarInfo(name)
    info.type, info.size, info.mode, info.mtime = kind, len(content), 0o644, 1_000_000_000
    if kind == tarfile.DIRTYPE:
        info.mode = 0o755
    for key, value in fields.items():
        setattr(info, key, value)
    return info, content


def folder(name: str, **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    return entry(name, tarfile.DIRTYPE, **fields)


def link(name: str, target: str) -> tuple[tarfile.TarInfo, bytes]:
    return entry(name, tarfile.SYMTYPE, linkname=target)


def hard_link(name: str, target: str) -> tuple[tarfile.TarInfo, bytes]:
    return entry(name, tarfile.LNKTYPE, linkname=target)


def layer(*entries: tuple[tarfile.TarInfo, bytes], format: int = tarfile.PAX_FORMAT) -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w", format=format) as tar:
        for info, content in entries:
            tar.addfile(info, io.BytesIO(content))
    return target.getvalue()


def config(layers: Sequence[bytes], **inner: Any) -> dict[str, Any]:
    """An image's configuration. `inner`: Env, WorkingDir and so on."""
    diffs = [f"sha256:{sha256(block)}" for block in layers]
    return {**CONFIG, "config": inner, "rootfs": {"type": "layers", "diff_ids": diffs}}


def layout(place: Path, layers: Sequence[bytes], *, compress: Compress = quickly, **inner: Any) -> Path:
    """An OCI image layout as a folder."""
    blobs = place / "blobs/sha256"
    blobs.mkdir(parents=True)

    def put(block: bytes) -> dict[str, Any]:
        (blobs / sha256(block)).write_bytes(block)
        return {"digest": f"sha256:{sha256(block)}", "size": len(block)}

    manifest = {
        "schemaVersion": 2,
        "config": put(json.dumps(config(layers, **inner)).encode()),
        "layers": [put(compress(block)) for block in layers],
    }
    (place / "index.json").write_text(
        json.dumps({"schemaVersion": 2, "manifests": [put(json.dumps(manifest).encode())]})
    )
    (place / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return place


def tarred(place: Path, source: Path, compress: Compress = bytes) -> Path:
    """A folder's content as a tar."""
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as tar:
        tar.add(source, ".")
    place.write_bytes(compress(target.getvalue()))
    return place


def docker_save(place: Path, layers: Sequence[bytes], *, compress: Compress = bytes, **inner: Any) -> Path:
    """What `docker save` wrote before version 25: a folder for each layer, and a link for one that is there already."""
    block = json.dumps(config(layers, **inner)).encode()
    names = [f"{number:064x}/layer.tar" for number in range(len(layers))]
    entries, first = [entry(f"{sha256(block)}.json", content=block)], dict[bytes, str]()
    for name, content in zip(names, layers):
        there = first.setdefault(content, name)
        entries.append(entry(name, content=content) if there == name else link(name, f"../{there}"))
    listing = [{"Config": f"{sha256(block)}.json", "RepoTags": ["x:latest"], "Layers": names}]
    entries.append(entry("manifest.json", content=json.dumps(listing).encode()))
    place.write_bytes(compress(layer(*entries)))
    return place
