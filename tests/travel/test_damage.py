"""Archives that were changed, forged, or made elsewhere: refused in words, and nothing is left of them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from sandbox_gym import archive
from sandbox_gym.archive import Manifest, Part
from sandbox_gym.errors import SnapshotError
from sandbox_gym.sandbox import Snapshot


def test_any_changed_byte_is_noticed(saved: Path, tmp_path: Path, nothing_left: None) -> None:
    whole = saved.read_bytes()
    with open(saved, "rb") as file:
        manifest, blobs = archive.read(file)
    tail = archive._TAIL.size
    places = [0, 10, len(whole) - 1, len(whole) - tail, len(whole) - tail - 1, len(whole) - tail - 40]
    for blob in blobs:
        last = blob.part.stored_bytes - 1
        places += [blob.offset, blob.offset + last // 2, blob.offset + last]
    start = sum(part.stored_bytes for part in manifest.parts) + len(archive._HEAD)
    places += range(start, len(whole), 97)  # all over the manifest
    for place in places:
        damaged = bytearray(whole)
        damaged[place] ^= 1
        (tmp_path / "x.sbx").write_bytes(damaged)
        with pytest.raises(SnapshotError, match=r"x\.sbx: it"):
            Snapshot.load(tmp_path / "x.sbx")


def test_whatever_is_cut_off_or_added_is_noticed(saved: Path, tmp_path: Path, nothing_left: None) -> None:
    whole = saved.read_bytes()
    for wrong in (
        b"",
        whole[:5],
        whole[: len(whole) // 2],
        whole[:-1],
        whole[1:],
        whole[: -archive._TAIL.size],
        whole + b"\0",
        whole[:30] + whole[31:],
        whole[:30] + b"\0" + whole[30:],
        b"PK\3\4" + whole[4:],
        whole + whole,
    ):
        (tmp_path / "x.sbx").write_bytes(wrong)
        with pytest.raises(SnapshotError, match=r"x\.sbx: it"):
            Snapshot.load(tmp_path / "x.sbx")


def _rebuilt(
    saved: Path,
    target: Path,
    change: Callable[[Manifest], Manifest] = lambda manifest: manifest,
    *,
    fields: Callable[[dict[str, Any]], object] = lambda fields: None,
    contents: Callable[[list[bytes]], object] = lambda contents: None,
) -> Path:
    """Another archive, with hashes that are right, of parts and a manifest that were tampered with."""
    with open(saved, "rb") as file:
        manifest, blobs = archive.read(file)
        stored = [b"".join(blob._stored()) for blob in blobs]
    contents(stored)
    sealed = json.loads(change(manifest).encode())["manifest"]
    fields(sealed)
    body = json.dumps(sealed, separators=(",", ":")).encode()
    block = b'{"sha256":"%s","manifest":%s}\n' % (hashlib.sha256(body).hexdigest().encode(), body)
    tail = archive._TAIL.pack(len(block), archive._END)
    target.write_bytes(archive._HEAD + b"".join(stored) + block + tail)
    return target


def _with(number: int, **values: Any) -> Callable[[Manifest], Manifest]:
    def change(manifest: Manifest) -> Manifest:
        parts = list(manifest.parts)
        parts[number] = dataclasses.replace(parts[number], **values)
        return dataclasses.replace(manifest, parts=tuple(parts))

    return change


def _set(*path: Any, value: Any) -> Callable[[dict[str, Any]], object]:
    def change(fields: Any) -> None:
        for key in path[:-1]:
            fields = fields[key]
        fields[path[-1]] = value

    return change


_WRONG_FIELDS = {
    "another version": (_set("version", value=2), "version 2"),
    "another format": (_set("format", value="tar"), "'tar'"),
    "no parts": (_set("parts", value=[]), "manifest"),
    "parts of another kind": (_set("parts", value=[1]), "manifest"),
    "a part with more to it": (_set("parts", 0, "more", value=1), "manifest"),
    "a hash that is a path": (_set("parts", 0, "sha256", value="../../etc/passwd"), "manifest"),
    "a huge part": (_set("parts", 0, "stored_bytes", value=1 << 60), "not as long"),
    "a negative part": (_set("parts", 0, "stored_bytes", value=-1), "manifest"),
    "a size that is none": (_set("parts", 0, "bytes", value=1.5), "manifest"),
    "too many files": (_set("parts", 1, "files", value=1 << 60), "files"),
    "another number of parts": (_set("state", "parts", value=1), "manifest"),
    "a spec of none": (_set("state", "spec", value=[]), "known"),
    "a spec with more to it": (_set("state", "spec", "more", value=1), "known"),
    "no facts": (_set("facts", value={}), "known"),
    "facts of another kind": (_set("facts", "python", value=3), "known"),
    "a mount more": (_set("state", "attached", value=["/data"]), "disks"),
}


@pytest.mark.parametrize("what", _WRONG_FIELDS)
def test_a_manifest_that_tells_another_story(
    saved: Path, tmp_path: Path, what: str, nothing_left: None
) -> None:
    fields, words = _WRONG_FIELDS[what]
    place = _rebuilt(saved, tmp_path / "x.sbx", fields=fields)
    with pytest.raises(SnapshotError, match=words):
        Snapshot.load(place)


def _zstd(content: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(content)


def test_parts_that_are_not_what_the_manifest_says(saved: Path, tmp_path: Path, nothing_left: None) -> None:
    """Found only while they are unpacked: what was made until then goes again."""
    with open(saved, "rb") as file:
        parts = archive.read(file)[0].parts
    place = tmp_path / "x.sbx"
    for number, size in ((0, parts[0].bytes + 1), (1, parts[1].bytes - 1), (len(parts) - 1, 1 << 60)):
        _rebuilt(saved, place, _with(number, bytes=size))
        with pytest.raises(SnapshotError, match="holds not as much"):
            Snapshot.load(place)
    for content, words in (
        (b"no compressed data", "decompressed"),
        (_zstd(b""), "unpacked"),
        (_zstd(b"\0" * 5000), "unpacked"),
        (_zstd(b"\xff" * 5000), "unpacked"),
    ):
        forged = Part(hashlib.sha256(content).hexdigest(), len(content), 5000 if b"data" in content else 0, 9)
        if not forged.bytes:
            forged = dataclasses.replace(forged, bytes=len(zstandard.ZstdDecompressor().decompress(content)))

        def replace(contents: list[bytes], content: bytes = content) -> None:
            contents[1] = content

        _rebuilt(saved, place, _with(1, **dataclasses.asdict(forged)), contents=replace)
        with pytest.raises(SnapshotError, match=words):
            Snapshot.load(place)


def test_parts_in_another_order(saved: Path, tmp_path: Path, nothing_left: None) -> None:
    def swap(contents: list[bytes]) -> None:
        contents[0], contents[1] = contents[1], contents[0]

    with pytest.raises(SnapshotError, match="not what was written"):
        Snapshot.load(_rebuilt(saved, tmp_path / "x.sbx", contents=swap))


# ---- another machine ------------------------------------------------------------------------------------------------

_ELSEWHERE = {
    "processor": (("cpu_flags",), ["sse2", "avx9001"], "lacks avx9001"),
    "machine": (("machine",), "riscv64", "made on riscv64"),
    "criu": (("criu",), "99.1", "criu 99.1 wrote it"),
    "guest": (("guest",), "0" * 64, "other code inside the guest"),
    "version": (("python", "version"), "3.99.0", r"version is 3\.99\.0"),
    "prefix": (("python", "prefix"), "/opt/else", "prefix is /opt/else"),
    "build": (("python", "files"), {"/lib/libc.so.6": "0"}, r"/lib/libc\.so\.6 is another build"),
}


@pytest.mark.parametrize("what", _ELSEWHERE)
def test_what_this_machine_lacks_is_named(saved: Path, tmp_path: Path, what: str, nothing_left: None) -> None:
    path, value, words = _ELSEWHERE[what]
    place = _rebuilt(saved, tmp_path / "x.sbx", fields=_set("facts", *path, value=value))
    with pytest.raises(SnapshotError, match=words):
        Snapshot.load(place)


def test_folders_that_are_not_here(saved: Path, tmp_path: Path, nothing_left: None) -> None:
    place = tmp_path / "x.sbx"
    mount = {"source": "/no/such/data", "target": "/data"}
    for field, value in (("mounts", [mount]), ("python_path", ["/no/such/data"])):
        _rebuilt(saved, place, fields=_set("state", "spec", field, value=value))
        with pytest.raises(SnapshotError, match=r"/no/such/data.*is not here"):
            Snapshot.load(place)
    _rebuilt(saved, place, fields=_set("state", "spec", "rootfs", value="/no/such/root"))
    with pytest.raises(SnapshotError, match="/no/such/root is not here"):
        Snapshot.load(place)
